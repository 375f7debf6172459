"""A run may lay its optimizer's state elsewhere, and its model over other ranks, at every resume."""

from __future__ import annotations

from pathlib import Path

from tests.tolerances import FP32_LOSS
from tests.training.helpers import largest_difference, read_metrics, train_on_ranks

RUN = [
    "experiment=gpt_moe_tiny",
    "model.hidden_size=32",
    "model.num_layers=2",
    "optimizer.schedule=constant",  # so that the steps do not depend on how many there will be
    "optimizer.bucket_parameters=8192",
    "checkpoint.interval=0",
]
TIERS = {
    "device": [],
    "device_stream": ["optimizer.state_device=host", "optimizer.engine=device_stream"],
    "host": ["optimizer.state_device=host", "optimizer.engine=host"],
    "disk": ["optimizer.state_device=disk"],
}
COMPARED = ("step", "loss", "grad_norm")


def test_tiers_in_turns_are_the_device_bit_for_bit(data: list[str], tmp_path: Path) -> None:
    common = [
        *RUN,
        *data,
        f"memory.disk_dir={tmp_path}",
        "parallel.expert=2",
        "training.precision=bf16",
        "model.hidden_dropout=0.1",
    ]
    train_on_ranks([*common, f"run_dir={tmp_path / 'whole'}", "training.steps=8"], 2)
    for i, tier in enumerate(("host", "disk", "device_stream", "device"), start=1):
        train_on_ranks([*common, *TIERS[tier], f"run_dir={tmp_path / 'turns'}", f"training.steps={2 * i}"], 2)
    whole, turns = (
        [[line[key] for key in COMPARED] for line in read_metrics(tmp_path / k)] for k in ("whole", "turns")
    )
    assert turns == whole and len(whole) == 8


def test_a_tier_and_a_layout_change_together(data: list[str], tmp_path: Path) -> None:
    common = [*RUN, *data, f"memory.disk_dir={tmp_path}"]
    train_on_ranks([*common, f"run_dir={tmp_path / 'whole'}", "training.steps=8"])
    turns: tuple[tuple[int, str, list[str]], ...] = (
        (1, "device_stream", []),
        (2, "host", ["parallel.tensor=2", "parallel.sequence=true"]),
        (2, "disk", ["parallel.expert=2"]),
        (2, "device", ["parallel.pipeline=2", "optimizer.distributed=false"]),
    )
    for i, (ranks, tier, layout) in enumerate(turns, start=1):
        steps = [f"run_dir={tmp_path / 'turns'}", f"training.steps={2 * i}"]
        train_on_ranks([*common, *TIERS[tier], *layout, *steps], ranks)
    assert largest_difference(read_metrics(tmp_path / "turns"), read_metrics(tmp_path / "whole"), "loss") < FP32_LOSS
