"""The schedule by layer: who computes when, and that gradients are reduced while others are still to come."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from parallel.pipeline import LayerPass, layer_passes
from tests import distributed
from tests.training.helpers import make_config
from tests.training.test_step import SAMPLES, SMALL, batches_of, build

CONFIG = (
    "experiment=gpt_tiny",
    *SMALL,
    f"training.global_batch_size={2 * SAMPLES}",
    "training.micro_batch_size=4",
    "training.recompute=full",
    "training.pass_order=by_layer",
)
COUNT = 2  # micro-batches of a rank


@pytest.mark.fast
def test_all_micro_batches_pass_a_layer_before_the_next() -> None:
    order = list(layer_passes(2, 2))
    assert order == [
        *(LayerPass(True, layer, number) for layer in (0, 1) for number in (0, 1)),
        *(LayerPass(False, layer, number) for layer in (1, 0) for number in (0, 1)),
    ]
    assert len(set(layer_passes(3, 5))) == 30


def _order(overrides: list[str]) -> tuple[list[str], list[bool]]:
    """Modules in the order of their calls in a second step, and reductions that began; and whether the numbers of the
    step are there."""
    from training.step import train_step

    config = make_config(overrides, 2)
    engine = build(config)
    (chunk,) = engine.bare_chunks
    train_step(engine, batches_of(config, 1)[:COUNT], 1)  # the first has all reductions at its end
    seen: list[str] = []

    def note(name: str) -> Any:
        def hook(*_: Any) -> None:
            seen.append(name + (" again" if name[0] == "l" and torch.is_grad_enabled() else ""))

        return hook

    modules = {"embedding": chunk.embedding, "head": chunk.output_layer}
    modules |= {f"layer {number}": layer for number, layer in enumerate(chunk.decoder.layers)}
    for name, module in modules.items():
        module.register_forward_pre_hook(note(name))
    groups = engine.chunks[0].bucket_groups
    for group in groups:
        start = group.start_grad_sync

        def noted(*args: Any, start: Any = start, **named: Any) -> Any:
            seen.append("reduction")
            return start(*args, **named)

        group.start_grad_sync = noted
    result = train_step(engine, batches_of(config, 2)[:COUNT], 2)
    engine.close()
    return seen, [result.updated, result.finite]


@pytest.mark.parametrize("tied", [False, True])
def test_modules_and_reductions_come_in_order(tied: bool) -> None:
    overrides = [*CONFIG, f"model.tie_embeddings={str(tied).lower()}", "parallel.overlap_grad_reduce=true"]
    for seen, updated in distributed.run(_order, 2, overrides):
        passes = [name for name in seen if name != "reduction"]
        assert passes == [
            *["embedding", "layer 0"] * COUNT,
            *["layer 1", "head"] * COUNT,
            *["layer 1 again"] * COUNT,
            *["layer 0 again"] * COUNT,
        ]
        assert all(updated)
        # once, when the last gradient is there: the embedding's, also of a table that the head had one for before
        assert seen.count("reduction") == 1 and seen[-1] == "reduction"
