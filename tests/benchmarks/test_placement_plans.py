"""What the simulation of plans counts, and its command line."""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import pytest

from benchmarks.planners import PLANNERS, Entry
from benchmarks.speed import placement_plans
from benchmarks.speed.placement_plans import GPU, Setting, busiest_domain, calls, planned
from moe.placement.quotas import Costs, ReplicaLimits, at_primaries
from moe.placement_map import Integers, PlacementMap

pytestmark = pytest.mark.fast


def halves(counts_RE: Integers, placement: PlacementMap, costs: Costs, limits: ReplicaLimits) -> Integers:
    """A planner: the experts of rank 0 are computed on rank 1 by half."""
    quotas_ER = at_primaries(counts_RE, placement)
    moved_E = quotas_ER[:, 0] // 2
    quotas_ER[:, 0] -= moved_E
    quotas_ER[:, 1] += moved_E
    return quotas_ER


def test_copies_are_new_once_where_they_are_kept() -> None:
    counts_RE = np.full((4, 4), [40, 10, 10, 20])
    setting = Setting(4, 4, 4, Costs(replica_in_node=8), "")
    for keeps in (False, True):
        found = planned(Entry(halves, keeps), setting, np.stack([counts_RE, counts_RE]))
        assert (found["copies"], found["fan_out"], found["imbalance"]) == (1, 1, 120 / 80)
        assert found["time"] == 128 / 160
        assert (found["again_copies"], found["again_time"]) == ((0, 120 / 160) if keeps else (1, 128 / 160))


def test_the_loads_are_as_asked() -> None:
    setting = Setting(8, 256, 4, GPU, "")
    counts_MRE = calls(setting, "2", 0)
    loads = counts_MRE[0].sum(0).reshape(8, -1).sum(1)
    assert counts_MRE.shape == (2, 8, 256) and loads.max() / loads.mean() == pytest.approx(2, rel=0.02)
    assert busiest_domain(counts_MRE[0], setting) == loads.reshape(2, 4).sum(1).max() / loads.sum() * 2


def told(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[Any, str]:
    monkeypatch.setattr(sys, "argv", ["placement_plans", *arguments])
    status = placement_plans.main()
    out, err = capsys.readouterr()
    return (json.loads(out.splitlines()[-1]), out) if status == 0 else (status, err)


def test_command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(placement_plans, "CALLS", 1)
    found, out = told(["--ranks", "8", "--seeds", "1", "--json", "--markdown"], monkeypatch, capsys)
    assert [(r["ratio"], r["costs"]) for r in found["results"]] == [
        (ratio, costs) for costs in ("balance", "a GPU's costs") for ratio in ("1.5", "2", "3")
    ]
    assert all(list(result["planners"]) == list(PLANNERS) for result in found["results"])
    assert all(result["planners"]["static"]["time"] == 1 for result in found["results"])
    assert len(found["planning"]) == 6 and "## All in one domain, balance" in out and "| solve | 3 |" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--seeds", "0"], "error: --seeds (0) must be at least 1"),
        (["--ranks", "9"], "error: --ranks (9) must be one of 8, 64, 256, 1024"),
    ],
)
def test_mistakes(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, err = told(arguments, monkeypatch, capsys)
    assert status == 2 and said in err and err.count("\n") == 1
