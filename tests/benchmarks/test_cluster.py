"""Clusters of network namespaces: what ranks see, and that nothing is left of one however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.kit import cluster as cluster_file
from benchmarks.kit import link
from benchmarks.kit.cluster import (
    CGROUPS,
    SEGMENTS,
    Cluster,
    ClusterError,
    RankError,
    launch,
    link_settings,
    parse_rate,
)
from tests.benchmarks import calls
from tests.waits import LONG, until

HOLD = """
import sys, time
from benchmarks.kit.cluster import Cluster
from tests.benchmarks import calls
cluster = Cluster(2, "1gbit"{share})
print(*cluster.pids, *cluster.call(calls.start_child), flush=True)
time.sleep(300)
"""


def test_rates_are_parsed() -> None:
    assert [parse_rate(rate) for rate in ("200mbit", "2.5gbit", "64kbit", "uncapped")] == [200e6, 2.5e9, 64e3, None]
    for rate in ("200", "0mbit", "fast", "-1gbit", ""):
        with pytest.raises(ValueError, match="200mbit"):
            parse_rate(rate)


def test_a_bucket_holds_a_segment_and_what_flows() -> None:
    assert link_settings(200e6) == (32768, 40960)
    assert link_settings(500e6) == (65536, 81920)
    assert link_settings(1e9)[0] == max(SEGMENTS)
    for rate in (1e6, 300e6, 301e6, 5e9, 10e9):
        segment, burst = link_settings(rate)
        assert burst > segment and burst >= rate / 8 * 0.4e-3


def test_impossible_settings_are_refused() -> None:
    cases = [
        ({"nodes": 0}, "nodes=0"),
        ({"nodes": 2, "ranks_per_node": 0}, "ranks_per_node=0"),
        ({"nodes": 2, "rate": "quick"}, "rate='quick'"),
        ({"nodes": 2, "cpu_share": 3.0}, "cpu_share=3.0"),
    ]
    for settings, words in cases:
        with pytest.raises(ValueError, match=words):
            Cluster(**settings)  # type: ignore[arg-type]


def test_without_the_right_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, *_: int) -> None:
        raise PermissionError(1, f"{name}: Operation not permitted")

    monkeypatch.setattr(cluster_file, "_libc_call", refuse)
    with pytest.raises(ClusterError, match="run as root"):
        Cluster(2)


@pytest.mark.netns
def test_ranks_live_in_nodes_and_keep_their_state() -> None:
    mine = os.readlink("/proc/self/ns/net")
    with Cluster(nodes=2, ranks_per_node=2, rate="1gbit") as cluster:
        seen = cluster.call(calls.where, "x")
        assert [(rank, argument) for rank, argument, _ in seen] == [(rank, "x") for rank in range(4)]
        namespaces = [namespace for _, _, namespace in seen]
        assert namespaces[0] == namespaces[1] != namespaces[2] == namespaces[3]
        assert mine not in namespaces
        assert cluster.call(calls.keep_and_add, 1) == [10] * 4
        assert cluster.call(calls.keep_and_add, 10) == [110] * 4
        pids = cluster.pids
    assert os.readlink("/proc/self/ns/net") == mine
    assert not _alive(pids)
    with pytest.raises(ClusterError, match="closed"):
        cluster.call(calls.where, "x")


@pytest.mark.netns
def test_two_clusters_at_once_are_separate() -> None:
    with Cluster(2, "200mbit") as slow, Cluster(2, "1gbit") as fast:
        assert slow.call(calls.keep_and_add, 1) == [3, 3]
        assert fast.call(calls.keep_and_add, 2) == [6, 6]
        assert not {where[2] for where in slow.call(calls.where, "")} & {
            where[2] for where in fast.call(calls.where, "")
        }
        # The shape of both links: no rate is promised, but no link carries more than its own.
        assert link.measured_rate(slow) < 220e6
        assert link.measured_rate(fast) < 1.1e9
        fast.close()
        assert slow.call(calls.keep_and_add, 1) == [6, 6]


@pytest.mark.netns
@pytest.mark.parametrize(
    "call, expected, words",
    [
        (calls.fail_on, RankError, "rank 1 raised.*no such thing"),
        (calls.end_on, ClusterError, "rank 1 ended with status 3"),
    ],
)
def test_a_failed_rank_takes_the_cluster_down(
    call: Callable[[int], None], expected: type[Exception], words: str
) -> None:
    with Cluster(2) as cluster:
        pids = cluster.pids
        with pytest.raises(expected, match="(?s)" + words):
            cluster.call(call, 1)
        assert not _alive(pids)


@pytest.mark.netns
def test_a_stuck_rank_is_reported_with_its_stack() -> None:
    with Cluster(2) as cluster:
        pids = cluster.pids
        with pytest.raises(ClusterError, match="(?s)rank 1 did not answer within 3 s.*sleep_on"):
            cluster.call(calls.sleep_on, 1, timeout=3)
        assert not _alive(pids)


@pytest.mark.netns
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left_when_the_parent_is_killed(number: signal.Signals) -> None:
    share = ", cpu_share=0.9" if _has_quotas() else ""
    parent = subprocess.Popen([sys.executable, "-c", HOLD.format(share=share)], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 4 and _alive(pids) == set(pids)
        namespaces = {os.readlink(f"/proc/{pid}/ns/net") for pid in pids}
        groups = list(CGROUPS.glob(f"mixtrain_cluster-{parent.pid}-*")) if share else []
        assert len(groups) == (2 if share else 0)
        parent.send_signal(number)
        parent.wait(timeout=LONG)
        until(lambda: not _alive(pids) and not any(group.exists() for group in groups), "nothing to be left")
        assert not namespaces & _namespaces()
    finally:
        parent.kill()


@pytest.mark.netns
def test_launch_gives_a_command_its_place(capfd: pytest.CaptureFixture[str]) -> None:
    words = "echo $RANK of $WORLD_SIZE, $LOCAL_RANK of $LOCAL_WORLD_SIZE, $MASTER_ADDR:$MASTER_PORT"
    assert launch(["bash", "-c", words], nodes=2, rate="1gbit", ranks_per_node=2) == 0
    lines = sorted(line for line in capfd.readouterr().out.splitlines() if line.startswith("[rank"))
    assert lines == [f"[rank {rank}] {rank} of 4, {rank % 2} of 2, 10.77.0.1:29500" for rank in range(4)]


@pytest.mark.netns
def test_launch_fails_with_its_rank_and_in_time() -> None:
    assert launch(["bash", "-c", "[ $RANK = 0 ] || exit 7; sleep 300"], nodes=2, rate="uncapped") == 7
    assert launch(["bash", "-c", "sleep 300"], nodes=2, rate="uncapped", timeout=0.5) == 124
    assert launch(["no-such-command"], nodes=1, rate="uncapped") == 127


def _has_quotas() -> bool:
    return (CGROUPS / "cpu.cfs_quota_us").exists()


def _alive(pids: list[int]) -> set[int]:
    alive = set()
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state != "Z":
            alive.add(pid)
    return alive


def _namespaces() -> set[str]:
    found = set()
    for path in Path("/proc").glob("[0-9]*/ns/net"):
        try:
            found.add(os.readlink(path))
        except OSError:
            continue
    return found
