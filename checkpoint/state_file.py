"""`state.json`: a checkpoint's step, model, layout and other facts besides its tensors. Read without torch."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from base.errors import ConfigError
from checkpoint.manifest import ADVICE, STATE
from configs.architecture import architecture
from configs.job import Job
from configs.schema import Config


def read_state(folder: Path) -> dict[str, Any]:
    """Return the content of a checkpoint's state.json. Raises ConfigError if it cannot be read or lacks a key."""
    try:
        state = json.loads((folder / STATE).read_bytes())
        if not isinstance(state, dict):
            raise ValueError("it contains no JSON object")
        missing = [key for key in _STATE_KEYS if key not in state]
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"checkpoint {folder} cannot be read: {STATE}: {error}. {ADVICE}.") from error
    if missing:
        raise ConfigError(f"checkpoint {folder} cannot be read: {STATE} lacks {missing[0]}. {ADVICE}.")
    return state


_STATE_KEYS = (
    "step",
    "consumed_samples",
    "health",
    "vocab_size",
    "architecture",
    "precision",
    "layout",
    "optimizer_steps",
    "loss_scaler",
)


def of_model(job: Job) -> dict[str, Any]:
    """Return the entries of state.json that describe the model: vocabulary size, architecture, precision and layout."""
    return {
        "vocab_size": job.vocab_size,
        "architecture": architecture(job.config, job.vocab_size),
        "precision": job.config.training.precision,
        "layout": layout_of(job.config, job.world_size),
    }


def layout_of(config: Config, world_size: int) -> dict[str, Any]:
    """Return the parallel layout as state.json stores it: `world_size` and the keys of `parallel`."""
    return {"world_size": world_size, **asdict(config.parallel)}


def draws_alike(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether random number states saved in layout `one` fit layout `other`: each rank must draw for the same
    sequence rows and layers, which expert parallelism does not affect. Other keys of `parallel` are ignored, because
    later versions may add keys."""
    sizes_alike = all((one.get(key) or 1) == (other.get(key) or 1) for key in _DRAWING)
    return sizes_alike and bool(one.get("sequence")) == bool(other.get("sequence"))


_DRAWING = ("world_size", "tensor", "pipeline", "virtual_pipeline", "context")


def describe_layout(layout: dict[str, Any]) -> str:
    """Return the number of ranks and the degrees above 1 of a layout, such as "4 ranks: data 2 x tensor 2"."""
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
