"""How far a run is, and its way into a checkpoint and back."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checkpoint import state as checkpoint_state
from checkpoint.state_file import in_words, layout_of, of_model
from configs import derived
from models.pointwise.frequencies import IN_FP32
from parallel.dropout import BY_PLACE, BY_STREAM
from training.engine import Engine


@dataclass
class Progress:
    """Finished optimizer steps and the training samples they consumed, and what was decided on the way:
    training/resilience/health.py's state, and that of each callback that keeps one, by its name."""

    step: int = 0
    consumed_samples: int = 0
    health: dict[str, Any] | None = None
    callbacks: dict[str, dict[str, Any]] = field(default_factory=dict)


def state(engine: Engine, progress: Progress, facts: dict[str, Any]) -> dict[str, Any]:
    """What a checkpoint says of a run beside its tensors. `facts`: whose it is (`run`) and what it was trained on
    (`data`)."""
    position = {"step": progress.step, "consumed_samples": progress.consumed_samples, "health": progress.health}
    callbacks = {"callbacks": progress.callbacks} if progress.callbacks else {}
    model = of_model(engine.config, engine.vocab_size, engine.topology.world_size)
    rules = {"dropout": engine.dropout.rule, "rotary": engine.rotary_rule}
    return {**facts, **position, **callbacks, **rules, **model}


def load(engine: Engine, folder: Path) -> Progress:
    """Fill an engine with a checkpoint: weights, optimizer and, in the layout that saved them, random number states.

    Rank 0 says where dropout cannot go on as it was. A collective call; the engine may have taken other steps since.
    Raises ConfigError on every rank if any cannot read its part.
    """
    saved, has_streams = checkpoint_state.load(
        engine.chunks, engine.optimizer, folder, layout_of(engine.config, engine.topology.world_size)
    )
    engine.rotary_rule = saved.get("rotary", IN_FP32)
    by_stream = saved.get("dropout", BY_STREAM) == BY_STREAM
    engine.dropout.rule = BY_STREAM if by_stream and has_streams else BY_PLACE
    if by_stream and not has_streams and derived.has_dropout(engine.config) and engine.topology.rank == 0:
        print(
            f"dropout: {folder} was saved by {in_words(saved['layout'])}, whose random number states fit no other "
            f"layout or device. From step {saved['step'] + 1} on, masks follow from seed, step, layer and micro-batch",
            flush=True,
        )
    return Progress(saved["step"], saved["consumed_samples"], saved.get("health"), saved.get("callbacks", {}))
