"""What a checkpoint says of itself beside its tensors: `state.json`. Read without torch."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from checkpoint.manifest import STATE
from configs.architecture import architecture
from configs.schema import Config, ConfigError


def read_state(folder: Path) -> dict[str, Any]:
    """What a checkpoint says of itself beside its tensors. Raises ConfigError where it does not say it."""
    try:
        state = json.loads((folder / STATE).read_bytes())
        missing = [key for key in _STATE_KEYS if key not in state]
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"checkpoint {folder} cannot be read: {STATE}: {error}") from error
    if missing:
        raise ConfigError(f"checkpoint {folder} cannot be read: {STATE} does not say {missing[0]}.")
    return state


_STATE_KEYS = (
    "step",
    "consumed_samples",
    "vocab_size",
    "architecture",
    "precision",
    "layout",
    "optimizer_steps",
    "loss_scaler",
)


def of_model(config: Config, vocab_size: int, world_size: int) -> dict[str, Any]:
    """What a checkpoint says of its model: what it is, in which precision, and how it lay on the ranks."""
    return {
        "vocab_size": vocab_size,
        "architecture": architecture(config, vocab_size),
        "precision": config.training.precision,
        "layout": layout_of(config, world_size),
    }


def layout_of(config: Config, world_size: int) -> dict[str, Any]:
    """How the model lies on the ranks."""
    return {"world_size": world_size, **asdict(config.parallel)}


def draws_alike(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether the random number states of one layout fit another: each rank draws for the same rows and layers.

    Where experts lie draws nothing, and keys of `parallel` that are no sizes, which versions add, change nothing.
    """
    sizes_alike = all((one.get(key) or 1) == (other.get(key) or 1) for key in _DRAWING)
    return sizes_alike and bool(one.get("sequence")) == bool(other.get("sequence"))


_DRAWING = ("world_size", "tensor", "pipeline", "virtual_pipeline", "context")


def in_words(layout: dict[str, Any]) -> str:
    """The ranks and the parallel degrees above 1 of a checkpoint's layout (`world_size` and the keys of `parallel`), on
    one line."""
    ranks, degrees = layout["world_size"], {name: layout.get(key) or 1 for name, key in _DEGREES.items()}
    data = ranks // (degrees["tensor"] * degrees["pipeline"] * degrees["context"])
    named = [f"{name} {size}" for name, size in {"data": data, **degrees}.items() if size > 1]
    if layout.get("sequence"):
        named.append("sequence")
    return f"{ranks} rank{'' if ranks == 1 else 's'}" + (": " if named else "") + " x ".join(named)


_DEGREES = {
    **{key: key for key in ("tensor", "pipeline", "context", "expert")},
    "virtual pipeline": "virtual_pipeline",
    "expert tensor": "expert_tensor",
}
