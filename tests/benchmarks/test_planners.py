"""The planners of expert placement that others have published: answers that are valid, and what defines each."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from benchmarks.planners import PLANNERS
from moe.placement.quotas import Costs, ReplicaLimits, at_primaries, check, outcome
from moe.placement_map import Integers, PlacementMap

pytestmark = pytest.mark.fast

NODE = Costs(replica_between=None)


def cases() -> Iterator[tuple[Integers, PlacementMap, Costs, ReplicaLimits]]:
    """Small random ones: skewed counts, homes in any order, copies that are there, nodes, costs."""
    rng = np.random.default_rng(0)
    for case in range(40):
        ranks, replica_slots = int(rng.choice([1, 2, 4, 8])), int(rng.integers(0, 4))
        experts = ranks * int(rng.integers(1, 5))
        counts_RE = rng.poisson(rng.lognormal(2, 1.5, experts), (ranks, experts))
        replicas = [
            (rank % experts, (rank + 1) % ranks) for rank in range(ranks) if replica_slots and ranks > 1 and case % 2
        ]
        primaries = tuple(int(home) for home in rng.permutation(experts)) if case % 3 == 0 else None
        bare = PlacementMap(experts, ranks, primaries)
        kept = tuple((expert, rank) for expert, rank in replicas if bare.primary_ranks[expert] != rank)
        costs = Costs(case % 3, case % 7, case % 11 * 2)
        yield (
            counts_RE,
            PlacementMap(experts, ranks, primaries, kept),
            costs,
            ReplicaLimits(replica_slots, max(1, ranks // 2)),
        )


@pytest.mark.parametrize("name", PLANNERS)
def test_answers_are_valid_and_the_same_again(name: str) -> None:
    for counts_RE, placement, costs, limits in cases():
        before = counts_RE.copy()
        quotas_ER = PLANNERS[name].plan(counts_RE, placement, costs, limits)
        replica_slots = placement.num_expert_slots if PLANNERS[name].own_slots else limits.replica_slots
        check(quotas_ER, counts_RE, placement, ReplicaLimits(replica_slots, limits.ranks_per_node))
        assert quotas_ER.dtype == np.int64 and (counts_RE == before).all()
        assert (quotas_ER == PLANNERS[name].plan(counts_RE, placement, costs, limits)).all()


@pytest.mark.parametrize("name", [name for name, entry in PLANNERS.items() if not entry.own_slots])
def test_copies_stay_in_the_node_where_none_may_leave_it(name: str) -> None:
    rng = np.random.default_rng(1)
    placement, limits = PlacementMap(16, 8), ReplicaLimits(2, 4)
    for _ in range(10):
        counts_RE = rng.poisson(rng.lognormal(3, 1.5, 16), (8, 16))
        quotas_ER = PLANNERS[name].plan(counts_RE, placement, NODE, limits)
        assert outcome(quotas_ER, placement, Costs(), limits).new_between == 0


@pytest.mark.parametrize("name", PLANNERS)
def test_nothing_is_no_problem(name: str) -> None:
    quotas_ER = PLANNERS[name].plan(np.zeros((4, 8), np.int64), PlacementMap(8, 4), Costs(), ReplicaLimits(2, 4))
    assert not quotas_ER.any()


def one_hot(hot: int = 800) -> Integers:
    """4 ranks, 8 experts: the first has most, each rank as many."""
    counts_RE = np.full((4, 8), 10)
    counts_RE[:, 0] = hot // 4
    return counts_RE


def plan(name: str, counts_RE: Integers, limits: ReplicaLimits, costs: Costs | None = None) -> Integers:
    ranks, experts = counts_RE.shape
    return PLANNERS[name].plan(counts_RE, PlacementMap(experts, ranks), costs or Costs(), limits)


def test_shadowing_computes_hot_experts_where_their_tokens_are() -> None:
    quotas_ER = plan("shadowing", one_hot(), ReplicaLimits(1, 4))
    assert (quotas_ER[0] == 200).all()
    assert (quotas_ER[1:] == at_primaries(one_hot(), PlacementMap(8, 4))[1:]).all()
    # as long as it pays: 840 at the busiest rank become 280
    assert (plan("shadowing", one_hot(), ReplicaLimits(1, 4), Costs(replica_in_node=559))[0] == 200).all()
    dear = plan("shadowing", one_hot(), ReplicaLimits(1, 4), Costs(replica_in_node=560))
    assert (dear == at_primaries(one_hot(), PlacementMap(8, 4))).all()


def test_eplb_fills_the_slots_and_splits_evenly() -> None:
    quotas_ER = plan("eplb", one_hot(), ReplicaLimits(1, 4))
    assert quotas_ER[0].tolist() == [200, 200, 200, 200]
    assert (quotas_ER > 0).sum() == 8 + 3  # the fourth copy, of the second expert, finds no other slot


def test_moonep_is_exact() -> None:
    rng = np.random.default_rng(2)
    for ranks, experts in ((2, 4), (4, 4), (8, 32), (16, 64)):
        for _ in range(10):
            counts_RE = rng.poisson(rng.lognormal(2, 2, experts), (ranks, experts))
            quotas_ER = plan("moonep", counts_RE, ReplicaLimits(0, ranks))
            share, rest = divmod(int(counts_RE.sum()), ranks)
            assert quotas_ER.sum(0).tolist() == [share + (rank < rest) for rank in range(ranks)]


def test_quota_is_a_hundredth_above_the_mean_where_slots_are_enough() -> None:
    rng = np.random.default_rng(3)
    for _ in range(5):
        counts_RE = rng.poisson(rng.lognormal(6, 0.6, 64), (16, 64))
        quotas_ER = plan("quota", counts_RE, ReplicaLimits(3, 16))
        mean = -(-int(counts_RE.sum()) // 16)
        most = int(at_primaries(counts_RE, PlacementMap(64, 16)).sum(0).max())
        assert quotas_ER.sum(0).max() <= mean + -(-mean // 100) + 2 * -(-most // 100)
        assert (quotas_ER[np.arange(64), np.arange(64) // 4] > 0).all()  # homes keep one at least
    # without enough slots: the lowest threshold at which what is over has room
    assert plan("quota", one_hot(), ReplicaLimits(1, 4)).sum(0).max() < 300
    no_slots = plan("quota", one_hot(), ReplicaLimits(0, 4))
    assert (no_slots == at_primaries(one_hot(), PlacementMap(8, 4))).all()


def test_quota_makes_no_small_copies() -> None:
    """A copy takes at least what is left, by the ranks that could take it."""
    counts_RE = np.array([[400, 4, 100, 100], [400, 4, 100, 100]])  # 808 and 400
    quotas_ER = plan("quota", counts_RE, ReplicaLimits(2, 2))
    assert quotas_ER.sum(0).max() <= 611 and quotas_ER[1].tolist() == [8, 0]


def test_least_loaded_takes_what_is_over_to_the_rank_with_the_least() -> None:
    quotas_ER = plan("least_loaded", one_hot(), ReplicaLimits(4, 4))
    full = -(-11 * 1080 // 40)
    assert quotas_ER.sum(0).max() <= full
    assert quotas_ER[0, 0] == full - 40  # the home keeps what fits, beside its other expert
    balanced = np.full((4, 8), 10)
    balanced[:, 0] = 17  # 1.24: not worth it
    assert (plan("least_loaded", balanced, ReplicaLimits(4, 4)) == at_primaries(balanced, PlacementMap(8, 4))).all()


def test_flex_expands_while_it_pays_and_keeps_its_copies() -> None:
    limits = ReplicaLimits(1, 4)
    quotas_ER = plan("flex", one_hot(), limits)
    replicas = tuple((int(e), int(r)) for e, r in zip(*np.nonzero(quotas_ER)) if e // 2 != r)
    assert outcome(quotas_ER, PlacementMap(8, 4), Costs(), limits).imbalance < 1.2 and replicas
    dear = Costs(replica_in_node=10_000)
    assert (plan("flex", one_hot(), limits, dear) == at_primaries(one_hot(), PlacementMap(8, 4))).all()
    again = PLANNERS["flex"].plan(one_hot(), PlacementMap(8, 4, replicas=replicas), dear, limits)
    assert (again == quotas_ER).all()


def test_flex_shrinks_what_is_cold_for_what_is_hot() -> None:
    placement = PlacementMap(8, 4, replicas=((7, 1), (7, 2), (4, 3)))  # all slots of the other ranks
    quotas_ER = PLANNERS["flex"].plan(one_hot(), placement, Costs(), ReplicaLimits(1, 4))
    assert (quotas_ER[0] > 0).sum() >= 3 and (quotas_ER[7] > 0).sum() < 3


def test_flex_moves_a_copy_from_the_busiest_rank() -> None:
    counts_RE = np.array([[100, 75, 0, 0]] * 4)
    placement = PlacementMap(4, 4, replicas=((0, 1),))  # beside the second expert's home
    quotas_ER = PLANNERS["flex"].plan(counts_RE, placement, Costs(), ReplicaLimits(1, 4))
    assert quotas_ER.tolist() == [[200, 0, 200, 0], [0, 150, 0, 150], [0] * 4, [0] * 4]
