"""The order of a step's passes, from the config alone: Megatron-core's schedule (1F1B, interleaved or not) or the
layer-wise schedule; and the device buffers ("slots") to which offloaded layers' weights are copied in that order."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from configs import derived
from configs.schema import Config


def layers_of_stage(config: Config, stage: int) -> list[range]:
    """Return the layers of each model chunk of a pipeline stage, numbered from 0 in the whole model."""
    stages, chunks = config.parallel.pipeline, config.parallel.virtual_pipeline or 1
    size = config.model.num_layers // (stages * chunks)
    return [range(chunk * size, (chunk + 1) * size) for chunk in range(stage, stages * chunks, stages)]


def passes(config: Config, num_micro_batches: int, stage: int) -> Iterator[tuple[bool, int]]:
    """Yield (whether it is a forward pass, model chunk) for each pass of a pipeline stage in a step."""
    stages, chunks = config.parallel.pipeline, config.parallel.virtual_pipeline or 1
    total = num_micro_batches * chunks
    if stages == 1:
        warmup = 0
    elif chunks == 1:
        warmup = stages - stage - 1
    else:
        warmup = 2 * (stages - stage - 1) + (chunks - 1) * stages
    warmup = min(warmup, total)

    def chunk(number: int) -> int:
        return number // stages % chunks if chunks > 1 else 0

    for number in range(warmup):
        yield True, chunk(number)
    for number in range(warmup, total):
        yield True, chunk(number)
        yield False, chunks - 1 - chunk(number - warmup)
    for number in range(total - warmup, total):
        yield False, chunks - 1 - chunk(number)


def layer_visits(config: Config, num_micro_batches: int, stage: int, forward_only: bool = False) -> list[int]:
    """Return a stage's layers (numbered from 0 in the whole model) in the order in which a step visits them.

    Successive visits of the same layer count once, such as a recomputation and its backward pass. forward_only: the
    visits of an evaluation, which passes one micro-batch after the other with either schedule.
    """
    chunks = layers_of_stage(config, stage)
    if config.training.pass_order == "by_layer" and not forward_only:
        layers = [layer for chunk in chunks for layer in chunk]
        order = [*layers, *reversed(layers)]
    elif forward_only:
        forwards = [chunk for is_forward, chunk in passes(config, num_micro_batches, stage) if is_forward]
        order = [layer for chunk in forwards for layer in chunks[chunk]]
    else:
        order = []
        for is_forward, chunk in passes(config, num_micro_batches, stage):
            order += chunks[chunk] if is_forward else reversed(chunks[chunk])
    return [layer for layer, _ in groupby(order)]


@dataclass(frozen=True)
class PlannedFill:
    """A planned copy of a layer's weights to a device slot, for one visit of the layer (numbered in the step's order).

    It starts after visit `after`, the last that uses the old contents of the slot (-1: immediately), and must end
    before visit `visit`.
    """

    layer: int
    slot_index: int
    visit: int
    after: int


def slot_fills(visits: Sequence[int], num_slots: int) -> list[PlannedFill]:
    """Return the copies of weights to device slots for a step that visits layers in this order. All slots start empty.

    As the order is known, a copy replaces the weights that are needed last (Belady's algorithm), but not those of the
    layer visited before: with two slots, a layer's weights are copied while the layer before it computes. Slots beyond
    two keep some layers at each reversal of the order. Raises ValueError if there is no slot.
    """
    if num_slots < 1 and visits:
        raise ValueError(f"The number of device slots must be at least 1, but is {num_slots}.")
    following: list[float] = [math.inf] * len(visits)
    seen: dict[int, int] = {}
    for index in range(len(visits) - 1, -1, -1):
        following[index] = seen.get(visits[index], math.inf)
        seen[visits[index]] = index
    held: list[int | None] = [None] * num_slots
    last, uses, found = [-1] * num_slots, [math.inf] * num_slots, list[PlannedFill]()
    before = None  # the slot of the previous visit
    for visit, layer in enumerate(visits):
        if layer in held:
            index = held.index(layer)
        else:
            free = [each for each in range(num_slots) if held[each] is None]
            may = free or [each for each in range(num_slots) if each != before or num_slots == 1]
            index = free[0] if free else max(may, key=lambda each: uses[each])
            found.append(PlannedFill(layer, index, visit, last[index]))
            held[index] = layer
        last[index], uses[index], before = visit, following[visit], index
    return found


class LayerPass(NamedTuple):
    """One micro-batch's pass through one layer in the layer-wise schedule. Numbers count from 0."""

    is_forward: bool
    layer: int
    micro_batch: int


def layer_passes(num_layers: int, num_micro_batches: int) -> Iterator[LayerPass]:
    """Yield all passes of a layer-wise step in order. The head runs after each micro-batch's last forward pass."""
    for is_forward in (True, False):
        for layer in range(num_layers) if is_forward else reversed(range(num_layers)):
            for micro_batch in range(num_micro_batches):
                yield LayerPass(is_forward, layer, micro_batch)


def most_in_flight(config: Config, world_size: int, stage: int, of_chunk: Sequence[int]) -> int:
    """Return the most units (layer inputs, for example) that a pipeline stage stores for backward passes at once.

    of_chunk: the units that a forward pass of each model chunk adds, and its backward pass frees.
    """
    held = most = 0
    for is_forward, chunk in passes(config, derived.num_micro_batches(config, world_size), stage):
        held += of_chunk[chunk] if is_forward else -of_chunk[chunk]
        most = max(most, held)
    return most


def offloaded_layer_inputs(config: Config, world_size: int, stage: int, headroom: float) -> int:
    """Return how many layer inputs each rank of a stage can offload, in `headroom` bytes or the configured MiB.

    It is at most the number that wait for their backward pass at once, with gradients in the layer-wise schedule.
    """
    offload = config.training.activation_offload
    if offload == "none":
        return 0
    if config.training.pass_order == "by_layer":
        waiting = (config.model.num_layers + 1) * derived.num_micro_batches(config, world_size)
    else:
        waiting = most_in_flight(config, world_size, stage, [len(layers) for layers in layers_of_stage(config, stage)])
    budget = headroom if offload == "auto" else float(offload) * 2**20
    return int(min(budget / derived.layer_input_bytes(config), waiting))
