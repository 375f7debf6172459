"""Our planner of expert placement: the compiled core, its reference, and what they promise."""

from __future__ import annotations

import numpy as np
import pytest

from moe.placement.planners.solve import _loaded, reference, solve
from moe.placement.quotas import Costs, ReplicaLimits, at_primaries, check, held, outcome, shares
from moe.placement_map import Integers, PlacementMap

pytestmark = pytest.mark.fast

FREE = Costs()


def skewed(ranks: int, experts: int, imbalance: float, seed: int, tokens: int = 65_536) -> Integers:
    """counts_RE of lognormal popularity, the busiest rank with so much more than the mean one."""
    generator = np.random.default_rng(seed)
    log, low, high = generator.standard_normal(experts), 0.0, 5.0
    for _ in range(40):
        spread = (low + high) / 2
        loads = np.exp(spread * log).reshape(ranks, -1).sum(1)
        low, high = (spread, high) if loads.max() / loads.mean() < imbalance else (low, spread)
    popularity = np.exp(low * log)
    return generator.multinomial(tokens, popularity / popularity.sum(), size=ranks).astype(np.int64)


def with_copies(placement: PlacementMap, quotas_ER: Integers) -> PlacementMap:
    """The map once a plan's copies are made."""
    new = np.nonzero((quotas_ER > 0) & ~held(placement))
    replicas = tuple((int(expert), int(rank)) for expert, rank in zip(*new, strict=True))
    return PlacementMap(placement.num_experts, placement.num_ranks, placement.primaries, placement.replicas + replicas)


def random_case(generator: np.random.Generator) -> tuple[Integers, PlacementMap, Costs, ReplicaLimits]:
    ranks = int(generator.choice([2, 4, 8, 16]))
    experts, replica_slots = ranks * int(generator.integers(1, 5)), int(generator.integers(0, 4))
    popularity = generator.dirichlet(np.full(experts, generator.choice([0.1, 0.5, 2.0])))
    counts_RE = generator.multinomial(int(generator.integers(10, 3000)), popularity, size=ranks)
    homes = generator.permutation(experts)
    taken, replicas = np.zeros(ranks, dtype=int), []
    for expert in generator.permutation(experts)[: int(generator.integers(0, 8))]:
        rank = int(generator.integers(ranks))
        if taken[rank] < replica_slots and homes[expert] // (experts // ranks) != rank:
            taken[rank] += 1
            replicas.append((int(expert), rank))
    far = None if generator.random() < 0.3 else int(generator.integers(0, 200))
    costs = Costs(int(generator.integers(0, 20)), int(generator.integers(0, 60)), far)
    most = None if generator.random() < 0.5 else int(counts_RE.sum() / ranks * generator.choice([1.0, 1.2]))
    pinned = frozenset(replica for replica in replicas if generator.random() < 0.3)
    limits = ReplicaLimits(replica_slots, int(generator.choice([1, 2, 4, ranks])), most, pinned)
    return counts_RE, PlacementMap(experts, ranks, tuple(homes.tolist()), tuple(replicas)), costs, limits


def test_the_compiled_core_has_the_reference_s_numbers() -> None:
    if _loaded() is None:
        pytest.skip("no C++ compiler")
    generator = np.random.default_rng(5)
    for _ in range(200):
        case = random_case(generator)
        quotas_ER = solve(*case)
        check(quotas_ER, case[0], case[1], case[3], with_pinned=True)
        np.testing.assert_array_equal(quotas_ER, reference(*case))
        home = outcome(at_primaries(case[0], case[1]), case[1], case[2], case[3])
        ours = outcome(quotas_ER, case[1], case[2], case[3])
        if case[3].most is None:
            assert ours.seconds <= home.seconds
        else:
            assert max(0, ours.loads_R.max() - case[3].most) <= max(0, home.loads_R.max() - case[3].most)


def test_the_compiled_search_for_a_limit_tries_as_often_as_the_reference() -> None:
    """The try that first keeps the limit is one of those for it."""
    if _loaded() is None:
        pytest.skip("no C++ compiler")
    counts_RE = np.zeros((8, 24), dtype=np.int64)
    counts_RE[0, :12] = [192, 13, 56, 173, 95, 189, 77, 168, 19, 3, 64, 32]
    counts_RE[0, 12:] = [41, 8, 52, 51, 129, 49, 78, 156, 13, 66, 25, 44]
    case = counts_RE, PlacementMap(24, 8), Costs(8, 85, 100), ReplicaLimits(1, 8, 218)
    np.testing.assert_array_equal(solve(*case), reference(*case))


@pytest.mark.parametrize("imbalance", [1.5, 2.0, 3.0])
@pytest.mark.parametrize("ranks", [8, 64])
def test_two_slots_are_enough_for_balance_and_a_second_call_copies_nothing(ranks: int, imbalance: float) -> None:
    limits = ReplicaLimits(replica_slots=2, ranks_per_node=ranks)
    for seed in range(3):
        counts_RE, placement = skewed(ranks, 256, imbalance, seed), PlacementMap(256, ranks)
        quotas_ER = solve(counts_RE, placement, FREE, limits)
        assert outcome(quotas_ER, placement, FREE, limits).imbalance < 1.01
        placement = with_copies(placement, quotas_ER)
        again = outcome(solve(counts_RE, placement, FREE, limits), placement, FREE, limits)
        assert again.imbalance < 1.01 and again.new_replicas <= 3


