"""What only a GPU can show: the same numbers as the CPU, bf16 training, a resume. Skipped without one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.waits import LONG

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]

REPOSITORY = Path(__file__).resolve().parents[1]
QUIET = [
    "logging.wandb=off",
    "logging.tensorboard=false",
    "sample.prompts=[]",
    "training.eval_interval=0",
    "optimizer.warmup_steps=0",
]
GPU_LOSS = 1e-4  # relative; a GPU sums in another order than a CPU


def _train(run_dir: Path, *overrides: str) -> list[dict[str, float]]:
    command = [sys.executable, "train.py", f"run_dir={run_dir}", *QUIET, *overrides]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=2 * LONG, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("model", ["gpt_tiny", "gpt_moe_tiny", "bert_tiny", "bert_moe_tiny"])
def test_losses_equal_those_of_the_cpu(model: str, tmp_path: Path) -> None:
    sides = [
        _train(tmp_path / device, f"model={model}", f"training.device={device}", "training.steps=5")
        for device in ("cpu", "cuda")
    ]
    for cpu, cuda in zip(*sides):
        assert cuda["loss"] == pytest.approx(cpu["loss"], rel=GPU_LOSS)


def test_bf16_quickstart_learns_and_reports_mfu(tmp_path: Path) -> None:
    lines = _train(tmp_path / "run", "training.precision=bf16", "training.steps=40")
    assert lines[-1]["loss"] < lines[0]["loss"] - 1
    assert lines[-1]["peak_memory_bytes"] > 0
    assert 0 < lines[-1].get("mfu", 0.5) < 1  # of a card whose peak is known


def test_a_resumed_run_repeats_the_undisturbed_one(tmp_path: Path) -> None:
    settings = ["model=gpt_moe_tiny", "training.deterministic=true", "optimizer.schedule=constant"]
    whole = _train(tmp_path / "whole", *settings, "training.steps=8")
    _train(tmp_path / "parts", *settings, "training.steps=4")
    resumed = _train(tmp_path / "parts", *settings, "training.steps=8")
    assert [line["loss"] for line in resumed] == [line["loss"] for line in whole]
