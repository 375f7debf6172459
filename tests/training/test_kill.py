"""SIGKILL of all ranks, also while a checkpoint is written; then the same command gives the run that was never killed.

A few kills here; benchmarks/kill_resume.py does more.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from benchmarks.kill_resume import Kill, command, differences, read_steps, run_once
from training import checkpoint

TRIES = 5  # a checkpoint of a tiny model is written in a moment: a kill may come too late for it


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("ranks", "layout"), [(1, []), (2, ["parallel.expert=2"])], ids=["one process", "torchrun EP2"])
def test_killed_run_ends_as_if_it_never_was(
    data: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, layout: list[str]
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    rng = random.Random(ranks)
    overrides = ["experiment=gpt_moe_tiny", "model.hidden_dropout=0.1", "training.steps=10", "checkpoint.interval=2", *layout, *data]
    whole, disturbed = tmp_path / "whole", tmp_path / "disturbed"
    run_once(command(ranks, [*overrides, f"run_dir={whole}"]), whole, tmp_path / "whole.log")
    line = command(ranks, [*overrides, f"run_dir={disturbed}"])
    log = tmp_path / "disturbed.log"

    for _ in range(TRIES):
        start = run_once(line, disturbed, log, Kill("writing", 0.0))
        assert start.killed and start.steps_on_record >= 2
        if start.left_unfinished:
            break
    assert start.left_unfinished
    assert run_once(line, disturbed, log, Kill("record", rng.uniform(0.0, 0.2))).killed
    last = run_once(line, disturbed, log)
    assert not last.killed and not last.left_unfinished
    assert [step["step"] for step in read_steps(whole)] == list(range(1, 11))
    assert differences(read_steps(disturbed), read_steps(whole)) == []
    assert [checkpoint.problem_with(folder) for folder in checkpoint.list_checkpoints(disturbed)] == [None] * 3
