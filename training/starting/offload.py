"""Set up a run's offloading at its start: layer inputs (training.activation_offload), tensors that MoE layers offload
between forward and backward (moe.memory_strategy), and experts' weights (moe.weights_device)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import groupby

import torch
import torch.distributed as dist
from megatron.core.optimizer.optimizer import MegatronOptimizer

from base.errors import ConfigError
from base.units import MIB
from configs import derived
from configs.schema import Config
from configs.show import show
from memory.budgets import HOST
from memory.host_link import HostLink
from memory.layer_inputs import LayerInputs
from models.initial_weights import fill_off_device
from moe.chunk_plan import STRATEGIES
from moe.experts.streamed import ExpertStream, StreamedExperts
from moe.layer import layers_of
from moe.planning.inputs import fullest_load, live_calls
from moe.schedule.restore import host_bytes
from optim.offload.optimizer import offload_of
from parallel.joint_errors import raise_together
from parallel.megatron.checkpoints import around_checkpoints
from parallel.pipeline import layer_visits, offloaded_layer_inputs
from parallel.topology import Topology

KEY = "training.activation_offload"


def offload_layer_inputs(
    config: Config, topology: Topology, chunks: Sequence[torch.nn.Module], link: HostLink
) -> LayerInputs | None:
    """Make the model chunks offload layer inputs to the host, for the number of layers that the config sets or that the
    memory budget allows. Returns None if layer inputs are not offloaded. A collective call. Raises ConfigError on all
    ranks if any rank has too little memory."""
    if config.training.activation_offload == "none":
        return None
    size, headroom = derived.layer_input_bytes(config), _host_headroom()
    number = offloaded_layer_inputs(config, topology.world_size, topology.pipeline.rank, _minimum(headroom, topology))
    found = [link.take(size, "layer inputs") for _ in range(number)] if number * size <= headroom else [None]
    memory = [buffer for buffer in found if buffer is not None]
    if not _minimum(len(memory) == len(found), topology):
        raise ConfigError(
            f"{KEY} ({show(config.training.activation_offload)}): a rank's host has less than "
            f"{number * size / MIB:.1f} MiB free for layer inputs. Try {KEY}=auto."
        )
    store = LayerInputs(link, memory)
    for index, chunk in enumerate(chunks if config.training.pass_order == "by_micro_batch" else ()):
        around_checkpoints(chunk, partial(store.kept, index))
    return store


def reserve_offloads(config: Config, topology: Topology, link: HostLink) -> dict[str, int]:
    """Reserve pinned host memory for the tensors that the MoE layers' memory strategy offloads. A collective call.

    Returns the bytes that each memory strategy offloads in one step of this rank, at the load limit or, without a load
    limit, at an even load. Returns {} on a CPU, which offloads by plain copies. Raises ConfigError on all ranks if any
    rank has too little memory.
    """
    if not derived.is_moe(config) or not link.pins:
        return {}
    load = fullest_load(config, topology.device.type)
    calls = live_calls(config, topology.world_size, topology.pipeline.rank)
    needs = {name: calls * host_bytes(strategy, load) for name, strategy in STRATEGIES.items()}
    need = needs.get(config.moe.memory_strategy, 0)
    raise_together(HOST.error_message(need, "what experts offload") if need > _host_headroom() else None)
    link.step.begin(need)
    return needs


def _host_headroom() -> int:
    return int(min(HOST.headroom, 2**62))


def _minimum(value: int, topology: Topology) -> int:
    """Return the minimum of `value` over all ranks."""
    least = torch.tensor([value], device=topology.device)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return int(least.item())


def stream_experts(
    config: Config, topology: Topology, chunks: Sequence[torch.nn.Module], optimizer: MegatronOptimizer
) -> ExpertStream | None:
    """Initialize the weights of offloaded experts, and make the MoE layers of the chunks read the weights from device
    slots that a copy stream fills. Returns None if the experts stay on the device."""
    offload = offload_of(optimizer)
    if offload is None or offload.experts is None:
        return None
    experts, layers = offload.experts, layers_of(chunks)
    records, device = experts.records, topology.device
    fill_off_device(chunks, config, fillings(optimizer))
    offload.initialize()
    numbers = {layer: number for number, layer in enumerate(layers)}
    num_slots = records.weight_slots, records.grad_slots

    def visits(num_micro_batches: int, forward_only: bool) -> list[int]:
        """Return the order in which passes visit this stage's MoE layers, as layer indices on this rank."""
        order = layer_visits(config, num_micro_batches, topology.pipeline.rank, forward_only)
        return [numbers[layer] for layer, _ in groupby(layer for layer in order if layer in numbers)]

    stream = ExpertStream(experts, device, experts.dtype, records.padded_numel, num_slots, visits)
    for layer, module in layers.items():
        shapes = [parameter.shape for parameter in module.experts.by_kind()]
        streamed = StreamedExperts(stream, numbers[layer], shapes, module.experts.activation)
        module.stream_weights(streamed)
    return stream


def fillings(optimizer: MegatronOptimizer) -> Iterator[AbstractContextManager[None]]:
    """Yield a context for each MoE layer, in which the layer's offloaded weights can be written."""
    offload = offload_of(optimizer)
    assert offload is not None and offload.experts is not None
    for layer in range(len(offload.experts.layers)):
        yield offload.experts.filling(layer)
