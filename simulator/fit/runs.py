"""Measured steps of this project's own runs: the config that a run's folder keeps, and its metrics."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from configs.compose import load
from configs.schema import ConfigError
from simulator.fit.rows import MeasuredStep

CONFIG, PLAN, METRICS = "config.yaml", "plan.json", "metrics.jsonl"
FIRST_STEP = 3  # the steps before it set up and measure


def read_run(run_dir: Path) -> MeasuredStep:
    """A run as one step: the median of its steps from the third on. Raises ConfigError where the folder lacks a file or
    has no such steps."""
    for name in (CONFIG, PLAN, METRICS):
        if not (run_dir / name).is_file():
            raise ConfigError(f"{run_dir} must be the folder of a run; it has no {name}.")
    try:
        plan = json.loads((run_dir / PLAN).read_text(encoding="utf-8"))
        world_size, vocab_size = int(plan["world_size"]), int(plan["vocab_size"])
        lines = [json.loads(line) for line in (run_dir / METRICS).read_text(encoding="utf-8").splitlines() if line]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"cannot read {run_dir}: {error}") from None
    seconds = [
        float(line["step_seconds"]) for line in lines if line.get("step", 0) >= FIRST_STEP and "step_seconds" in line
    ]
    if not seconds:
        raise ConfigError(f"{run_dir} must have measured steps from step {FIRST_STEP} on, and has none.")
    return MeasuredStep(run_dir.name, load(run_dir / CONFIG), world_size, vocab_size, statistics.median(seconds))
