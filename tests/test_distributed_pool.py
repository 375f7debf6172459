"""The multi-rank test helper: results, errors, hangs, dead ranks, reuse."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from tests import distributed
from tests.waits import LONG, until_gone


def _sum_of_ranks(offset: int) -> float:
    value = torch.tensor([float(dist.get_rank() + offset)])
    dist.all_reduce(value)
    print(f"sum {value.item():g}")
    return value.item()


def _world() -> tuple[int, int, int, str, int]:
    return os.getpid(), dist.get_rank(), dist.get_world_size(), os.environ["WORLD_SIZE"], torch.get_num_threads()


def _random_number() -> float:
    os.environ["LEFT_BEHIND"] = "1"
    torch.set_default_dtype(torch.float64)
    return torch.rand(()).item()


def _find_leftovers() -> tuple[bool, torch.dtype]:
    return "LEFT_BEHIND" in os.environ, torch.get_default_dtype()


def _raise_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise KeyError(f"wrong on {rank}")
    dist.all_reduce(torch.zeros(1))


def _sleep_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(600)


def _die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        print("last words", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_all_reduce_and_tagged_output(world_size: int, capsys: pytest.CaptureFixture[str]) -> None:
    expected = sum(rank + 10 for rank in range(world_size))
    assert distributed.run(_sum_of_ranks, world_size, 10) == [expected] * world_size
    lines = capsys.readouterr().out.splitlines()
    assert sorted(line for line in lines if "sum" in line) == [
        f"[rank {rank}] sum {expected}" for rank in range(world_size)
    ]


def test_processes_are_reused_and_start_clean() -> None:
    first = distributed.run(_world, 2)
    numbers = distributed.run(_random_number, 2)
    again = distributed.run(_random_number, 2)
    assert distributed.run(_find_leftovers, 2) == [(False, torch.float32)] * 2
    assert distributed.run(_world, 2) == first
    assert [entry[1:] for entry in first] == [(0, 2, "2", 1), (1, 2, "2", 1)]
    assert [entry[0] for entry in first] == distributed.pids()[:2]
    assert numbers == again


def test_error_names_the_rank_and_keeps_the_pool() -> None:
    before = [entry[0] for entry in distributed.run(_world, 2)]
    with pytest.raises(distributed.RankError, match="(?s)rank 1 raised.*_raise_on.*wrong on 1") as caught:
        distributed.run(_raise_on, 2, 1)
    assert caught.value.rank == 1
    assert isinstance(caught.value.__cause__, KeyError)
    assert [entry[0] for entry in distributed.run(_world, 2)] == before


def test_hang_is_reported_with_stacks_and_ends_the_pool() -> None:
    before = [entry[0] for entry in distributed.run(_world, 2)]
    with pytest.raises(distributed.RankHang, match=r"(?s)rank (0, )?1 of 2 .*\[rank 1\].*_sleep_on"):
        distributed.run(_sleep_on, 2, 1, timeout=3)
    assert distributed.pids() == []
    for pid in before:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert distributed.run(_sum_of_ranks, 2, 0) == [1, 1]


def test_ranks_that_do_not_meet_are_started_once_more(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = [entry[0] for entry in distributed.run(_world, 2)]
    meet = distributed._Pool._meet

    def meet_in_vain_at_first(pool: Any, workers: list[Any]) -> None:
        with monkeypatch.context() as patch:
            if workers[1].process.pid == first[1]:
                patch.setattr(distributed, "MEETING_TIMEOUT", 4.0)
            meet(pool, workers)

    monkeypatch.setattr(distributed._Pool, "_meet", meet_in_vain_at_first)
    os.kill(first[1], signal.SIGSTOP)  # as a rank whose connection is lost
    assert [entry[1:3] for entry in distributed.run(_world, 2)] == [(0, 2), (1, 2)]
    assert not set(first) & set(distributed.pids())
    out = capsys.readouterr().out
    assert "rank 0 of 2 did not meet the others within 4 s" in out and "started once more, with new processes" in out


def test_dead_rank_is_reported_and_ends_the_pool() -> None:
    with pytest.raises(distributed.RankDied, match=r"(?s)rank 1 .*exit status -9.*last words"):
        distributed.run(_die_on, 2, 1)
    assert distributed.pids() == []
    assert distributed.run(_sum_of_ranks, 2, 0) == [1, 1]


def test_what_cannot_be_run_is_refused() -> None:
    with pytest.raises(ValueError, match="world_size=9"):
        distributed.run(_world, 9)
    with pytest.raises(ValueError, match="module-level"):
        distributed.run(lambda: None, 1)


def test_workers_die_with_their_parent() -> None:
    code = (
        "from tests import distributed, test_distributed_pool as t; import os, signal\n"
        "distributed.run(t._world, 1); print(distributed.pids()[0], flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    parent = subprocess.run(
        [sys.executable, "-c", code], cwd=distributed.ROOT, capture_output=True, text=True, timeout=LONG
    )
    pid = int(parent.stdout.splitlines()[-1])
    if psutil.pid_exists(pid):
        until_gone([psutil.Process(pid)])