def test_a_call_is_left_alone_where_copies_do_not_pay() -> None:
    counts_RE, placement = skewed(8, 32, 1.5, 1), PlacementMap(32, 8)
    dear = Costs(replica_in_node=int(counts_RE.sum()), replica_between=None)
    np.testing.assert_array_equal(
        solve(counts_RE, placement, dear, ReplicaLimits(2, 8)), at_primaries(counts_RE, placement)
    )
    even_RE = np.full((8, 32), 10)
    np.testing.assert_array_equal(
        solve(even_RE, placement, FREE, ReplicaLimits(2, 8)), at_primaries(even_RE, placement)
    )


def test_copies_are_made_for_the_limit_whatever_they_cost() -> None:
    placement = PlacementMap(16, 4)
    for seed in range(5):
        counts_RE = skewed(4, 16, 1.8, seed, tokens=1000)
        dear = Costs(expert_overhead=8, replica_in_node=10_000, replica_between=100_000)
        most = int(1.2 * counts_RE.sum() / 4)
        limits = ReplicaLimits(2, 2, most)
        found = outcome(solve(counts_RE, placement, dear, limits), placement, dear, limits)
        assert found.loads_R.max() <= most < solve(counts_RE, placement, dear, ReplicaLimits(2, 2)).sum(0).max()
        inside = Costs(expert_overhead=8, replica_in_node=10_000, replica_between=None)
        quotas_ER = solve(counts_RE, placement, inside, limits)
        nodes = at_primaries(counts_RE, placement).sum(0).reshape(2, 2).sum(1)
        least = max(most, -(-int(nodes.max()) // 2))  # what a node has stays in it
        assert quotas_ER.sum(0).max() <= least + least // 500 + 2


def test_full_ranks_pass_on_their_own_experts() -> None:
    """Rank 0 has many small experts, of which the only rank with room has no slots for enough."""
    counts_RE = np.zeros((4, 56), np.int64)
    counts_RE[0, :14], counts_RE[0, [14, 28]], counts_RE[0, 42] = 10, 100, 40
    limits = ReplicaLimits(2, 4, most=100)
    quotas_ER = solve(counts_RE, PlacementMap(56, 4), Costs(replica_in_node=500), limits)
    check(quotas_ER, counts_RE, PlacementMap(56, 4), limits)
    assert quotas_ER.sum(0).max() == 100


def test_pinned_copies_keep_their_slots() -> None:
    counts_RE = np.full((2, 4), 10)
    counts_RE[:, 0] = 100
    for pinned, loads in ((frozenset(), 130), (frozenset({(1, 1)}), 200), (frozenset({(0, 1)}), 130)):
        placement = PlacementMap(4, 2, replicas=tuple(pinned))
        limits = ReplicaLimits(1, 2, most=130, pinned=pinned)
        quotas_ER = solve(counts_RE, placement, Costs(replica_in_node=50), limits)
        check(quotas_ER, counts_RE, placement, limits, with_pinned=True)
        assert quotas_ER.sum(0).max() <= loads and (loads == 130 or quotas_ER.sum(0).max() == loads)


def test_copies_cross_nodes_only_where_they_may_and_pay() -> None:
    counts_RE = np.ones((4, 8), dtype=np.int64)
    counts_RE[:, :4] = 100  # the first node has all the work
    placement = PlacementMap(8, 4)
    for between, num_between in ((None, 0), (10_000, 0), (1, 1)):
        costs, limits = Costs(replica_between=between), ReplicaLimits(2, 2)
        found = outcome(solve(counts_RE, placement, costs, limits), placement, costs, limits)
        assert (found.new_between >= num_between) and (found.new_between > 0) == (num_between > 0)


def test_shares_are_exact_and_prefer_what_is_near() -> None:
    counts_RE = skewed(8, 16, 2.0, 3, tokens=500)
    placement, limits = PlacementMap(16, 8), ReplicaLimits(3, 4)
    quotas_ER = solve(counts_RE, placement, FREE, limits)
    found = np.stack([shares(counts_RE, quotas_ER, limits.ranks_per_node, rank) for rank in range(8)])
    assert (found >= 0).all()
    np.testing.assert_array_equal(found.sum(2), counts_RE)
    np.testing.assert_array_equal(found.sum(0), quotas_ER)
    ranks = np.arange(8)
    np.testing.assert_array_equal(found[ranks, :, ranks], np.minimum(counts_RE, quotas_ER.T))
    # What a node's ranks could do for each other they do.
    away = found.copy()
    away[ranks, :, ranks] = 0
    inside = away.reshape(2, 4, 16, 2, 4)[[0, 1], :, :, [0, 1]].sum((1, 3))
    demand = (counts_RE - np.minimum(counts_RE, quotas_ER.T)).reshape(2, 4, 16).sum(1)
    headroom = (quotas_ER.T - np.minimum(counts_RE, quotas_ER.T)).reshape(2, 4, 16).sum(1)
    np.testing.assert_array_equal(inside, np.minimum(demand, headroom))
