"""What a training keeps from the garbage collector, and gives back at its end."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from configs.schema import Config
from tests import distributed
from tests.training.helpers import make_config


def _frozen(config: Config, alone: bool, before: bool) -> tuple[bool, bool]:
    """Whether the run's model was frozen in a step, and whether anything was after it. `alone`: in a process of its
    own; `before`: in one that has frozen what it had."""
    from training.callbacks.guard import Guard
    from training.run import Callback, Metrics, Run
    from training.trainer import Trainer

    found = []

    class Look(Callback):
        def after_step(self, run: Run, metrics: Metrics) -> None:
            found.append(all(each is not run.engine for each in gc.get_objects()))

    gc.unfreeze()
    if before:
        gc.freeze()
    try:
        trainer = Trainer(config, guard=Guard(config) if alone else None)
        trainer.callbacks.append(Look())
        trainer.fit()
        return found[0], gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
        gc.collect()
        gc.freeze()  # as the pool had it


@pytest.mark.parametrize(
    ("alone", "before", "in_a_step", "after"),
    [(True, True, True, False), (False, False, True, False), (False, True, False, True)],
    ids=["the next run of a sweep finds nothing frozen", "alone or not", "what others froze stays so"],
)
def test_what_is_frozen(
    data: list[str], tmp_path: Path, alone: bool, before: bool, in_a_step: bool, after: bool
) -> None:
    overrides = ["experiment=gpt_tiny", *data, "training.steps=1", "checkpoint=off", f"run_dir={tmp_path / 'run'}"]
    assert distributed.run(_frozen, 1, make_config(overrides), alone, before) == [(in_a_step, after)]
