"""The exact plan is the best of all plans, tried one by one; and the benchmark's command line."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest

from benchmarks.checks import planner_oracle
from benchmarks.checks.planner_oracle import COMPARED, case, exact
from moe.placement.planners.published import may_hold
from moe.placement.planners.solve import solve
from moe.placement.quotas import Costs, ReplicaLimits, held, outcome
from moe.placement_map import Integers, PlacementMap

pytestmark = pytest.mark.fast


def splits(total: int, ranks: int) -> Iterator[tuple[int, ...]]:
    """Every way to cut so many assignments into a part for each rank."""
    if ranks == 1:
        yield (total,)
        return
    for first in range(total + 1):
        for others in splits(total - first, ranks - 1):
            yield (first, *others)


def brute_force(totals: list[int], placement: PlacementMap, costs: Costs, limits: ReplicaLimits) -> int | None:
    experts, ranks = placement.num_experts, placement.num_ranks
    may_ER = may_hold(placement, costs, limits) | held(placement)
    is_home = np.zeros_like(may_ER)
    is_home[np.arange(experts), placement.primary_ranks] = True
    best = 10**9
    for quotas in product(*(splits(total, ranks) for total in totals)):
        quotas_ER = np.array(quotas, dtype=np.int64)
        used_ER = quotas_ER > 0
        if (used_ER & ~may_ER & ~is_home).any() or ((used_ER & ~is_home).sum(0) > limits.replica_slots).any():
            continue
        if limits.most is None or quotas_ER.sum(0).max() <= limits.most:
            best = min(best, outcome(quotas_ER, placement, costs, limits).seconds)
    return None if best == 10**9 else best


@pytest.mark.parametrize(("ranks", "experts", "most", "cases"), [(2, 4, 5, 25), (3, 3, 5, 12), (4, 4, 2, 6)])
def test_exact_is_the_best_of_all_plans(ranks: int, experts: int, most: int, cases: int) -> None:
    for number in range(cases):
        rng = np.random.default_rng([ranks, number])
        counts_RE: Integers = np.zeros((ranks, experts), np.int64)
        counts_RE[0] = rng.integers(0, most, experts)
        counts_RE[0, rng.integers(experts)] = most
        primaries, replica_slots = rng.permutation(experts), int(rng.integers(1, 3))
        replicas = [
            (int(e), r) for r in range(ranks) for e in rng.permutation(experts)[:replica_slots] if rng.random() < 0.3
        ]
        replicas = [(e, r) for e, r in replicas if primaries[e] // (experts // ranks) != r]
        placement = PlacementMap(experts, ranks, tuple(primaries.tolist()), tuple(sorted(replicas)))
        far = None if rng.random() < 0.3 else int(rng.integers(0, 3))
        costs = Costs(int(rng.integers(0, 3)), int(rng.integers(0, 2)), far)
        total = int(counts_RE.sum())
        limits = ReplicaLimits(
            replica_slots, int(rng.choice([2, ranks])), (None, -(-total // ranks), total // 2)[number % 3]
        )
        expected = brute_force(counts_RE.sum(0).tolist(), placement, costs, limits)
        assert exact(counts_RE, placement, costs, limits) == expected, number


def test_no_plan_of_ours_is_better_than_exact() -> None:
    kinds = set()
    for number in range(24):
        asked = case(1, number)
        kinds |= set(asked.kinds)
        arguments = asked.counts_RE, asked.placement, asked.costs, asked.limits
        found, least = outcome(solve(*arguments), asked.placement, asked.costs, asked.limits).seconds, exact(*arguments)
        assert least is not None and found >= least
    assert kinds == {"nothing costs", "pieces", "copies cost", "fresh copies", "nodes", "1 slot", "2 slots"}


def test_the_limit_is_kept_wherever_a_plan_keeps_it() -> None:
    found, kinds = Counter[str](), set()
    for number in range(160):
        asked = planner_oracle.limited_call(3, number)
        verdict = planner_oracle.grade(asked, exact)
        assert verdict in ("kept", "impossible"), (number, verdict)
        found[verdict] += 1
        kinds |= set(asked.kinds)
    assert found["kept"] > 80 and found["impossible"] > 10 and len(kinds) == 11


def test_the_exact_check_of_blocks_tries_all_ranks() -> None:
    sizes, experts = np.array([3, 3, 2, 2, 2]), np.zeros(5, np.int64)
    placement, node = PlacementMap(2, 2), ReplicaLimits(1, 2, most=6)
    assert planner_oracle.blocks_fit(sizes, experts, placement, Costs(), node)
    assert not planner_oracle.blocks_fit(sizes[:3], experts[:3], placement, Costs(), ReplicaLimits(1, 2, most=4))
    assert not planner_oracle.blocks_fit(
        sizes, experts, placement, Costs(replica_between=None), ReplicaLimits(1, 1, most=6)
    )


def test_command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["planner_oracle", "--cases", "4", "--json", "--markdown"])
    assert planner_oracle.main() == 0
    out = capsys.readouterr().out
    found = json.loads(out.splitlines()[-1])
    assert list(found["planners"]) == list(COMPARED) and found["solve"]["all"] == found["planners"]["solve"]
    assert all(1 <= figures["mean"] <= figures["worst"] for figures in found["planners"].values())
    assert "| planner | cases |" in out
    monkeypatch.setattr(sys, "argv", ["planner_oracle", "--limit", "--cases", "8", "--json"])
    assert planner_oracle.main() == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["limit"]["all"]
    assert found["calls"] == 8 == found["kept"] + found.get("impossible", 0)
    monkeypatch.setattr(sys, "argv", ["planner_oracle", "--cases", "0"])
    assert planner_oracle.main() == 2
    assert "--cases (0) must be at least 1" in capsys.readouterr().err
