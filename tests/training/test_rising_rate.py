"""A learning rate that a resumed run lifts against its checkpoint's schedule is named, with the keys that keep it."""

from __future__ import annotations

import copy

import pytest

from configs.changes import changes
from configs.compose import compose
from optim.optimizer import learning_rate
from training.starting.start_log import rising_rate

pytestmark = pytest.mark.fast

FINISHED = ["training.steps=8", "optimizer.lr=0.01", "optimizer.min_lr=0", "optimizer.warmup_steps=2"]


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
@pytest.mark.parametrize("step", [6, 8])
@pytest.mark.parametrize(
    "more",
    [["training.steps=16"], ["training.steps=16", "optimizer.lr=0.02"], ["optimizer.decay_steps=32"]],
    ids=["longer", "longer and higher", "decay_steps"],
)
def test_the_advice_keeps_the_schedule(schedule: str, step: int, more: list[str]) -> None:
    of = [f"optimizer.schedule={schedule}", *(["optimizer.wsd_decay_steps=4"] if schedule == "wsd" else [])]
    before = compose(["experiment=gpt_tiny", *FINISHED, *of])
    after = compose(["experiment=gpt_tiny", *FINISHED, *of, *more])
    line = rising_rate(after, changes(before, after), step)
    assert line is not None and f"in step {step + 1}" in line
    advice = line.split("; ")[1].removesuffix(" keeps the old schedule").split()
    kept = compose(["experiment=gpt_tiny", *FINISHED, *of, *more, *advice])
    assert learning_rate(kept.optimizer, kept.training.steps, step + 1) == learning_rate(
        before.optimizer, before.training.steps, step + 1
    )
    assert rising_rate(kept, changes(before, kept), step) is None


@pytest.mark.parametrize(
    "more",
    [[], ["training.steps=16", "optimizer.decay_steps=8"], ["optimizer.lr=0.005"], ["optimizer.weight_decay=0.3"]],
)
@pytest.mark.parametrize("step", [0, 1, 2, 5, 8])
def test_what_lifts_nothing_is_not_named(more: list[str], step: int) -> None:
    """Neither a fresh start, nor a warm-up that goes on, nor a lower rate."""
    before = compose(["experiment=gpt_tiny", *FINISHED])
    after = compose(["experiment=gpt_tiny", *FINISHED, *more])
    assert rising_rate(after, changes(before, copy.deepcopy(after)), step) is None


def test_the_line_of_a_finished_cosine() -> None:
    before, after = (compose(["experiment=gpt_tiny", *FINISHED, f"training.steps={steps}"]) for steps in (8, 16))
    assert rising_rate(after, changes(before, after), 8) == (
        "the learning rate rises from 0 in step 8 to 0.005 in step 9, where the old schedule had 0; "
        "optimizer.decay_steps=8 keeps the old schedule"
    )
