"""training.activation_offload: the layer inputs of a rank's model chunks, and the host memory for them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist

from configs import derived
from configs.schema import Config, ConfigError
from configs.show import show
from memory.budgets import HOST
from memory.lanes import Lane
from memory.layer_inputs import LayerInputs
from parallel.megatron.checkpoints import around_checkpoints
from parallel.pipeline import offloaded_layer_inputs
from parallel.topology import Topology

KEY = "training.activation_offload"
MIB = 2**20


def offload_layer_inputs(config: Config, topology: Topology, chunks: Sequence[torch.nn.Module]) -> LayerInputs | None:
    """Have bare chunks keep their layers' inputs on the host, as far as the budget lasts. A collective call.

    Raises ConfigError on all ranks where one has not the memory.
    """
    if config.training.activation_offload == "none":
        return None
    size, room = derived.layer_input_bytes(config), _host_room()
    number = offloaded_layer_inputs(config, topology.world_size, topology.pipeline.rank, _least(room, topology))
    memory = _allocate(number, size, topology.device) if number * size <= room else None
    if not _least(memory is not None, topology):
        raise ConfigError(
            f"{KEY} ({show(config.training.activation_offload)}): a rank's host has not {number * size / MIB:.1f} MiB "
            f"left for layer inputs. Try {KEY}=auto."
        )
    assert memory is not None
    up, down = (Lane(f"layer inputs {way} device", topology.device, on_device=True) for way in ("to", "from"))
    store = LayerInputs(topology.device, memory, up, down)
    for index, chunk in enumerate(chunks):
        around_checkpoints(chunk, partial(store.kept, index))
    return store


def _host_room() -> int:
    return int(min(HOST.limit - HOST.total, 2**62))


def _allocate(number: int, size: int, device: torch.device) -> list[torch.Tensor] | None:
    try:
        return [torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda") for _ in range(number)]
    except RuntimeError:
        return None  # whoever agrees on it says so


def _least(value: int, topology: Topology) -> int:
    """Of all ranks."""
    least = torch.tensor([value], device=topology.device)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return int(least.item())
