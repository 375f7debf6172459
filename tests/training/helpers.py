"""Whole trainings on the ranks of the pool, and how far two of them are apart."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from configs.compose import compose
from configs.schema import Config
from configs.validate import validate
from tests import distributed
from tests.waits import LONG

TIMEOUT = LONG  # seconds for one training
Lines = list[dict[str, Any]]


def make_config(overrides: Sequence[str], ranks: int = 1) -> Config:
    """A checked config of a run that writes and prints little. Raises ConfigError."""
    config = compose(["logging=quiet", "sample.prompts=[]", "training.eval_interval=0", *overrides])
    validate(config, ranks)
    return config


def train(config: Config, callbacks: Sequence[Any] = ()) -> Lines:
    """Train on this rank with all that `train.py` does, and more callbacks; the metrics of the steps taken."""
    from training.run import Callback, Metrics, Run
    from training.trainer import Trainer

    taken: list[Metrics] = []

    class Record(Callback):
        def after_step(self, run: Run, metrics: Metrics) -> None:
            taken.append(dict(metrics))

    trainer = Trainer(config)
    trainer.callbacks += [Record(), *callbacks]
    trainer.fit()
    return taken


def train_on_ranks(overrides: Sequence[str], ranks: int = 1, timeout: float = TIMEOUT) -> Lines:
    """Train a config on that many ranks of the pool; the metrics of each step taken. Raises ConfigError, or what a rank
    raised."""
    return distributed.run(train, ranks, make_config(overrides, ranks), timeout=timeout)[0]


def largest_difference(ours: Lines, theirs: Lines, key: str) -> float:
    """Largest relative difference of a metric over the steps, which must be the same in both runs."""
    steps = [line["step"] for line in theirs]
    if not steps or [line["step"] for line in ours] != steps:
        raise ValueError(f"the runs took different steps: {[line['step'] for line in ours]} and {steps}")
    return max(abs(a[key] - b[key]) / abs(b[key]) for a, b in zip(ours, theirs, strict=True))


def read_metrics(run_dir: str | Path) -> Lines:
    """The lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]
