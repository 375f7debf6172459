"""The progress of a run (steps, samples, states of callbacks), which is saved to and loaded from checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checkpoint import state as checkpoint_state
from checkpoint.state_file import layout_of, of_model
from training.engine import Engine


@dataclass
class Progress:
    """Progress of a run: finished optimizer steps, consumed training samples, `health` (recent losses and counts of
    rejected steps, which decide whether later steps are good), and each callback's state by the callback's name."""

    step: int = 0
    consumed_samples: int = 0
    health: dict[str, Any] = field(default_factory=dict)
    callbacks: dict[str, dict[str, Any]] = field(default_factory=dict)


def state(engine: Engine, progress: Progress, facts: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a checkpoint's state.json: progress, model description and `facts` (the run's id and its
    training data)."""
    position = {"step": progress.step, "consumed_samples": progress.consumed_samples, "health": progress.health}
    callbacks = {"callbacks": progress.callbacks} if progress.callbacks else {}
    return {**facts, **position, **callbacks, **of_model(engine.job)}


def load(engine: Engine, folder: Path) -> Progress:
    """Load a checkpoint's weights and optimizer state into the engine, and return the progress. Random number states
    are loaded if the parallel layout is unchanged. A collective call, also allowed between steps. Raises ConfigError on
    every rank if any rank cannot read its shard."""
    layout = layout_of(engine.config, engine.topology.world_size)
    saved = checkpoint_state.load(engine.chunks, engine.optimizer, folder, layout)
    return Progress(saved["step"], saved["consumed_samples"], saved["health"], saved.get("callbacks", {}))
