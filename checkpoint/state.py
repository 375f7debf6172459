"""The content of a checkpoint (weights, optimizer state, random number states and progress): collect and load it.
Tensors are stored in one file per rank (checkpoint/shards.py), the rest in `state.json` and, for people and for
checkpoint/export.py, `config.yaml`."""

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
from models.parallelize import bare, frozen_weights
from optim import state as optimizer_state
from optim.state import StoredTensor
from parallel.joint_errors import raised_together
from parallel.megatron.optimizer import restore_scaler, scaler_state
from parallel.megatron.random_state import random_states, restore_random_states
from parallel.owned import is_off_device, with_boxes


def describe(optimizer: MegatronOptimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Return the content of state.json: the run's `state`, the optimizer's step count and its loss scaler."""
    return {**state, "optimizer_steps": optimizer_state.steps_taken(optimizer), "loss_scaler": scaler_state(optimizer)}


def tensors_to_save(chunks: list[DistributedDataParallel], optimizer: MegatronOptimizer) -> list[ShardedTensor]:
    """Return the tensors that this rank saves: views of the model's and optimizer's tensors, copies of the random
    number states, and references to offloaded state."""
    tensors = [*_model_tensors(chunks, optimizer), *_random_tensors(random_states())]
    return [tensor for tensor in tensors if is_main_replica(tensor.replica_id)]


def load(
    chunks: list[DistributedDataParallel], optimizer: MegatronOptimizer, folder: Path, layout: dict[str, Any]
) -> dict[str, Any]:
    """Load a checkpoint into model chunks and optimizer, and return its state.json. Random number states are restored
    only if each rank draws numbers for the same rows and layers in `layout` as in the checkpoint's layout. A collective
    call, also allowed after steps were taken. Raises ConfigError on every rank if any rank cannot read its tensors."""
    with raised_together():
        state, reader = read_state(folder), ShardReader(folder)
        optimizer_state.allocate(optimizer, chunks, state["optimizer_steps"])
        with frozen_weights(chunks):  # a pending gather of old weights must not overwrite the new ones
            tensors = _model_tensors(chunks, optimizer)
            for tensor in tensors:
                if not isinstance(tensor, StoredTensor):
                    reader.fill(tensor)
            optimizer_state.fill_stored(optimizer, tensors, reader.fill)
        restore_scaler(optimizer, state["loss_scaler"])
        states = {name: torch.empty_like(value) for name, value in random_states().items()}
        tensors = _random_tensors(states)
        # Random states are missing if another kind of device saved the checkpoint.
        if draws_alike(state["layout"], layout) and all(tensor.key in reader for tensor in tensors):
            for tensor in tensors:
                reader.fill(tensor)
            restore_random_states(states)
    return state


def load_weights(chunks: list[torch.nn.Module], folder: Path) -> None:
    """Load only a checkpoint's weights into bare model chunks, in any layout. Raises ConfigError."""
    reader = ShardReader(folder)
    for tensor in _weight_tensors(sharded_weights(chunks), chunks):
        reader.fill(tensor)


def sharded_weights(chunks: list[torch.nn.Module]) -> dict[str, Any]:
    """Return Megatron's sharded state dict of the weights, with one key per model chunk. Each entry is a block of a
    global tensor, whose shape does not depend on the layout."""
    return {f"model{i}": with_boxes(chunk.sharded_state_dict()) for i, chunk in enumerate(chunks)}


def _model_tensors(chunks: list[DistributedDataParallel], optimizer: MegatronOptimizer) -> list[ShardedTensor]:
    bare_chunks = bare(chunks)
    weights = sharded_weights(bare_chunks)
    return [*_weight_tensors(weights, bare_chunks), *optimizer_state.sharded_state(optimizer, chunks, weights)]


def _weight_tensors(weights: dict[str, Any], chunks: list[torch.nn.Module]) -> list[ShardedTensor]:
    """Return a ShardedTensor for each weight on the device, whose data are views of the parameters and buffers of the
    chunks."""
    sharded = [value for value in nested_values(load_preprocess(weights)[0]) if isinstance(value, ShardedTensor)]
    offloaded = [value for chunk in chunks for value in chunk.parameters() if is_off_device(value)]
    stand_ins = {value.untyped_storage().data_ptr() for value in offloaded}
    sharded = [tensor for tensor in sharded if tensor.data.untyped_storage().data_ptr() not in stand_ins]
    # The other entries are TransformerEngine's FP8 state, which none of the supported precisions has.
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
