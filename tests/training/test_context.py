"""Trainings with context parallelism: some rows of the covering list against one process, and checkpoints that cross
context sizes."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.checks.context_parity import (
    FACTORS,
    MOST_ROWS,
    compare_all,
    conflict,
    covering_list,
    ranks_of,
    short_texts,
)
from benchmarks.kit.covering import excluded_pairs, pairs_of
from tests.tolerances import FP32_GRAD_NORM, FP32_LOSS
from tests.training.helpers import Lines, largest_difference, read_metrics, train_on_ranks

# All of them, over 20 steps: python -m benchmarks.checks.context_parity. Here as many steps as placement takes to move
# twice.
COVERING_ROWS = [1, 6, 7, 9, 11, 18]


def test_rows_of_the_covering_list() -> None:
    found = compare_all(COVERING_ROWS, ["training.steps=7", "training.global_batch_size=4"])
    assert [(each.number, each.failed) for each in found] == [(number, "") for number in COVERING_ROWS]
    assert [each for each in found if not each.passed] == []
    # Other orders of addition: were every difference zero, the comparison would not compare anything.
    assert all(each.loss > 0 for each in found)


@pytest.mark.fast
def test_every_pair_of_options_is_in_the_list_or_excluded() -> None:
    without = excluded_pairs(FACTORS, conflict)
    found = {pair for row in covering_list() for pair in pairs_of(row, FACTORS)}
    names = list(FACTORS)
    every = {
        ((a, x), (b, y)) for i, a in enumerate(names) for b in names[i + 1 :] for x in FACTORS[a] for y in FACTORS[b]
    }
    assert found == every - without.keys() and without
    assert len(covering_list()) <= MOST_ROWS and {ranks_of(row) for row in covering_list()} <= {2, 4, 8}


def test_losses_by_where_a_token_stands() -> None:
    """An evaluation knows positions and lengths of the segments that ranks share."""
    with short_texts() as (folder, data):
        common = ["experiment=gpt_tiny", *data, "data.validation_fraction=0.1", "data.documents=separate"]
        common += ["checkpoint=off", "training.steps=1", "training.eval_interval=1", "training.eval_batches=2"]
        alone, shared = (
            train_on_ranks([*common, *layout, f"run_dir={folder / str(ranks)}"], ranks)[-1]
            for ranks, layout in ((1, []), (2, ["parallel.context=2"]))
        )
    for name in ("validation_loss_by_position", "validation_loss_by_length"):
        assert shared[name] == pytest.approx(alone[name], rel=FP32_LOSS) and len(alone[name]) > 2
    assert shared["validation_loss"] == pytest.approx(alone["validation_loss"], rel=FP32_LOSS)


TP2 = ["parallel.tensor=2", "parallel.sequence=true"]
# Ranks and layout of each leg of a run, all of equal length.
LEGS: dict[str, list[tuple[int, list[str]]]] = {
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
STEPS_OF_A_LEG = 2


def test_dropout_goes_on_bit_for_bit(data: list[str], tmp_path: Path) -> None:
    common = ["experiment=gpt_moe_tiny", *data, "parallel.context=2", "parallel.expert=2"]
    common += ["model.hidden_dropout=0.1", "optimizer.decay_steps=4"]
    whole = train_on_ranks([*common, "checkpoint=off", "training.steps=4", f"run_dir={tmp_path / 'whole'}"], 2)
    found: Lines = []
    for steps in (2, 4):
        found += train_on_ranks([*common, f"training.steps={steps}", f"run_dir={tmp_path / 'legs'}"], 2)
    for name in ("loss", "grad_norm"):
        assert [line[name] for line in found] == [line[name] for line in whole]


@pytest.mark.parametrize("experiment", LEGS)
def test_a_checkpoint_crosses_context_sizes(data: list[str], tmp_path: Path, experiment: str) -> None:
    """Legs of a run, each on another number of context ranks, are the run of one process."""
    legs = LEGS[experiment]
    steps = STEPS_OF_A_LEG * len(legs)
    common = [experiment, *data, f"optimizer.decay_steps={steps}"]
    whole = train_on_ranks([*common, "checkpoint=off", f"training.steps={steps}", f"run_dir={tmp_path / 'whole'}"])
    found: Lines = []
    for i, (ranks, layout) in enumerate(legs, 1):
        until = f"training.steps={STEPS_OF_A_LEG * i}"
        found += train_on_ranks([*common, *layout, until, f"run_dir={tmp_path / 'legs'}"], ranks)
    assert [line["step"] for line in found] == list(range(1, steps + 1))
    assert largest_difference(found, whole, "loss") < FP32_LOSS
    assert largest_difference(found, whole, "grad_norm") < FP32_GRAD_NORM
    assert read_metrics(tmp_path / "legs") == found
