"""The progress of a run (steps, samples, states of callbacks), saved to a checkpoint and loaded from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checkpoint import state as checkpoint_state
from checkpoint.state_file import layout_of, of_model
from training.engine import Engine


@dataclass
class Progress:
    """Finished optimizer steps and the training samples they consumed, the state of training/resilience/health.py, and
    the states of callbacks by their names."""

    step: int = 0
    consumed_samples: int = 0
    health: dict[str, Any] = field(default_factory=dict)
    callbacks: dict[str, dict[str, Any]] = field(default_factory=dict)


def state(engine: Engine, progress: Progress, facts: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a checkpoint's state file: everything but tensors. `facts`: the run's id and its data."""
    position = {"step": progress.step, "consumed_samples": progress.consumed_samples, "health": progress.health}
    callbacks = {"callbacks": progress.callbacks} if progress.callbacks else {}
    model = of_model(engine.config, engine.vocab_size, engine.topology.world_size)
    return {**facts, **position, **callbacks, **model}


def load(engine: Engine, folder: Path) -> Progress:
    """Fill an engine with a checkpoint: weights, optimizer and, in the layout that saved them, random number states.

    A collective call; the engine may have taken other steps since. Raises ConfigError on every rank if one cannot read
    its shard.
    """
    layout = layout_of(engine.config, engine.topology.world_size)
    saved = checkpoint_state.load(engine.chunks, engine.optimizer, folder, layout)
    return Progress(saved["step"], saved["consumed_samples"], saved["health"], saved.get("callbacks", {}))
