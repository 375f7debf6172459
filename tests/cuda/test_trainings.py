"""Whole trainings on the pretended device, with all that stands around the steps, against the same ones on the CPU."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests import distributed
from tests.cuda import cases, sync_points, trainings
from tests.cuda.pretended.logs import compare
from tests.cuda.run import ROOT
from tests.tolerances import PRETENDED_HALF_GRAD_NORM, PRETENDED_HALF_LOSS
from tests.training.helpers import make_config, read_metrics
from tests.waits import LONG

pytestmark = [pytest.mark.cuda_pretended]

RANKS, NUM_LAYERS, MICRO_BATCHES, STEPS = 2, 2, 2, 6
QUIET = 3  # a step without evaluation, checkpoint or report
COMMON = [
    "experiment=gpt_moe_tiny",
    f"model.num_layers={NUM_LAYERS}",
    "model.backend=portable",
    f"parallel.expert={RANKS}",
    "training.precision=bf16",
    f"training.global_batch_size={2 * MICRO_BATCHES * RANKS}",
    "training.micro_batch_size=2",
    "training.eval_interval=2",
    "training.eval_batches=1",
    "checkpoint.interval=2",
    "logging.tensorboard=true",
]


@functools.cache
def _train(
    device: str, folder: Path, data: tuple[str, ...], *overrides: str, ranks: int = RANKS
) -> list[trainings.Outcome]:
    config = make_config([*COMMON, f"training.device={device}", f"run_dir={folder}", *data, *overrides], ranks)
    backend = distributed.PRETENDED if device == "cuda" else "gloo"
    return distributed.run(trainings.train, ranks, device, config, timeout=LONG, backend=backend)


def _compare(outcomes: list[trainings.Outcome], of_cpu: list[trainings.Outcome]) -> None:
    assert not compare([outcome.log for outcome in outcomes])
    for ours, theirs in zip(outcomes, of_cpu, strict=True):
        assert not ours.faults, ours.faults
        for key, rel in (("loss", PRETENDED_HALF_LOSS), ("grad_norm", PRETENDED_HALF_GRAD_NORM)):
            assert [line[key] for line in ours.lines] == pytest.approx([line[key] for line in theirs.lines], rel=rel)
        validation = [line["validation_loss"] for line in ours.lines if "validation_loss" in line]
        assert validation == pytest.approx(
            [line["validation_loss"] for line in theirs.lines if "validation_loss" in line], rel=PRETENDED_HALF_LOSS
        )
        assert validation


def test_a_run_with_all_callbacks_resumes(data: list[str], tmp_path: Path) -> None:
    """Evaluation, checkpoints, a profile, TensorBoard, gradients by part, the balance of experts and the probe for slow
    ranks, over a resume.

    What callbacks do beside a quiet step costs no wait of its own: the step's numbers are the one copy, and each MoE
    layer's counts.
    """
    degrees = ("moe.pipeline_degree=2", "moe.memory_strategy=keep", "moe.global_aux_loss_coeff=0.01")
    by_device = {}
    for device in ("cuda", "cpu"):
        folder = tmp_path / device
        first = _train(device, folder, tuple(data), *degrees, "training.steps=4", "training.profile.steps=[2]")
        rest = _train(device, folder, tuple(data), *degrees, f"training.steps={STEPS}")
        by_device[device] = first, rest
        assert [line["step"] for line in read_metrics(folder)] == list(range(1, STEPS + 1))
    for ours, theirs in zip(by_device["cuda"], by_device["cpu"], strict=True):
        _compare(ours, theirs)
    table = sync_points.waits(sync_points.FLAT, NUM_LAYERS * MICRO_BATCHES)
    for outcome in by_device["cuda"][0]:
        assert outcome.waits[QUIET] == table


def test_a_run_resumes_with_another_offload_target(data: list[str], tmp_path: Path) -> None:
    """Evaluation, a save and a resume with state off the device; a quiet step has the waits of one without."""
    small = ("parallel.expert=1", "optimizer.distributed=true", "optimizer.bucket_parameters=65536")
    on_host = ("optimizer.state_device=host", "optimizer.engine=host", "optimizer.early_update=always")
    on_disk = ("optimizer.state_device=disk", f"memory.disk_dir={cases.DISK_DIR}", "optimizer.engine=device_stream")
    by_device = {}
    for device in ("cuda", "cpu"):
        folder = tmp_path / device
        first = _train(device, folder, tuple(data), *small, *on_host, "training.steps=4", ranks=1)
        rest = _train(device, folder, tuple(data), *small, *on_disk, f"training.steps={STEPS}", ranks=1)
        by_device[device] = first, rest
    for ours, theirs in zip(by_device["cuda"], by_device["cpu"], strict=True):
        _compare(ours, theirs)
    for outcome in by_device["cuda"][0]:
        assert outcome.waits[QUIET] == sync_points.waits({}, 0)
        assert {kind for _, kind, _ in outcome.worker_waits} == {"event.synchronize"}


def test_layers_measure_plan_and_try(data: list[str], tmp_path: Path) -> None:
    auto = ("moe.pipeline_degree=auto", "moe.memory_strategy=auto", f"training.steps={STEPS}", "checkpoint.interval=0")
    ours, theirs = (_train(device, tmp_path / device, tuple(data), *auto) for device in ("cuda", "cpu"))
    _compare(ours, theirs)
    lines = [json.loads(line) for line in (tmp_path / "cuda" / "plans.jsonl").read_text().splitlines()]
    plans = {json.dumps(line["plan"]) for line in lines if "plan" in line}
    assert len(plans) >= trainings.NUM_TRIED
    assert all(min(line["measured"].values()) > 0 for line in lines if "measured" in line)


def test_any_command_runs_on_the_device(data: list[str], tmp_path: Path) -> None:
    run = [sys.executable, "-m", "tests.cuda.run", "--waits", "--"]
    overrides = ["experiment=gpt_tiny", "model.num_layers=1", "training.steps=2", "training.device=cuda", *data]
    quiet = ["logging=quiet", "training.eval_interval=0", "sample.prompts=[]", f"run_dir={tmp_path / 'run'}"]
    done = subprocess.run(
        [*run, sys.executable, "train.py", *overrides, *quiet], cwd=ROOT, capture_output=True, text=True, timeout=LONG
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "gpt, cuda, 1 rank" in done.stdout
    waits = Counter(line.rpartition(": ")[2] for line in done.stderr.splitlines() if line.startswith("pretended"))
    assert "copy to host in training/step.py:_sum_over_ranks" in waits


def test_the_status_is_the_commands_or_tells_of_a_fault() -> None:
    run = [sys.executable, "-m", "tests.cuda.run", "--", sys.executable, "-c"]
    assert subprocess.run([*run, "raise SystemExit(3)"], cwd=ROOT, timeout=LONG).returncode == 3
    unread = (
        "import torch; device = torch.ones(3, device='cuda'); host = torch.empty(3, pin_memory=True)\n"
        "with torch.cuda.stream(torch.cuda.Stream()): host.copy_(device, non_blocking=True)\n"
    )
    done = subprocess.run([*run, unread], cwd=ROOT, capture_output=True, text=True, timeout=LONG)
    assert done.returncode == 1, done.stderr
    assert "did not wait for what the default stream was doing with the memory" in done.stderr
