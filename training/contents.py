"""What a checkpoint holds, and how a model takes it back: weights, optimizer state, random number states, progress.

Tensors lie in one file per rank that wrote (training/shards.py); the rest in `state.json` and, for people and for
training/export.py, `config.yaml`.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess

from configs.architecture import architecture
from configs.schema import ConfigError
from optim import state as optimizer_state
from training.rewind import random_states, restore_random_states
from training.shards import Reader
from training.state_file import Progress, read_state
from training.step import Model

__all__ = [
    "Progress",
    "describe",
    "load",
    "load_weights",
    "raise_together",
    "read_state",
    "sharded_weights",
    "tensors_to_save",
]


def describe(model: Model, progress: Progress, vocab_size: int, facts: dict[str, Any]) -> dict[str, Any]:
    """The content of state.json. `facts`: whose checkpoint it is (`run`) and what it was trained on (`data`)."""
    return {
        **facts,
        **asdict(progress),
        "vocab_size": vocab_size,
        "architecture": architecture(model.config, vocab_size),
        "precision": model.config.training.precision,
        "layout": _layout(model),
        "optimizer_steps": optimizer_state.steps_taken(model.optimizer),
        "loss_scaler": optimizer_state.scaler_state(model.optimizer),
    }


def tensors_to_save(model: Model) -> list[ShardedTensor]:
    """What this rank writes of a model between two steps: views, but for the random number states."""
    tensors = [*_model_tensors(model), *_random_tensors(random_states())]
    return [tensor for tensor in tensors if is_main_replica(tensor.replica_id)]


def load(model: Model, folder: Path) -> Progress:
    """See training.checkpoint.load."""
    problem, progress = None, Progress()
    try:
        progress = _load(model, folder)
    except ConfigError as error:
        problem = str(error)
    raise_together(problem)
    return progress


def _load(model: Model, folder: Path) -> Progress:
    state, reader = read_state(folder), Reader(folder)
    optimizer_state.allocate(model.optimizer, model.chunks, state["optimizer_steps"])
    with model.frozen_weights():  # a gather of old weights that is still due must not come after the new ones
        for tensor in _model_tensors(model):
            reader.fill(tensor)
    optimizer_state.restore_scaler(model.optimizer, state["loss_scaler"])
    if state["layout"] == _layout(model):
        states = {name: torch.empty_like(value) for name, value in random_states().items()}
        tensors = _random_tensors(states)
        if all(tensor.key in reader for tensor in tensors):  # else another kind of device saved it
            for tensor in tensors:
                reader.fill(tensor)
            restore_random_states(states)
    return Progress(state["step"], state["consumed_samples"], state.get("health"))


def load_weights(chunks: list[torch.nn.Module], folder: Path) -> None:
    """Fill bare model chunks, in any layout, with a checkpoint's weights alone. Raises ConfigError."""
    reader = Reader(folder)
    for tensor in _weight_tensors(sharded_weights(chunks), chunks):
        reader.fill(tensor)


def sharded_weights(chunks: list[torch.nn.Module]) -> dict[str, Any]:
    """Megatron's description of the chunks' weights: a key for each chunk, and inside, global tensors, in which layouts meet."""
    return {f"model{i}": chunk.sharded_state_dict() for i, chunk in enumerate(chunks)}


def raise_together(problem: str | None) -> None:
    """Raise ConfigError on every rank if any has a problem: nobody waits for a rank that gave up. A collective call."""
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    found = [f"{text} (rank {rank})" if len(problems) > 1 else text for rank, text in enumerate(problems) if text is not None]
    if found:
        raise ConfigError(found[0])


def _model_tensors(model: Model) -> list[ShardedTensor]:
    weights = sharded_weights(model.bare_chunks)
    optimizer = optimizer_state.sharded_state(model.optimizer, model.chunks, weights)
    return [*_weight_tensors(weights, model.bare_chunks), *optimizer]


def _weight_tensors(weights: dict[str, Any], chunks: list[torch.nn.Module]) -> list[ShardedTensor]:
    """The boxes of all weights, as views into the chunks' own parameters and buffers."""
    sharded = [value for value in nested_values(load_preprocess(weights)[0]) if isinstance(value, ShardedTensor)]
    # Everything else in there is TransformerEngine's FP8 state, which no precision of ours has.
    own = {value.untyped_storage().data_ptr() for chunk in chunks for value in [*chunk.parameters(), *chunk.buffers()]}
    assert all(tensor.data.untyped_storage().data_ptr() in own for tensor in sharded), "a checkpoint would fill a copy"
    held = {tensor.data.data_ptr() for tensor in sharded}
    missing = sorted(name for chunk in chunks for name, value in chunk.named_parameters() if value.data_ptr() not in held)
    assert not missing, f"weights that a checkpoint would miss: {missing}"
    return sharded


def _layout(model: Model) -> dict[str, Any]:
    return {"world_size": model.topology.world_size, **asdict(model.config.parallel)}


def _random_tensors(states: dict[str, torch.Tensor]) -> list[ShardedTensor]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    return [
        ShardedTensor.from_rank_offsets(f"random.{name}", value, (0, rank, world_size), prepend_axis_num=1)
        for name, value in states.items()
    ]
