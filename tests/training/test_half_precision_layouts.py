"""In fp16 no layout overflows sooner than one process: gradients of activations are the same numbers in all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import distributed
from tests.tolerances import BF16_LOSS
from tests.training.helpers import make_config
from tests.training.test_step import SAMPLES, SMALL, batches_of, build

LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "DP2, by layer": (2, ["training.micro_batch_size=2", "training.pass_order=by_layer", "training.recompute=full"]),
    "context 2": (2, ["parallel.context=2"]),
    "PP2, DP2": (4, ["parallel.pipeline=2", "training.micro_batch_size=2"]),
}


def _largest_gradient(config: Any) -> float:
    """Return the largest gradient of the inputs of all layers' experts, over a step and all ranks; the routers' losses
    are in it."""
    from training.step import train_step

    model, found = build(config), torch.zeros(1)

    def look(module: torch.nn.Module, inputs: Any, outputs: Any) -> None:
        found.copy_(torch.maximum(found, outputs[0].abs().max()))

    for chunk in model.bare_chunks:
        for layer in chunk.decoder.layers:
            layer.pre_mlp_layernorm.register_full_backward_hook(look)
    data = model.topology.data
    result = train_step(model, batches_of(config, 1)[data.rank :: data.size], 1)
    assert result.updated
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    model.close()
    return found.item()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_activations_have_the_gradients_of_one_process(layout: str) -> None:
    # A loss of the routers that outweighs the tokens': it must be scaled as theirs is.
    model = [*("experiment=gpt_moe_tiny", *SMALL, "moe.aux_loss_coeff=0", "moe.z_loss_coeff=3")]
    model += [f"training.global_batch_size={SAMPLES}", f"training.micro_batch_size={SAMPLES}"]
    model += ["training.precision=fp16", "training.initial_loss_scale=1024"]
    for overrides in (model, [*model, "moe.z_loss_coeff=0"]):
        (expected,) = distributed.run(_largest_gradient, 1, make_config(overrides))
        ranks, changes = LAYOUTS[layout]
        (found, *_) = distributed.run(_largest_gradient, ranks, make_config([*overrides, *changes], ranks))
        assert found == pytest.approx(expected, rel=BF16_LOSS)
