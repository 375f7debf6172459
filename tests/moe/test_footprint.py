"""The memory that plans are predicted to take against what PyTorch's tracker of live tensors counts."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch

from benchmarks.speed.memory_reuse import tracked_peak
from moe.alltoall.flat import FlatAllToAll
from moe.chunk_plan import STRATEGIES, LayerLoad, Plan
from moe.experts import blocks
from moe.experts.weights import Slab
from moe.layer import Setting, routed_experts
from moe.planning.footprint import INDEX_BYTES, memory_bytes
from tests.distributed import run

HIDDEN, WIDTH, EXPERTS, TOP_K = 128, 192, 8, 2
PLANS = [
    *(
        Plan(degree, degree, strategy, lag)
        for strategy in STRATEGIES
        for degree, lag in ((1, 0), (4, 0), (4, 3), (8, 1))
    ),
    Plan(2, 4, "keep", 1),
    Plan(4, 2, "communicate_recompute", 1),
    Plan(2, 2, "communicate", 1),
    Plan(1, 8, "recompute", 0),
    Plan(8, 1, "recompute", 0),
]


def _peaks(dtype_name: str, num_tokens: int) -> list[tuple[Plan, int, int]]:
    """(plan, peak bytes of this rank's tensors, prediction for its load)."""
    dtype, group = getattr(torch, dtype_name), torch.distributed.group.WORLD
    assert group is not None
    rank, size, exchange = group.rank(), group.size(), FlatAllToAll(group)
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(num_tokens, HIDDEN, generator=generator).to(dtype).requires_grad_()
    fc1 = torch.randn(EXPERTS // size, 2 * WIDTH, HIDDEN).to(dtype).requires_grad_()
    fc2 = torch.randn(EXPERTS // size, HIDDEN, WIDTH).to(dtype).requires_grad_()
    # Every expert gets as much in every chunk: so the prediction is for these counts.
    first = torch.arange(num_tokens) % EXPERTS
    routing_map = torch.zeros(num_tokens, EXPERTS, dtype=torch.bool)
    routing_map[torch.arange(num_tokens), first] = routing_map[
        torch.arange(num_tokens), (first + EXPERTS // 2) % EXPERTS
    ] = True
    probs = torch.rand(num_tokens, EXPERTS, generator=generator).requires_grad_()
    output_grad = torch.randn(num_tokens, HIDDEN, generator=generator).to(dtype)
    token_rows = num_tokens * TOP_K  # of 2 ranks: each token goes to both
    load = LayerLoad(
        tokens=num_tokens,
        token_rows=token_rows,
        away_rows=token_rows // 2,
        assignments=token_rows,
        hidden_size=HIDDEN,
        hidden_columns=2 * WIDTH,
        width=WIDTH,
        element_size=dtype.itemsize,
        expert_assignments=token_rows // (EXPERTS // size),
        block=blocks.BLOCK_ROWS,
        tiled=blocks.are_tiled("cpu", dtype, HIDDEN, WIDTH),
    )
    weights, setting = Slab(fc1, fc2, None, None, "swiglu"), Setting(exchange, assignments_per_token=TOP_K)
    results = []
    for plan in PLANS:
        for tensor in (x, fc1, fc2, probs):
            tensor.grad = None
        step = functools.partial(routed_experts, x, probs, routing_map, weights, plan, setting)
        results.append(
            (plan, tracked_peak(step, output_grad, (x, probs, routing_map), (fc1, fc2)), memory_bytes(load, plan))
        )
    return results


@functools.cache
def _peaks_of_ranks(dtype: str, num_tokens: int = 2048) -> list[list[tuple[Plan, int, int]]]:
    return run(_peaks, 2, dtype, num_tokens)


@pytest.mark.parametrize(("dtype", "num_tokens"), [("float32", 2048), ("bfloat16", 256), ("float32", 256)])
def test_prediction_is_what_a_tracker_counts(dtype: str, num_tokens: int) -> None:
    for results in _peaks_of_ranks(dtype, num_tokens):
        for plan, peak, predicted in results:
            strategy = STRATEGIES[plan.memory_strategy]
            if "offload" in dataclasses.astuple(strategy):
                continue  # on a host what is offloaded is still there
            assert peak <= predicted <= 1.06 * peak, (plan, peak, predicted)


def test_strategies_save_what_they_promise() -> None:
    peaks = {plan: peak for plan, peak, _ in _peaks_of_ranks("float32")[0]}
    everything = peaks[Plan()]
    assert peaks[Plan(4, 4, "recompute", 0)] < 0.53 * everything
    assert peaks[Plan(8, 8, "communicate_recompute", 1)] < 0.40 * everything


def test_a_product_of_all_experts_gathers_all_their_rows() -> None:
    """On a GPU; tests/cuda/test_fake.py holds the numbers to what a step there needs."""
    load = LayerLoad(
        tokens=64,
        token_rows=128,
        away_rows=96,
        assignments=256,
        hidden_size=16,
        hidden_columns=48,
        width=24,
        element_size=2,
        expert_assignments=32,
    )
    few, many = (dataclasses.replace(load, expert_assignments=number) for number in (16, 256))
    for plan in PLANS:
        assert memory_bytes(few, plan) == memory_bytes(load, plan) == memory_bytes(many, plan)
    # The most is there when the input gradients are done: they and what they leave to do, the gradients of outputs and
    # of activations, all of every assignment; beside them what was received and is being sent.
    input_grads = 256 * (16 + (48 + 24) + 16 + 24)
    received, sent, kept = 128 * 16, 96 * 16, 128 * 16 + 256 * 48
    assert memory_bytes(load, Plan()) == 2 * (input_grads + received + sent + kept) + 256 * INDEX_BYTES
