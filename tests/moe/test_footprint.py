"""The memory that plans are predicted to take against what PyTorch's tracker of live tensors counts."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch

from moe import blocks
from moe.dispatch import FlatAllToAll
from moe.plan import STRATEGIES, Load, Plan
from moe.planner import memory_bytes
from moe.schedule import routed_experts
from moe.weights import Weights
from moe.workspace import WORKSPACE
from tests.distributed import run

TOKENS, HIDDEN, WIDTH, EXPERTS, TOP_K = 2048, 128, 192, 8, 2
PLANS = [
    *(Plan(degree, degree, strategy, lag) for strategy in STRATEGIES for degree, lag in ((1, 0), (4, 0), (4, 3), (8, 1))),
    Plan(2, 4, "keep", 1),
    Plan(4, 2, "communicate_recompute", 1),
]


def _peaks(dtype_name: str) -> list[tuple[Plan, int, int]]:
    """(plan, peak bytes of this rank's tensors, prediction for its load)."""
    from torch.distributed._tools.mem_tracker import MemTracker

    dtype, device, group = getattr(torch, dtype_name), torch.device("cpu"), torch.distributed.group.WORLD
    assert group is not None
    rank, size, exchange = group.rank(), group.size(), FlatAllToAll(group)
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(TOKENS, HIDDEN, generator=generator).to(dtype).requires_grad_()
    fc1 = torch.randn(EXPERTS // size, 2 * WIDTH, HIDDEN).to(dtype).requires_grad_()
    fc2 = torch.randn(EXPERTS // size, HIDDEN, WIDTH).to(dtype).requires_grad_()
    # Every expert gets as much in every chunk: so the prediction is for these counts.
    first = torch.arange(TOKENS) % EXPERTS
    routing_map = torch.zeros(TOKENS, EXPERTS, dtype=torch.bool)
    routing_map[torch.arange(TOKENS), first] = routing_map[torch.arange(TOKENS), (first + EXPERTS // 2) % EXPERTS] = True
    probs = torch.rand(TOKENS, EXPERTS, generator=generator).requires_grad_()
    output_grad = torch.randn(TOKENS, HIDDEN, generator=generator).to(dtype)
    rows = TOKENS * TOP_K  # of 2 ranks: each token goes to both
    load = Load(
        tokens=TOKENS,
        rows=rows,
        away_rows=rows // 2,
        pairs=rows,
        hidden_size=HIDDEN,
        hidden_columns=2 * WIDTH,
        width=WIDTH,
        element_size=dtype.itemsize,
        expert_pairs=rows // (EXPERTS // size),
        block=blocks.BLOCK_ROWS,
        tiled=blocks.are_tiled("cpu", dtype, HIDDEN, WIDTH),
    )
    results = []
    WORKSPACE.pooled = False
    try:
        for plan in PLANS:
            for tensor in (x, fc1, fc2, probs):
                tensor.grad = None
            tracker = MemTracker()
            tracker.track_external(x, probs, routing_map, output_grad, fc1, fc2)
            with tracker:
                before = tracker.get_tracker_snapshot("current")[device]["Total"]
                output = routed_experts(x, probs, routing_map, Weights(fc1, fc2, None, None, "swiglu"), plan, exchange, None, TOP_K)
                edge = torch.autograd.graph.get_gradient_edge(output)
                del output  # the next layer has it
                torch.autograd.backward(edge, output_grad)
                peak = tracker.get_tracker_snapshot("peak")[device]["Total"]
            gradients = (fc1.numel() + fc2.numel()) * dtype.itemsize
            results.append((plan, peak - before - gradients, memory_bytes(load, plan)))
    finally:
        WORKSPACE.pooled = True
    return results


@functools.cache
def _peaks_of_ranks(dtype: str) -> list[list[tuple[Plan, int, int]]]:
    return run(_peaks, 2, dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_prediction_is_what_a_tracker_counts(dtype: str) -> None:
    for results in _peaks_of_ranks(dtype):
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
