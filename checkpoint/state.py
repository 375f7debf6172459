"""What a checkpoint holds, and how a model takes it back: weights, optimizer state, random number states, progress.

Tensors lie in one file per rank that wrote (checkpoint/shards.py); the rest in `state.json` and, for people and for
checkpoint/export.py, `config.yaml`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import parallel.megatron  # noqa: F401  (before anything else of Megatron-core: see parallel/megatron/startup.py)

# isort: split
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.optimizer import MegatronOptimizer

from checkpoint.shards import ShardReader
from checkpoint.state_file import draws_alike, read_state
from configs.schema import ConfigError
from models.parallelize import bare, frozen_weights
from optim import state as optimizer_state
from optim.tiers.stored import StoredTensor
from parallel.megatron.random_state import random_states, restore_random_states
from parallel.owned import is_off_device, with_boxes
from parallel.refusal import raise_together

__all__ = [
    "describe",
    "load",
    "load_weights",
    "read_state",
    "sharded_weights",
    "tensors_to_save",
]


def describe(optimizer: MegatronOptimizer, state: dict[str, Any]) -> dict[str, Any]:
    """The content of state.json: what the run says (`state`), and the optimizer's small numbers."""
    return {
        **state,
        "optimizer_steps": optimizer_state.steps_taken(optimizer),
        "loss_scaler": optimizer_state.scaler_state(optimizer),
    }


def tensors_to_save(chunks: list[DistributedDataParallel], optimizer: MegatronOptimizer) -> list[ShardedTensor]:
    """What this rank writes of a model between two steps: views, but for the random number states, and for state off
    the device, of which it is told where it lies."""
    tensors = [*_model_tensors(chunks, optimizer), *_random_tensors(random_states())]
    return [tensor for tensor in tensors if is_main_replica(tensor.replica_id)]


def load(
    chunks: list[DistributedDataParallel], optimizer: MegatronOptimizer, folder: Path, layout: dict[str, Any]
) -> dict[str, Any]:
    """Fill chunks and optimizer with a checkpoint and, where it was saved in this layout, take its random number
    states. Returns its state.json.

    A collective call; the model may have taken other steps since. Raises ConfigError on every rank if any cannot read
    its part.
    """
    problem = None
    state: dict[str, Any] = {}
    try:
        state = _load(chunks, optimizer, folder, layout)
    except ConfigError as error:
        problem = str(error)
    raise_together(problem)
    return state


def _load(
    chunks: list[DistributedDataParallel], optimizer: MegatronOptimizer, folder: Path, layout: dict[str, Any]
) -> dict[str, Any]:
    state, reader = read_state(folder), ShardReader(folder)
    optimizer_state.allocate(optimizer, chunks, state["optimizer_steps"])
    with frozen_weights(chunks):  # a gather of old weights that is still due must not come after the new ones
        tensors = _model_tensors(chunks, optimizer)
        for tensor in tensors:
            if not isinstance(tensor, StoredTensor):
                reader.fill(tensor)
        optimizer_state.fill_stored(optimizer, tensors, reader.fill)
    optimizer_state.restore_scaler(optimizer, state["loss_scaler"])
    states = {name: torch.empty_like(value) for name, value in random_states().items()}
    tensors = _random_tensors(states)
    # They are missing where another kind of device saved it.
    if draws_alike(state["layout"], layout) and all(tensor.key in reader for tensor in tensors):
        for tensor in tensors:
            reader.fill(tensor)
        restore_random_states(states)
    return state


def load_weights(chunks: list[torch.nn.Module], folder: Path) -> None:
    """Fill bare model chunks, in any layout, with a checkpoint's weights alone. Raises ConfigError."""
    reader = ShardReader(folder)
    for tensor in _weight_tensors(sharded_weights(chunks), chunks):
        reader.fill(tensor)


def sharded_weights(chunks: list[torch.nn.Module]) -> dict[str, Any]:
    """Megatron's description of the chunks' weights: a key for each chunk, and inside, global tensors, in which layouts
    meet."""
    return {f"model{i}": with_boxes(chunk.sharded_state_dict()) for i, chunk in enumerate(chunks)}


def _model_tensors(chunks: list[DistributedDataParallel], optimizer: MegatronOptimizer) -> list[ShardedTensor]:
    bare_chunks = bare(chunks)
    weights = sharded_weights(bare_chunks)
    return [*_weight_tensors(weights, bare_chunks), *optimizer_state.sharded_state(optimizer, chunks, weights)]


def _weight_tensors(weights: dict[str, Any], chunks: list[torch.nn.Module]) -> list[ShardedTensor]:
    """The boxes of all weights on the device, as views into the chunks' own parameters and buffers."""
    sharded = [value for value in nested_values(load_preprocess(weights)[0]) if isinstance(value, ShardedTensor)]
    away = [value for chunk in chunks for value in chunk.parameters() if is_off_device(value)]
    stand_ins = {value.untyped_storage().data_ptr() for value in away}
    sharded = [tensor for tensor in sharded if tensor.data.untyped_storage().data_ptr() not in stand_ins]
    # Everything else in there is TransformerEngine's FP8 state, which no precision of ours has.
    own = {value.untyped_storage().data_ptr() for chunk in chunks for value in [*chunk.parameters(), *chunk.buffers()]}
    assert all(tensor.data.untyped_storage().data_ptr() in own for tensor in sharded), "a checkpoint would fill a copy"
    held = {tensor.data.data_ptr() for tensor in sharded}
    missing = sorted(
        name
        for chunk in chunks
        for name, value in chunk.named_parameters()
        if value.data_ptr() not in held and not is_off_device(value)
    )
    assert not missing, f"weights that a checkpoint would miss: {missing}"
    return sharded


def _random_tensors(states: dict[str, torch.Tensor]) -> list[ShardedTensor]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    return [
        ShardedTensor.from_rank_offsets(f"random.{name}", value, (0, rank, world_size), prepend_axis_num=1)
        for name, value in states.items()
    ]
