"""Trainings with context parallelism: some rows of the covering list beside one process, and checkpoints that cross
context sizes."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.context_parity import FACTORS, MOST_ROWS, compare_all, conflict, ranks_of, rows
from benchmarks.covering import excluded_pairs, pairs_of
from tests.tolerances import FP32_GRAD_NORM, FP32_LOSS
from tests.training.helpers import Lines, largest_difference, read_metrics, train_on_ranks

# All of them: python -m benchmarks.context_parity
ROWS = [1, 2, 4, 6, 11, 14]


def test_rows_of_the_covering_list() -> None:
    found = compare_all(ROWS, ["training.steps=20"])
    assert [(each.number, each.failed) for each in found] == [(number, "") for number in ROWS]
    assert [each for each in found if not each.passed] == []
    # Other orders of addition: were every difference zero, the comparison would not compare anything.
    assert all(each.loss > 0 for each in found)


@pytest.mark.fast
def test_every_pair_of_options_is_in_the_list_or_excluded() -> None:
    without = excluded_pairs(FACTORS, conflict)
    found = {pair for row in rows() for pair in pairs_of(row, FACTORS)}
    names = list(FACTORS)
    every = {
        ((a, x), (b, y)) for i, a in enumerate(names) for b in names[i + 1 :] for x in FACTORS[a] for y in FACTORS[b]
    }
    assert found == every - without.keys() and without
    assert len(rows()) <= MOST_ROWS and {ranks_of(row) for row in rows()} <= {2, 4, 8}


TP2 = ["parallel.tensor=2", "parallel.sequence=true"]
# Ranks and layout of each part of a run, each part as long as the others.
PARTS: dict[str, list[tuple[int, list[str]]]] = {
    "experiment=gpt_moe_tiny": [
        (1, []),
        (2, ["parallel.context=2", "parallel.context_heads=2"]),
        (4, ["parallel.context=4", "parallel.context_heads=2", "parallel.expert=4"]),
        (4, ["parallel.context=2", "parallel.expert=2", *TP2]),
        (2, ["parallel.expert=2"]),
    ],
    "experiment=bert_tiny": [
        (4, ["parallel.context=2", "parallel.pipeline=2"]),
        (2, ["parallel.context=2", "optimizer.state_device=host"]),
        (2, TP2),
        (4, ["parallel.context=4", "parallel.context_heads=4", "optimizer.distributed=false"]),
        (1, []),
    ],
}
STEPS_OF_A_PART = 2


@pytest.mark.parametrize("experiment", PARTS)
def test_a_checkpoint_crosses_context_sizes(data: list[str], tmp_path: Path, experiment: str) -> None:
    """Parts of a run, each on another number of context ranks, are the run of one process."""
    parts = PARTS[experiment]
    steps = STEPS_OF_A_PART * len(parts)
    common = [experiment, *data, f"optimizer.decay_steps={steps}"]
    whole = train_on_ranks([*common, "checkpoint=off", f"training.steps={steps}", f"run_dir={tmp_path / 'whole'}"])
    found: Lines = []
    for i, (ranks, layout) in enumerate(parts, 1):
        until = f"training.steps={STEPS_OF_A_PART * i}"
        found += train_on_ranks([*common, *layout, until, f"run_dir={tmp_path / 'parts'}"], ranks)
    assert [line["step"] for line in found] == list(range(1, steps + 1))
    assert largest_difference(found, whole, "loss") < FP32_LOSS
    assert largest_difference(found, whole, "grad_norm") < FP32_GRAD_NORM
    assert read_metrics(tmp_path / "parts") == found
