"""The order of a step's passes from the configuration alone: Megatron-core's schedule of micro-batches (1F1B,
interleaved or not), or by layer; and which layers' weights come to which slot in that order, where they do not stay."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from configs import derived
from configs.schema import Config


def layers_of_stage(config: Config, stage: int) -> list[range]:
    """The layers, from 0, of each of a stage's model chunks."""
    stages, chunks = config.parallel.pipeline, config.parallel.virtual_pipeline or 1
    size = config.model.num_layers // (stages * chunks)
    return [range(part * size, (part + 1) * size) for part in range(stage, stages * chunks, stages)]


def passes(config: Config, num_micro_batches: int, stage: int) -> Iterator[tuple[bool, int]]:
    """(whether it is a forward pass, model chunk) of each pass of a stage in one step."""
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
    """The layers of the whole model, from 0, in the order in which one step visits those of a stage. A layer that is
    visited twice running is there once: a recomputation and its backward pass are one visit.

    `forward_only`: of an evaluation, which takes one micro-batch after the other in any order of passes.
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
class SlotFill:
    """Weights of a layer come to slot `slot` before visit `visit`, behind visit `after`, the last that used the slot;
    -1: at once."""

    layer: int
    slot: int
    visit: int
    after: int


def slot_fills(visits: Sequence[int], slots: int) -> list[SlotFill]:
    """What must come in a step that visits layers in this order, and begins with empty slots. The order is known, so
    that which slot is filled next is too: the one whose layer is used last (Belady). Beside the layer that is visited
    one more slot is filled: with two slots a layer's weights come while the layer before it computes. Passes go there
    and back, so that slots beyond two keep a part of the layers at each turn, while the rest streams.

    Raises ValueError where there is no slot.
    """
    if slots < 1 and visits:
        raise ValueError(f"slots must be at least 1, not {slots}")
    following: list[float] = [math.inf] * len(visits)
    seen: dict[int, int] = {}
    for index in range(len(visits) - 1, -1, -1):
        following[index] = seen.get(visits[index], math.inf)
        seen[visits[index]] = index
    held: list[int | None] = [None] * slots
    last, uses, found = [-1] * slots, [math.inf] * slots, list[SlotFill]()
    before = None  # the slot of the visit before
    for index, layer in enumerate(visits):
        if layer in held:
            slot = held.index(layer)
        else:
            free = [each for each in range(slots) if held[each] is None]
            may = free or [each for each in range(slots) if each != before or slots == 1]
            slot = free[0] if free else max(may, key=lambda each: uses[each])
            found.append(SlotFill(layer, slot, index, last[slot]))
            held[slot] = layer
        last[slot], uses[slot], before = index, following[index], slot
    return found


class LayerPass(NamedTuple):
    """One of a step's passes through a layer, where all micro-batches go through a layer before the next. Counted
    from 0."""

    is_forward: bool
    layer: int
    micro_batch: int


def layer_passes(num_layers: int, num_micro_batches: int) -> Iterator[LayerPass]:
    """All passes of a step by layer, on one stage. The head's follow each micro-batch's last forward pass."""
    for is_forward in (True, False):
        for layer in range(num_layers) if is_forward else reversed(range(num_layers)):
            for micro_batch in range(num_micro_batches):
                yield LayerPass(is_forward, layer, micro_batch)


def most_in_flight(config: Config, world_size: int, stage: int, of_chunk: Sequence[int]) -> int:
    """The most that a stage holds between its passes at once, where a micro-batch's forward pass of a model chunk
    leaves `of_chunk`."""
    held = most = 0
    for is_forward, chunk in passes(config, derived.num_micro_batches(config, world_size), stage):
        held += of_chunk[chunk] if is_forward else -of_chunk[chunk]
        most = max(most, held)
    return most


def offloaded_layer_inputs(config: Config, world_size: int, stage: int, room: float) -> int:
    """How many inputs of layers each rank of a stage has memory of the host for, where the ranks have `room` bytes left
    there: at most as many as wait for their backward pass at once, each micro-batch's anew. By layer the gradients
    between two layers are among them."""
    offload = config.training.activation_offload
    if offload == "none":
        return 0
    if config.training.pass_order == "by_layer":
        waiting = (config.model.num_layers + 1) * derived.num_micro_batches(config, world_size)
    else:
        waiting = most_in_flight(config, world_size, stage, [len(layers) for layers in layers_of_stage(config, stage)])
    budget = room if offload == "auto" else float(offload) * 2**20
    return int(min(budget / derived.layer_input_bytes(config), waiting))
