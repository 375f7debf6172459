"""What the benchmark of the pipeline computes itself: the ideal, the routing, the rounds, and that its peers compute
the same."""

from __future__ import annotations

import pytest
import torch

from benchmarks.kit import accelerator, layer_step, rounds
from benchmarks.kit.cluster import Cluster
from benchmarks.kit.layer_step import EXCHANGES, IN_TURN, MEGATRON, Case, routing_map
from benchmarks.kit.rounds import Load, Rounds, is_disturbed
from benchmarks.speed.pipeline_degree import ideal_seconds, ideal_speedups, make_case
from moe.chunk_plan import Plan
from moe.experts.weights import Slab
from moe.layer import Setting, routed_experts
from tests.tolerances import MOE


@pytest.mark.parametrize("degree", [1, 2, 4, 8])
def test_the_ideal_of_a_forward_pass(degree: int) -> None:
    # Worked out by hand: the slower of both resources never waits but for the first (and last) chunk.
    assert ideal_seconds(1.0, 8.0, 0.0, degree) == pytest.approx(8.0 + 2.0 / degree)
    assert ideal_seconds(1.0, 0.5, 0.0, degree) == pytest.approx(2.5 if degree == 1 else 2.0)


def test_the_ideal_of_a_backward_pass() -> None:
    assert ideal_seconds(1.0, 1.0, 1.0, 1) == pytest.approx(3.0)  # the weight gradients run beside the answer
    assert ideal_seconds(1.0, 4.0, 4.0, 4) == pytest.approx(8.25)  # the computation waits for the first chunk only
    assert ideal_seconds(4.0, 1.0, 1.0, 4) == pytest.approx(8.0)  # the link never waits


def test_the_ideal_gain_is_over_one_thing_at_a_time() -> None:
    speedups = ideal_speedups({"forward": 1.0, "backward": 1.0}, {"forward": 2.0, "backward": 3.0}, degrees=[1])
    assert speedups["forward"] == pytest.approx(1.0)
    assert speedups["backward"] == pytest.approx(3.0 / 2.5)
    assert speedups["together"] == pytest.approx(5.0 / 4.5)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("top_k", [1, 2])
def test_the_routing_is_even_in_every_chunk(num_ranks: int, top_k: int) -> None:
    case = Case(tokens=8 * 48, hidden=8, width=8, top_k=top_k, experts_per_rank=2)
    chosen = routing_map(case, num_ranks)
    assert bool((chosen.sum(dim=1) == top_k).all())
    to_ranks = chosen.view(case.tokens, num_ranks, 2).any(dim=2)
    assert bool((to_ranks.sum(dim=1) == top_k).all())
    for chunk in to_ranks.view(8, 48, num_ranks).sum(dim=1):
        assert chunk.tolist() == [48 * top_k // num_ranks] * num_ranks
    assert chosen.sum(dim=0).tolist() == [case.tokens * top_k // (2 * num_ranks)] * (2 * num_ranks)


def test_the_virtual_accelerator_is_charged_for_every_product() -> None:
    case = Case(tokens=48, hidden=16, width=8, top_k=2, experts_per_rank=4)
    chosen = torch.zeros(48, 4, dtype=torch.bool).index_fill_(1, torch.tensor([0, 2]), True)
    weights = Slab(
        torch.randn(4, 16, 16, requires_grad=True), torch.randn(4, 16, 8, requires_grad=True), None, None, "swiglu"
    )
    expected = accelerator.step_flops(96, case.hidden, case.width)
    for strategy, factor in (("keep", 1.0), ("recompute", 1 + 2 / 9)):  # fc1 is two thirds of one of three parts
        engine = accelerator.VirtualAccelerator(1e9)
        x = torch.randn(48, 16, requires_grad=True)
        output = routed_experts(x, torch.rand(48, 4), chosen, weights, Plan(2, 2, strategy), Setting(experts=engine))
        output.backward(torch.randn(48, 16))
        assert engine.clock.busy_seconds == pytest.approx(expected * factor / 1e9)
        assert x.grad is not None and x.grad.shape == x.shape
    with pytest.raises(ValueError, match="flops_per_second=0"):
        accelerator.VirtualAccelerator(0)


def test_rounds_are_compared_one_by_one() -> None:
    result = Rounds({"a": {"all": [2.0, 4.0, 30.0]}, "b": {"all": [1.0, 2.0, 10.0]}}, 3, 0)
    assert result.median("a", "all") == 4.0
    assert result.speedup("b", "all", "a") == 2.0


def test_other_load_disturbs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(rounds.ANY_LOAD, raising=False)
    quiet, later = Load(10.0, 1.0, 100.0), Load(10.0, 1.0, 101.0)
    assert not is_disturbed(quiet, later)
    assert is_disturbed(quiet, Load(10.9, 1.0, 101.0))
    assert is_disturbed(quiet, Load(10.0, 1.9, 101.0))
    monkeypatch.setenv(rounds.ANY_LOAD, "1")  # as where nobody compares the times
    assert not is_disturbed(quiet, Load(10.9, 1.0, 101.0))
    assert Load.now(set()).others > 0


@pytest.mark.netns
def test_the_layers_agree_and_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "is_disturbed", lambda *_: False)  # whatever else this machine does
    with Cluster(2, "1gbit") as cluster:
        cluster.call(layer_step.start_megatron)
        assert cluster.call(layer_step.build, Case(96, 32, 16, 2, 2)) == [192, 192]
        assert max(cluster.call(layer_step.difference)) < MOE["float32"]
        case = make_case(cluster, Case(256, 64, 16, 2, 1), 0.01, virtual=True)  # computation far above all overheads
        assert case.flops_per_second is not None
        cluster.call(layer_step.build, case)
        variants = {"first": (IN_TURN,), "second": (Plan(4, 2),), "third": (MEGATRON,), "fourth": (EXCHANGES,)}
        result = rounds.measure(cluster, layer_step.step, variants, rounds=1)
    assert set(result.seconds) == set(variants)
    for seconds in result.seconds.values():
        assert seconds["together"][0] >= max(seconds["forward"][0], seconds["backward"][0]) > 0
