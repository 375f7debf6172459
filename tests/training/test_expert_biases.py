"""Biases of experts follow what routers counted, to the bit, in every precision and layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests import distributed
from tests.training.helpers import make_config
from tests.training.test_step import SAMPLES, SMALL, batches_of, build

STEPS, LENGTH, RATE = 3, 256, 0.0123
# Micro-batches of 2,048 tokens, of which an expert gets hundreds: bf16 has no odd number above 256.
MODEL = [
    *("experiment=gpt_moe_tiny", *SMALL, f"model.sequence_length={LENGTH}", "model.hidden_size=16"),
    *("moe.router_score=sigmoid", "moe.expert_bias=true", f"moe.expert_bias_rate={RATE}"),
    f"training.global_batch_size={SAMPLES}",
]
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "single": (1, ["training.micro_batch_size=8"]),
    "DP2": (2, ["training.micro_batch_size=4", "optimizer.distributed=true"]),
    "TP2+SP": (2, ["training.micro_batch_size=8", "parallel.tensor=2", "parallel.sequence=true"]),
}


def _train(config: Any) -> tuple[list[torch.Tensor], torch.Tensor, set[torch.dtype]]:
    """The counts [L, E] of each step, the biases [L, E] after the last, and the types of the model's buffers."""
    from moe.layer import layers_of
    from training.step import train_step

    model, counts = build(config), []
    data = model.topology.data
    for step in range(1, STEPS + 1):
        result = train_step(model, batches_of(config, step)[data.rank :: data.size], step)
        assert result.tokens_per_expert is not None
        counts.append(result.tokens_per_expert)
    biases = [layer.router.expert_bias for layer in layers_of(model.bare_chunks).values()]
    types = {buffer.dtype for chunk in model.bare_chunks for buffer in chunk.buffers()}
    model.close()
    return counts, torch.stack([bias for bias in biases if bias is not None]).clone(), types


@pytest.mark.parametrize("precision,layout", [("bf16", name) for name in LAYOUTS] + [("fp16", "DP2")])
def test_biases_are_what_the_rule_makes_of_the_counts(precision: str, layout: str) -> None:
    ranks, overrides = LAYOUTS[layout]
    config = make_config([*MODEL, *overrides, f"training.precision={precision}"], ranks)
    for counts, biases, types in distributed.run(_train, ranks, config):
        expected = torch.zeros_like(biases)
        for counts_LE in counts:
            assert counts_LE.sum(dim=1).tolist() == [SAMPLES * LENGTH * (config.moe.top_k or 0)] * len(biases)
            expected += torch.sign(counts_LE.mean(dim=1, keepdim=True) - counts_LE).float() * RATE
        assert torch.equal(biases, expected)
        assert types == {torch.float32, torch.int64}


def _update(counts: list[int]) -> list[float]:
    from megatron.core.distributed import finalize_model_grads

    from moe.layer import layers_of

    model = build(make_config([*MODEL, "training.micro_batch_size=8", "training.precision=bf16"]))
    routers = [layer.router for layer in layers_of(model.bare_chunks).values()]
    for router in routers:
        assert router.local_tokens_per_expert is not None
        router.local_tokens_per_expert.copy_(torch.tensor(counts))
    finalize_model_grads(model.chunks, pg_collection=model.topology.groups)
    bias = routers[0].expert_bias
    assert bias is not None
    return bias.tolist()


def test_one_token_more_than_the_mean_counts_in_large_batches() -> None:
    mean = 3 * 2**25
    (bias,) = distributed.run(_update, 1, [mean - 1, mean, mean + 1, mean])
    assert bias == pytest.approx([RATE, 0, -RATE, 0], rel=1e-6)


def _loaded(bias: list[float]) -> list[float]:
    from models.weights import gather_logical, load_logical

    model = build(make_config([*MODEL, "training.micro_batch_size=8", "training.precision=bf16"]))
    weights = dict(gather_logical(model.bare_chunks))
    weights |= {name: torch.tensor(bias) for name in weights if name.endswith("expert_bias")}
    load_logical(model.bare_chunks, weights.__getitem__)
    return next(tensor for name, tensor in gather_logical(model.bare_chunks) if name.endswith("expert_bias")).tolist()


def test_imported_biases_are_not_rounded() -> None:
    bias = (torch.arange(4) + 34.2753).tolist()
    assert distributed.run(_loaded, 1, bias) == [bias]
