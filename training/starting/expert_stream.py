"""Experts off the device, made ready at the start of a run: their weights filled where they lie, and the slots of the
device that they come to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import groupby

import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer

from configs.schema import Config
from models.initial_weights import fill_off_device
from moe.experts.streamed import ExpertStream, StreamedExperts
from moe.layer import layers_of
from optim.tiers.tiers import tiers_of
from parallel.pipeline import layer_visits
from parallel.topology import Topology


def stream_experts(
    config: Config, topology: Topology, chunks: Sequence[torch.nn.Module], optimizer: MegatronOptimizer
) -> ExpertStream | None:
    """Fill the weights of experts off the device with their initial values, and have the bare chunks' layers take them
    from slots; None where they lie on the device."""
    tiers = tiers_of(optimizer)
    if tiers is None or tiers.experts is None:
        return None
    tier, layers = tiers.experts, layers_of(chunks)
    records, device = tier.records, topology.device
    fill_off_device(chunks, config, fillings(optimizer))
    tiers.begin()
    numbers = {layer: number for number, layer in enumerate(layers)}
    num_slots = records.weight_slots, records.grad_slots
    visits = _visits(config, topology.pipeline.rank, numbers)
    stream = ExpertStream(tier, device, tier.dtype, records.padded_numel, num_slots, visits)
    for layer, module in layers.items():
        shapes = [parameter.shape for parameter in module.experts.by_kind()]
        streamed = StreamedExperts(stream, numbers[layer], shapes, module.experts.activation)
        module.expert_compute.streamed = streamed
    return stream


def fillings(optimizer: MegatronOptimizer) -> Iterator[AbstractContextManager[None]]:
    """Contexts in each of which one layer's weights off the device are at hand, to be filled."""
    tiers = tiers_of(optimizer)
    assert tiers is not None and tiers.experts is not None
    for layer in range(len(tiers.experts.layers)):
        yield tiers.experts.filling(layer)


def _visits(config: Config, stage: int, numbers: dict[int, int]) -> Callable[[int, bool], list[int]]:
    """The order in which this stage's MoE layers are visited, by their numbers on this rank."""

    def visits(num_micro_batches: int, forward_only: bool) -> list[int]:
        order = layer_visits(config, num_micro_batches, stage, forward_only)
        return [numbers[layer] for layer, _ in groupby(layer for layer in order if layer in numbers)]

    return visits
