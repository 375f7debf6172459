"""The replay counts what it should: copies, refreshes, second pushes, bytes by link; and its command line."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.planners import PLANNERS, Entry
from benchmarks.planners.replay import Replay, correlation, sent_rows, spread
from benchmarks.speed import placement_replay
from moe.placement.quotas import Costs, ReplicaLimits, at_primaries, shares
from moe.placement.trace import TraceHeader, TraceWriter
from moe.placement_map import Integers, PlacementMap

pytestmark = pytest.mark.fast


def expert_of(counts_RE: Integers, placement: PlacementMap, costs: Costs, limits: ReplicaLimits) -> Integers:
    """A planner for 4 ranks and experts: the largest expert is computed on the next rank alone."""
    quotas_ER = at_primaries(counts_RE, placement)
    expert = int(quotas_ER.sum(1).argmax())
    quotas_ER[expert] = np.roll(quotas_ER[expert], 1)
    return quotas_ER


def calls(*largest: int) -> Integers:
    """[M, R, E]: a micro-batch for each number, in which that expert is the largest."""
    counts = np.full((len(largest), 4, 4), 5)
    for batch, expert in zip(counts, largest):
        batch[:, expert] = 10
    return counts


@pytest.mark.parametrize(
    ("keeps", "replica_slots", "steps", "first", "refresh", "second"),
    [
        # without memory each micro-batch sends its copy twice
        (False, 1, [(0, 0, 1), (0, 0, 1)], 6, 0, 6),
        # with memory once a step, and then it is stale
        (True, 1, [(0, 0, 1), (0, 0, 1)], 2, 2, 0),
        (True, 1, [(0, 0, 0), (1, 1, 1), (0, 0, 0)], 3, 0, 0),
    ],
)
def test_weights_travel_once_for_each_reason(
    keeps: bool, replica_slots: int, steps: list[tuple[int, ...]], first: int, refresh: int, second: int
) -> None:
    replay = Replay(Entry(expert_of, keeps), Costs(), ReplicaLimits(replica_slots, 2))
    for largest in steps:
        replay.step(calls(*largest))
    found = replay.tally
    assert sum(found.pushes.values()) == first + refresh + second
    # expert 0 goes from rank 0 to 1, in the node; expert 1 on to rank 2, in the other
    for why, number in (("first", first), ("refresh", refresh), ("second", second)):
        assert found.pushes[why, "in_node"] + found.pushes[why, "between"] == number, why
    assert found.num_replicas == found.calls == sum(map(len, steps))


def both(counts_RE: Integers, placement: PlacementMap, costs: Costs, limits: ReplicaLimits) -> Integers:
    """Of 3 ranks and experts: experts 0 and 1 are computed on rank 2, but for those without assignments."""
    quotas_ER = at_primaries(counts_RE, placement)
    quotas_ER[:2] = np.stack([quotas_ER[:2].sum(1) * 0, quotas_ER[:2].sum(1) * 0, quotas_ER[:2].sum(1)], 1)
    return quotas_ER


def test_what_was_used_last_stays_where_slots_are_few() -> None:
    only = np.array([[9, 0, 1], [0, 9, 1], [0, 0, 1]])
    only_0, only_1 = only * [1, 0, 1], only * [0, 1, 1]
    for replica_slots, expected in ((1, 3), (2, 2)):
        replay = Replay(Entry(both, keeps=True), Costs(), ReplicaLimits(replica_slots, 3))
        replay.step(np.stack([only_0, only_1, only_0]))
        assert replay.tally.pushes == {("first", "in_node"): expected}
        replay.step(np.stack([only_0]))
        assert replay.tally.pushes == {("first", "in_node"): expected, ("refresh", "in_node"): 1}


def test_figures_are_by_call_and_step() -> None:
    replay = Replay(Entry(expert_of), Costs(), ReplicaLimits(1, 2))
    replay.step(calls(0, 1))
    replay.step(calls(0, 1))
    figures = replay.tally.figures(2, expert_bytes=1000, row_bytes=1)
    # loads 40, 20, 20, 20 become 0, 60, 20, 20
    assert figures["max_over_mean"] == figures["worst"] == 60 / 25
    assert (figures["copies"], figures["predicted_time"]) == (1, 1.5)
    assert (figures["first_bytes"], figures["refresh_bytes"], figures["second_bytes"]) == (2000, 0, 2000)
    # of 100 assignments: with expert 0 on rank 1 its 10 of rank 1 stay, and 5 each of ranks 1 to 3
    assert figures["off_rank"] == 0.75
    assert figures["in_node_bytes"] == 2000 + 4 * 50 and figures["between_bytes"] == 2000 + 4 * 100


def test_rows_are_those_of_the_shares() -> None:
    rng = np.random.default_rng(0)
    for ranks, node in ((1, 1), (4, 4), (4, 2), (6, 2), (8, 4)):
        for _ in range(5):
            counts_RE = rng.poisson(rng.lognormal(2, 1, 2 * ranks), (ranks, 2 * ranks))
            plan = PLANNERS["moonep"].plan
            quotas_ER = plan(counts_RE, PlacementMap(2 * ranks, ranks), Costs(), ReplicaLimits(0, node))
            sent_RR = np.stack([shares(counts_RE, quotas_ER, node, rank).sum(0) for rank in range(len(counts_RE))])
            ranks_R = np.arange(ranks)
            between = int(sent_RR[ranks_R[:, None] // node != ranks_R // node].sum())
            assert sent_rows(counts_RE, quotas_ER, node) == (int(sent_RR.sum() - sent_RR.trace()), between)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8, 64])
def test_counts_are_spread_evenly_and_exactly(ranks: int) -> None:
    counts_RE = np.random.default_rng(0).poisson(20, (4, 16))
    found = spread(counts_RE, ranks)
    assert found.shape == (ranks, 16) and (found.sum(0) == counts_RE.sum(0)).all() and (found >= 0).all()
    if ranks == 4:
        assert (found == counts_RE).all()
    elif ranks == 2:
        assert (found == counts_RE.reshape(2, 2, 16).sum(1)).all()
    elif ranks % 4 == 0:
        of_rank = found.reshape(4, -1, 16)
        for size in (of_rank, of_rank.sum(2)):  # of each expert, and in total
            assert (size.max(1) - size.min(1)).max() <= 1


def test_correlation() -> None:
    assert correlation([np.array([1, 2, 3]), np.array([2, 4, 6]), np.array([3, 2, 1])]) == pytest.approx(0)
    assert correlation([np.array([1, 1]), np.array([1, 2])]) is None


def replayed(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """The status, what was printed, and the object on the last line."""
    monkeypatch.setattr(sys, "argv", ["placement_replay", *arguments])
    status = placement_replay.main()
    out, err = capsys.readouterr()
    return status, err if status else out, None if status else json.loads(out.splitlines()[-1])


def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Two layers, one of them collapsed, and two workloads."""
    writer = TraceWriter(tmp_path / "trace", TraceHeader("a run", 16, 1, 2))
    rng = np.random.default_rng(0)
    for step in range(1, 4):
        counts = rng.poisson(10, (2, 4, 2, 16))
        counts[1, :, :, 3] = 1000
        writer.append(step, counts)
    writer.close()
    common = ["--slots", "1", "--node", "2", "--json", "--markdown"]
    path = str(tmp_path / "trace")
    status, out, found = replayed([path, "W1", "--steps", "2", "--ranks", "4", *common], monkeypatch, capsys)
    assert status == 0 and f"## {path}: 4 ranks, 16 experts, top 1, layers: 1, steps: 2, micro-batches: 4" in out
    assert [(result["trace"], result["collapsed"]) for result in found["results"]] == [
        (path, False),
        (path, True),
        ("W1", False),
        ("mean of 2", False),
    ]
    for result in found["results"]:
        assert list(result["planners"]) == list(PLANNERS)
        assert result["planners"]["static"]["predicted_time"] == 1 and result["planners"]["static"]["copies"] == 0
        assert result["planners"]["moonep"]["max_over_mean"] == pytest.approx(1, abs=0.05)
        assert result["planners"]["flex"]["second_bytes"] == 0 < result["planners"]["eplb"]["second_bytes"]
    near = replayed(["drifting@2", "--planners", "quota", "--copies-in-node", *common], monkeypatch, capsys)[2]
    far = replayed(["drifting@2", "--planners", "quota", *common], monkeypatch, capsys)[2]
    near, far = (result["results"][0]["planners"]["quota"] for result in (near, far))
    assert near["max_over_mean"] > far["max_over_mean"] and near["between_bytes"] < far["between_bytes"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["no/such"], "error: no/such: No such file or directory"),
        ([__file__], "is not a trace of routing counts"),
        (["W0", "--planners", "quota,best"], "error: --planners: there is no best; there are static, "),
        (["W0", "--slots", "-1"], "error: --slots (-1) must be at least 0"),
        (["W0", "--micro-batches", "0"], "error: --micro-batches (0) must be at least 1"),
        (["W0", "--top-k", "40"], "error: --top-k (40) must be at most --experts (32)"),
        (["W0", "--ranks", "5"], "error: --ranks (5) must divide the 32 experts of W0"),
        (
            ["steady@9", "--ranks", "2"],
            "error: steady@9: no popularity of 32 experts, top 2, is that unequal on 2 ranks",
        ),
    ],
)
def test_mistakes(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, err, _ = replayed(arguments, monkeypatch, capsys)
    assert status == 2 and said in err and err.count("\n") == 1
