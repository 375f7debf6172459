"""A whole training with all its callbacks on the pretended device or on the CPU: what every rank of a test runs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from unittest import mock

from configs.schema import Config
from tests.cuda import runs
from tests.cuda.pretended.logs import Log
from tests.cuda.pretended.observed import OBSERVED
from tests.training.helpers import Lines

NUM_TRIED = 3  # plans


@dataclass
class Outcome:
    """Of one rank. `waits`: by step, from the start of one step to that of the next."""

    lines: Lines
    waits: dict[int, Counter[tuple[str, str]]] = field(default_factory=dict)
    worker_waits: Counter[tuple[str, str, str]] = field(default_factory=Counter)  # of the whole training
    faults: Counter[str] = field(default_factory=Counter)
    log: Log = field(default_factory=dict)


def train(device: str, config: Config, early: bool = False) -> Outcome:
    """Train with all that `train.py` does. The MoE layers' trial takes one short round of plans, whatever the model
    thinks of them."""
    import os

    from moe.planning import inputs
    from moe.planning.trial import TrialPolicy
    from tests.cuda.pretended import exchanges

    os.environ.pop("LOCAL_RANK", None)  # there is one device for all
    policy = TrialPolicy(most_plans=NUM_TRIED, within=100.0, rounds=1, turns=1)
    with mock.patch.object(inputs, "trial_policy", lambda config: policy):
        if device == "cpu":
            return _train(config)
        with runs.pretended(None, early):
            outcome = _train(config)
            outcome.log = exchanges.take_log()
        return outcome


def _train(config: Config) -> Outcome:
    from training.run import Callback, Metrics, Run
    from training.trainer import Trainer

    outcome = Outcome([], worker_waits=OBSERVED.worker_waits, faults=OBSERVED.faults)

    class Record(Callback):
        def before_step(self, run: Run) -> None:
            OBSERVED.waits.clear()

        def after_step(self, run: Run, metrics: Metrics) -> None:
            outcome.lines.append(dict(metrics))
            outcome.waits[run.progress.step] = Counter(OBSERVED.waits)

    trainer = Trainer(config)
    trainer.callbacks.append(Record())
    trainer.fit()
    return outcome
