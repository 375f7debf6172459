"""How far a run is, and its way into a checkpoint and back."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checkpoint import state as checkpoint_state
from checkpoint.state_file import layout_of, of_model
from training.engine import Engine


@dataclass
class Progress:
    """Finished optimizer steps and the training samples they consumed, and what was decided on the way:
    training/resilience/health.py's state, and that of each callback that keeps one, by its name."""

    step: int = 0
    consumed_samples: int = 0
    health: dict[str, Any] = field(default_factory=dict)
    callbacks: dict[str, dict[str, Any]] = field(default_factory=dict)


def state(engine: Engine, progress: Progress, facts: dict[str, Any]) -> dict[str, Any]:
    """What a checkpoint says of a run beside its tensors. `facts`: whose it is (`run`) and what it was trained on
    (`data`)."""
    position = {"step": progress.step, "consumed_samples": progress.consumed_samples, "health": progress.health}
    callbacks = {"callbacks": progress.callbacks} if progress.callbacks else {}
    model = of_model(engine.config, engine.vocab_size, engine.topology.world_size)
    return {**facts, **position, **callbacks, **model}


def load(engine: Engine, folder: Path) -> Progress:
    """Fill an engine with a checkpoint: weights, optimizer and, in the layout that saved them, random number states.

    A collective call; the engine may have taken other steps since. Raises ConfigError on every rank if any cannot read
    its part.
    """
    layout = layout_of(engine.config, engine.topology.world_size)
    saved = checkpoint_state.load(engine.chunks, engine.optimizer, folder, layout)
    return Progress(saved["step"], saved["consumed_samples"], saved["health"], saved.get("callbacks", {}))
