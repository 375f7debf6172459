"""Ranks that were started differently end together, each with one line that names what differs, its values and the
ranks that have them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from base.errors import ConfigError
from configs.compose import compose
from configs.schema import KEYS
from parallel.liveness import same_start
from parallel.liveness.same_start import Facts
from tests.test_packages import ROOT, TABLE
from tests.waits import LONG

SAME = {"optimizer.lr": "0.1", "file a.py": "00", "version of torch": "2"}


def outcomes(facts: list[Facts], sizes: list[int] | None = None, seconds: float = LONG) -> list[str]:
    """Let ranks meet in one store; the error of each, empty for none."""
    store, sizes = dist.HashStore(), sizes or [len(facts)] * len(facts)

    def start(rank: int) -> str:
        try:
            same_start.refuse_other_starts(facts[rank], store, rank, sizes[rank], timedelta(seconds=seconds))
        except (ConfigError, TimeoutError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    with ThreadPoolExecutor(len(facts)) as pool:
        return list(pool.map(start, range(len(facts))))


@pytest.mark.fast
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_ranks_of_one_start_go_on(ranks: int) -> None:
    assert outcomes([SAME] * ranks) == [""] * ranks


@pytest.mark.fast
def test_every_rank_names_the_key_the_values_and_the_ranks() -> None:
    other = SAME | {"optimizer.lr": "0.2"}
    (line,) = set(outcomes([SAME, other, SAME, SAME, other]))
    assert line == (
        "ConfigError: optimizer.lr must be the same on every rank: 0.1 on ranks 0,2-3; 0.2 on ranks 1,4. Start all "
        "nodes with the same command, files and versions."
    )
    (line,) = set(outcomes([SAME, {**SAME, "file a.py": "01", "file b.py": "02"}]))
    assert "file a.py, file b.py must be" in line
    assert "file a.py is 00 on rank 0; 01 on rank 1. file b.py is missing on rank 0; 02 on rank 1" in line
    (line,) = set(outcomes([SAME, {f"key {i}": "" for i in range(9)}]))
    assert "optimizer.lr, file a.py, version of torch and 9 more must be the same on every rank" in line


@pytest.mark.fast
@pytest.mark.parametrize("sizes", [[2, 3], [3, 2]])
def test_ranks_that_take_the_job_for_larger_are_told(sizes: list[int]) -> None:
    (line,) = set(outcomes([SAME, SAME], sizes))
    assert f"number of ranks must be the same on every rank: {sizes[0]} on rank 0; {sizes[1]} on rank 1" in line


@pytest.mark.fast
def test_a_rank_that_does_not_come_is_named() -> None:
    (outcome,) = set(outcomes([SAME], [2], seconds=0.2))
    assert outcome == "TimeoutError: rank 1 did not join the job within 0.2 s. Check the logs of all nodes."


@pytest.mark.fast
def test_facts_are_all_keys_but_those_that_may_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in same_start.SOURCE:
        (tmp_path / package / "deep").mkdir(parents=True)
    monkeypatch.setattr(same_start, "ROOT", tmp_path)
    for name in ("train.py", "moe/deep/a.py", "moe/a.h", "moe/notes.md"):
        (tmp_path / name).write_text(name)
    facts = same_start.facts_of(compose(["model=gpt_tiny"]))
    assert {name for name in facts if name in KEYS} == KEYS.keys() - same_start.MAY_DIFFER
    assert [name for name in facts if name.startswith("file")] == [
        "file moe/a.h",
        "file moe/deep/a.py",
        "file train.py",
    ]
    assert {"version of torch", "version of megatron-core"} < facts.keys()
    elsewhere = [f"{key}=1" if "budget" in key or "num" in key else f"{key}=b" for key in same_start.MAY_DIFFER]
    assert same_start.facts_of(compose(["model=gpt_tiny", *elsewhere])) == facts
    (tmp_path / "moe/a.h").write_text("otherwise")
    assert same_start.facts_of(compose(["model=gpt_tiny"])) != facts
    assert {"train", *same_start.SOURCE} == set(TABLE)


def test_one_other_key_ends_both_ranks_with_its_name(tmp_path: Path) -> None:
    """Without a launcher, which would end the other rank: each ends by itself."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "train.py", "model=gpt_tiny", f"run_dir={tmp_path / 'run'}"]
    ranks = [
        subprocess.Popen(
            [*command, f"training.seed={1 + rank}"],
            cwd=ROOT,
            env={**os.environ, **environment, "RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    lines = [rank.communicate(timeout=LONG)[1].strip().splitlines()[-1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [2, 2]
    for number, line in enumerate(lines):
        assert line.startswith(f"[rank {number}] config error: training.seed must be the same on every rank: 1 on rank")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
