"""Activations that leave the device between the passes: layer inputs (training.activation_offload) and what MoE layers
offload (moe.memory_strategy), and the host's memory for them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist

from configs import derived
from configs.schema import Config, ConfigError
from configs.show import show
from memory.budgets import HOST
from memory.host_link import HostLink
from memory.layer_inputs import LayerInputs
from moe.chunk_plan import STRATEGIES
from moe.planning.inputs import fullest_load, live_calls
from moe.schedule.restore import host_bytes
from parallel.megatron.checkpoints import around_checkpoints
from parallel.pipeline import offloaded_layer_inputs
from parallel.refusal import raise_together
from parallel.topology import Topology

KEY = "training.activation_offload"
MIB = 2**20


def offload_layer_inputs(
    config: Config, topology: Topology, chunks: Sequence[torch.nn.Module], link: HostLink
) -> LayerInputs | None:
    """Have bare chunks keep their layers' inputs on the host, as far as the budget lasts. A collective call.

    Raises ConfigError on all ranks where one has not the memory.
    """
    if config.training.activation_offload == "none":
        return None
    size, room = derived.layer_input_bytes(config), _host_room()
    number = offloaded_layer_inputs(config, topology.world_size, topology.pipeline.rank, _least(room, topology))
    found = [link.take(size, "layer inputs") for _ in range(number)] if number * size <= room else [None]
    memory = [buffer for buffer in found if buffer is not None]
    if not _least(len(memory) == len(found), topology):
        raise ConfigError(
            f"{KEY} ({show(config.training.activation_offload)}): a rank's host has not {number * size / MIB:.1f} MiB "
            f"left for layer inputs. Try {KEY}=auto."
        )
    store = LayerInputs(link, memory)
    for index, chunk in enumerate(chunks if config.training.pass_order == "by_micro_batch" else ()):
        around_checkpoints(chunk, partial(store.kept, index))
    return store


def reserve_offloads(config: Config, topology: Topology, link: HostLink) -> dict[str, int]:
    """Take the host's memory for what the configured memory strategy of the MoE layers offloads. A collective call.

    Returns how many bytes a step of this rank needs for each strategy, of the mean load or the most that is allowed;
    nothing on a CPU, which offloads by plain copies. Raises ConfigError on all ranks where one has not the memory.
    """
    if not derived.is_moe(config) or not link.pins:
        return {}
    load = fullest_load(config, topology.device.type)
    calls = live_calls(config, topology.world_size, topology.pipeline.rank)
    needs = {name: calls * host_bytes(strategy, load) for name, strategy in STRATEGIES.items()}
    need = needs.get(config.moe.memory_strategy, 0)
    raise_together(HOST.refusal(need, "what experts offload") if need > _host_room() else None)
    link.step.begin(need)
    return needs


def _host_room() -> int:
    return int(min(HOST.room, 2**62))


def _least(value: int, topology: Topology) -> int:
    """The least of all ranks' values."""
    least = torch.tensor([value], device=topology.device)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return int(least.item())
