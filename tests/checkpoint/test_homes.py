"""Checkpoints of runs whose experts move know logical experts alone, and beside them where these were at home."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.checks.opened_by_tools import open_all
from checkpoint import export
from models import convert
from tests.tolerances import FP32_LOSS
from tests.training.helpers import Lines, largest_difference, read_metrics, train_on_ranks

RUN = [
    "experiment=gpt_moe_tiny",
    "model.hidden_size=32",
    "model.num_layers=2",
    "moe.num_experts=8",
    "moe.ffn_hidden_size=36",  # an expert's numbers are no multiple of the norms' blocks
    "moe.aux_loss_coeff=0",
    "optimizer.lr=0.01",
    "optimizer.warmup_steps=0",
    "optimizer.schedule=constant",  # so that the steps do not depend on how many there will be
    "optimizer.bucket_parameters=4096",
    "checkpoint.interval=0",
]
MOVING = ["moe.placement.extra_slots=2", "moe.placement.interval=1"]
DEVICE = ["optimizer.state_device=device", "optimizer.engine=auto"]
HOST = ["optimizer.state_device=host", "optimizer.engine=host"]
DISK = ["optimizer.state_device=disk"]


def _moved(lines: Lines) -> int:
    return sum(line["placement"]["moved"] for line in lines if "placement" in line)


def test_homes_outlive_a_resume_on_any_tier_bit_for_bit(data: list[str], tmp_path: Path) -> None:
    common = [
        *RUN,
        *data,
        *MOVING,
        f"memory.disk_dir={tmp_path}",
        "parallel.expert=2",
        "moe.placement.policy=solve",
        "moe.placement.max_load=1.0",
    ]
    train_on_ranks([*common, f"run_dir={tmp_path / 'whole'}", "training.steps=6"], 2)
    for i, tier in enumerate((HOST, DISK, DEVICE), start=1):
        train_on_ranks([*common, *tier, f"run_dir={tmp_path / 'turns'}", f"training.steps={2 * i}"], 2)
    whole, turns = read_metrics(tmp_path / "whole"), read_metrics(tmp_path / "turns")
    assert _moved(whole) > 4 and len(whole) == 6
    for key in ("loss", "grad_norm", "placement"):
        assert [line[key] for line in turns] == [line[key] for line in whole]
    state = [{tier: line["memory"][f"state_{tier}"] for tier in ("host", "disk", "device")} for line in turns]
    size = state[0]["host"]
    expected = [{**dict.fromkeys(state[0], 0), tier: size} for tier in state[0] for _ in range(2)]
    assert size > 0 and state == expected


def test_any_map_policy_and_number_of_ranks_goes_on(
    data: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    common = [*RUN, *data]
    train_on_ranks([*common, f"run_dir={tmp_path / 'whole'}", "training.steps=8"])
    turns: tuple[tuple[int, list[str]], ...] = (
        (4, [*MOVING, *HOST, "parallel.expert=4", "moe.placement.policy=solve"]),
        (2, [*MOVING, *DEVICE, "parallel.expert=2", "moe.placement.policy=flex"]),
        (2, [*DEVICE, "parallel.expert=2", "moe.placement.policy=static", "moe.placement.extra_slots=0"]),
        (1, ["parallel.expert=1"]),
    )
    for i, (ranks, layout) in enumerate(turns, start=1):
        words = [f"run_dir={tmp_path / 'turns'}", f"training.steps={2 * i}", "checkpoint.keep=9"]
        train_on_ranks([*common, *layout, *words], ranks)
        said = capfd.readouterr().out
        back = (
            "moe.placement.policy is static and parallel.expert 2: experts that had migrated are on their initial "
            "ranks again"
        )
        assert (back in said) == (
            "moe.placement.policy=static" in layout
        ) and "this run has no such callback" not in said
    whole, found = read_metrics(tmp_path / "whole"), read_metrics(tmp_path / "turns")
    assert _moved(found) > 4
    assert largest_difference(found, whole, "loss") < FP32_LOSS


def test_an_export_is_that_of_experts_that_never_moved(data: list[str], tmp_path: Path) -> None:
    common = [*RUN, *data, "parallel.expert=2", "training.steps=3"]
    bitwise = ["moe.placement.bitwise=true", "moe.placement.block_rows=16"]
    for name, more in {"static": [], "moved": [*MOVING, "moe.placement.policy=solve"]}.items():
        train_on_ranks([*common, *bitwise, *more, f"run_dir={tmp_path / name}"], 2)
        export.export(tmp_path / name, tmp_path / f"{name}_logical")
        convert.export_folder(tmp_path / f"{name}_logical", tmp_path / f"{name}_exported")
    assert _moved(read_metrics(tmp_path / "moved")) > 0
    static, moved = (load_file(tmp_path / f"{name}_exported" / "model.safetensors") for name in ("static", "moved"))
    assert static.keys() == moved.keys() and len(static) > 20
    assert all(torch.equal(static[name], moved[name]) for name in static)
    assert set(opened(tmp_path / "moved", tmp_path).values()) == {"ok"}


def test_every_tool_opens_a_bert_with_all_that_training_may_ask_for(data: list[str], tmp_path: Path) -> None:
    small = ["experiment=bert_moe_tiny", "model.num_layers=2", "training.steps=2", "optimizer.bucket_parameters=4096"]
    asked = ["training.recompute=full", "training.activation_offload=auto", "model.hidden_dropout=0.1"]
    placed = ["parallel.expert=2", "moe.placement.policy=solve", "moe.placement.max_load=1.0", *MOVING]
    placed += [f"run_dir={tmp_path / 'run'}"]
    train_on_ranks([*small, *data, *asked, *placed, *HOST], 2)
    cells = opened(tmp_path / "run", tmp_path)
    assert cells.pop("huggingface") == "-" and set(cells.values()) == {"ok"}


def opened(run_dir: Path, work: Path) -> dict[str, str]:
    """Open a run with each tool, and return the row of benchmarks/checks/opened_by_tools.py."""
    (work / "text").write_text("def run(self):\n    return self\n" * 4)
    return open_all(run_dir, work, work / "text")
