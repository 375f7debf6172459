"""Read the files of a run's folder, which may be missing, truncated by a kill, or still growing."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from base.errors import ConfigError
from base.files import parse_yaml, read_regular
from checkpoint.record import RECORD
from simulator.clock.trace import FOLDER as TRACES
from training.resilience import events
from training.status import STATUS

ENVIRONMENT = "environment.json"
Line = dict[str, Any]


class NotARun(ConfigError):
    """Raised for a folder that does not have the files of a run."""


@dataclass
class RunFiles:
    """Content of the files in a run's folder. `notes` has a line for each file that could not be read."""

    run_dir: Path
    config: dict[str, Any] = field(default_factory=dict)
    metrics: list[Line] = field(default_factory=list)  # sorted by step, each step once
    events: list[Line] = field(default_factory=list)
    plans: list[Line] = field(default_factory=list)
    memory_plan: list[Line] = field(default_factory=list)  # sorted by rank
    plan_device: str | None = None
    config_text: str = ""
    environment: Line = field(default_factory=dict)
    status: Line = field(default_factory=dict)
    record: Line = field(default_factory=dict)
    checkpoints: list[str] = field(default_factory=list)  # names of the checkpoints on disk
    notes: list[str] = field(default_factory=list)


def read(run_dir: Path) -> RunFiles:
    """Read all files of a run except its traces. Raises NotARun."""
    if not run_dir.is_dir():
        raise NotARun(f"{run_dir} is not a folder. Give the run_dir of a run, such as runs/quickstart.")
    if not any((run_dir / name).exists() for name in ("metrics.jsonl", "config.yaml", TRACES)):
        raise NotARun(
            f"{run_dir} holds no run: it has neither metrics.jsonl nor config.yaml. Give the run_dir of a run, such as "
            "runs/quickstart."
        )
    source = RunFiles(run_dir)
    source.config = _config(source)
    by_step = {line["step"]: line for line in _lines(source, "metrics.jsonl") if isinstance(line.get("step"), int)}
    source.metrics = [by_step[step] for step in sorted(by_step)]
    source.events = [event for event in events.read(run_dir) if isinstance(event, dict)]
    for path in sorted(run_dir.glob("plans*.jsonl")):
        source.plans += _lines(source, path.name)
    source.memory_plan = _memory_plan(source)
    source.environment, source.status, source.record = (_object(source, name) for name in (ENVIRONMENT, STATUS, RECORD))
    source.checkpoints = sorted(path.name for path in run_dir.glob("checkpoints/step_*") if path.is_dir())
    return source


def _config(source: RunFiles) -> dict[str, Any]:
    path = source.run_dir / "config.yaml"
    if not path.exists():
        source.notes.append("config.yaml is missing, so the trained model is not known.")
        return {}
    try:
        source.config_text = read_regular(path).decode()
        config = parse_yaml(source.config_text.encode())
    except (OSError, yaml.YAMLError, ValueError):
        config = None
    if not isinstance(config, dict):
        source.notes.append("config.yaml cannot be read, so the trained model is not known.")
        return {}
    return config


def _lines(source: RunFiles, name: str) -> list[Line]:
    path = source.run_dir / name
    lines, broken = [], 0
    if path.exists():
        with path.open(encoding="utf-8", errors="replace") as file:
            for text in file:
                try:
                    line = json.loads(text)
                except ValueError:
                    line = None
                if isinstance(line, dict):
                    lines.append(line)
                else:
                    broken += bool(text.strip())
    if broken:
        source.notes.append(f"{name}: {broken} of {broken + len(lines)} lines cannot be read and are left out.")
    return lines


def _object(source: RunFiles, name: str) -> Line:
    path = source.run_dir / name
    try:
        content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (OSError, ValueError):
        content = None
    if not isinstance(content, dict):
        source.notes.append(f"{name} cannot be read and is left out.")
        return {}
    return content


def _memory_plan(source: RunFiles) -> list[Line]:
    path = source.run_dir / "plan.json"
    if not path.exists():
        return []
    try:
        plan = json.loads(path.read_text(encoding="utf-8"))
        ranks = plan["memory_per_rank"]
        source.plan_device = plan.get("device")
        planned = [{**rank, "rank": int(rank["rank"]), "total": float(rank["total"])} for rank in ranks]
        return sorted(planned, key=lambda rank: rank["rank"])
    except (ValueError, KeyError, TypeError):
        source.notes.append("plan.json cannot be read: memory is shown without the plan.")
        return []


def finite(value: Any) -> float | None:
    """Return `value` if it is a finite number, else None."""
    return value if isinstance(value, (int, float)) and math.isfinite(value) else None
