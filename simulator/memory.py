"""The memory that each rank needs, by kind, from the configuration alone.

weights, gradients and optimizer follow Megatron-core's DDP buffers and distributed optimizer (simulator/buffers.py);
state that is kept in tiers is arranged as a run arranges it (simulator/tiers.py). activations are the most that a step
has beside all that stays: what the schedule of micro-batches holds at once and works with (simulator/activations.py),
or, where that is more, what it takes to reduce and to clip the gradients. buffers stay from step to step: the one that
sequence parallelism gathers into, and the table of rotary positions. What a GPU's libraries hold and what its allocator
loses between tensors comes on top.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from configs import derived
from configs.ranks import launched
from configs.rotary import switches_at
from configs.schema import Config, MemoryConfig
from memory.budgets import MIB, Budget, open_budgets
from models.blueprint import blocks, parts
from models.blueprint.operation import INPUT, Block
from moe.chunk_plan import Plan
from moe.planning.inputs import slot_bytes
from optim.arrangement.arrange import Arrangement, Capacity
from optim.arrangement.off_device import ExpertRecords
from optim.arrangement.traffic import records_of_stage
from parallel.pipeline import layer_passes, passes
from simulator.activations import Activations
from simulator.buffers import Buffer, buffers
from simulator.layer_inputs import LayerInputPlan, layer_inputs
from simulator.memory_tape import MemoryProfile, Tape
from simulator.off_device.parts import expert_parts
from simulator.parameters import Place, places, state_ranks
from simulator.sizes import FP32, Sizes
from simulator.tiers import TierPlan, least_host_bytes, left

UNLIMITED = Capacity()
TOLERANCE = 0.1  # of the plan's memory: a device is given up on only where this much less would not fit either
KINDS = ("weights", "gradients", "optimizer", "activations", "buffers")
EXPERTS_OFF = ("host_bytes", "disk_bytes")  # of ExpertRecords


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank: its device's by kind, and beside them `host_activations` and what `tiers` of optimizer state
    and `experts` off the device take of the host and the disk; the slots of these count as weights and gradients.
    `link_activations`: what a step copies to the host and back of layer inputs."""

    rank: int
    stage: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int
    host_activations: int = 0
    link_activations: tuple[int, int] = (0, 0)
    tiers: Arrangement | None = field(default=None, repr=False)
    experts: ExpertRecords | None = field(default=None, repr=False)

    @property
    def host_experts(self) -> int:
        """Bytes of the host that weights and gradients of experts off the device take."""
        return 0 if self.experts is None else self.experts.host_bytes

    @property
    def disk_experts(self) -> int:
        return 0 if self.experts is None else self.experts.disk_bytes

    @property
    def host(self) -> int:
        """Bytes of the host, beside the device's."""
        return self.host_activations + self.host_experts + (0 if self.tiers is None else self.tiers.host_bytes)

    @property
    def disk(self) -> int:
        return self.disk_experts + (0 if self.tiers is None else self.tiers.disk_bytes)

    @property
    def total(self) -> int:
        return sum(getattr(self, kind) for kind in KINDS)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        numbers: dict[str, Any] = {key: getattr(self, key) for key in ("rank", "stage", *KINDS, "total")}
        numbers |= {"host": self.host, "host_activations": self.host_activations, "disk": self.disk}
        numbers["host_activations_out"], numbers["host_activations_back"] = self.link_activations
        if self.tiers is not None:
            numbers |= {"host_parts": self.tiers.host_parts, "early_share": self.tiers.early_share}
        if self.experts is not None:
            numbers |= {"experts": expert_parts(self.experts)}
        return numbers


def rank_memory(
    config: Config, vocab_size: int, world_size: int, device: str, plan: Plan | None = None, rooms: Capacity = UNLIMITED
) -> list[RankMemory]:
    """The memory of every rank. `plan` is that of the MoE layers; by default what the config fixes. `rooms`: what a
    rank may use of each tier in all."""
    element = derived.element_size(config)
    # both moments, and the fp32 weights of a half precision model
    state_bytes = 2 * FP32 + (FP32 if element < FP32 else 0)
    activations = Activations(config, vocab_size, device, plan)
    stages = config.parallel.pipeline
    static = [buffers(config, vocab_size, world_size, stage) for stage in range(stages)]
    staying = [staying_bytes(config, stage) for stage in range(stages)]

    def working(room: float) -> tuple[list[int], list[LayerInputPlan]]:
        """By stage: activations of the device, and layer inputs on the host, which has so much room for them."""
        inputs = [layer_inputs(config, world_size, stage, room) for stage in range(stages)]
        live = [activations_of_stage(config, activations, world_size, stage, inputs[stage]) for stage in range(stages)]
        alone = state_ranks(config, world_size)["dense"] == 1
        after = [after_backward_bytes(config, of_stage, device, alone) for of_stage in static]
        return [max(pair) for pair in zip(live, after, strict=True)], inputs

    most, leaving = working(rooms.host)
    distributed = config.optimizer.distributed

    @cache
    def optimizer(stage: int, kind: str, rank: int) -> int:
        owned = [each for buffer in static[stage][kind] for each in buffer.owned(rank if distributed else 0)]
        return sum((each.end - each.start) * state_bytes + FP32 for each in owned)

    everyone, found = list(places(config, world_size)), dict[int, Arrangement]()
    records = [records_of_stage(config, world_size, stage) for stage in range(stages)]
    numbers = [sum(buffer.size for kind in of_stage.values() for buffer in kind) for of_stage in static]
    weights = [n * element + (of.weights_on_device if of else 0) for n, of in zip(numbers, records, strict=True)]
    gradients = [n * FP32 + (of.grads_on_device if of else 0) for n, of in zip(numbers, records, strict=True)]
    if derived.has_tiers(config):
        on_host, on_disk = (max((getattr(of, key) for of in records if of), default=0) for key in EXPERTS_OFF)
        rooms = replace(rooms, host=max(rooms.host - on_host, 0), disk=max(rooms.disk - on_disk, 0))
        tiers = TierPlan(config, vocab_size, world_size, rooms)
        beside = [weights[i] + gradients[i] + most[i] + staying[i] for i in range(stages)]
        found = {place.rank: tiers.of(place, beside[place.stage]) for place in everyone}
        if any(plan.host for plan in leaving):  # layer inputs get what optimizer state leaves
            most, leaving = working(max(rooms.host - max(of_rank.host_bytes for of_rank in found.values()), 0))

    def state(place: Place) -> int:
        if place.rank in found:
            return found[place.rank].device_bytes
        return optimizer(place.stage, "dense", place.data_context) + optimizer(place.stage, "expert", place.expert_data)

    return [
        RankMemory(
            place.rank,
            place.stage,
            weights[place.stage],
            gradients[place.stage],
            state(place),
            most[place.stage],
            staying[place.stage],
            leaving[place.stage].host,
            leaving[place.stage].link_bytes,
            found.get(place.rank),
            records[place.stage],
        )
        for place in everyone
    ]


def staying_bytes(config: Config, stage: int) -> int:
    """The buffer that sequence parallelism gathers into, slots for copies of experts, the angles of rotary positions of
    each model chunk, and the mask of a sliding window with dropout."""
    model, of_stage = config.model, parts(config)[stage]
    # What goes into the widest layer that is split by its outputs.
    sizes = Sizes(config)
    result = sizes.tokens * model.hidden_size * sizes.element if config.parallel.sequence else 0
    if model.position_embedding == "rope":
        sets = 2 if switches_at(model.rotary_scaling) is not None and config.data.documents == "separate" else 1
        result += len(of_stage) * sets * model.sequence_length * derived.rotary_dim(config) * FP32
    if derived.attended_share(config) < 1 and model.attention_dropout > 0:
        result += model.sequence_length**2
    return result + slot_bytes(config, stage)


def after_backward_bytes(config: Config, of_stage: dict[str, list[Buffer]], device: str, alone: bool) -> int:
    """On a CPU gloo's reduce-scatter, and in fp32 the optimizer of one rank (`alone`), works on a copy of all that is
    reduced, and clipping on one of each parameter's gradient in turn; on a GPU nothing is copied."""
    if device != "cpu":
        return 0
    every = [buffer for kind in of_stage.values() for buffer in kind]
    copied = config.optimizer.distributed and not (alone and config.training.precision != "fp32")
    copies = sum(buffer.size for buffer in every) if copied else 0
    largest = max((end - start for buffer in every for start, end in buffer.ranges), default=0)
    return FP32 * max(copies, largest if config.optimizer.clip_grad > 0 else 0)


# ---------------------------------------------------------------------------------------------------------------------
# Micro-batches in flight
# ---------------------------------------------------------------------------------------------------------------------


def activations_of_stage(
    config: Config, activations: Activations, world_size: int, stage: int, inputs: LayerInputPlan
) -> int:
    """The most that a stage's micro-batches hold at once on the device."""
    if config.training.pass_order == "by_layer":
        return _activations_by_layer(config, activations, world_size, inputs)
    of_stage, leaving = parts(config)[stage], iter(inputs.leaving)
    in_flight: list[deque[MemoryProfile]] = [deque() for _ in of_stage]

    @cache
    def profiled(chunk: int, leaving: int) -> MemoryProfile:
        return activations.profile(of_stage[chunk], leaving)

    live = peak = 0
    for is_forward, chunk in passes(config, derived.num_micro_batches(config, world_size), stage):
        if is_forward:
            profile = profiled(chunk, next(leaving))
            in_flight[chunk].append(profile)
            peak = max(peak, live + profile.forward)
            live += profile.kept
        else:
            profile = in_flight[chunk].popleft()
            live -= profile.kept
            peak = max(peak, live + profile.backward)
    return peak


def _activations_by_layer(config: Config, activations: Activations, world_size: int, inputs: LayerInputPlan) -> int:
    """The most that is there at once: what lies between the layers, and what one pass takes beside it. The head's two
    passes follow a micro-batch's last layer, the embedding's lie beside the first one's."""
    state = derived.layer_input_bytes(config)
    ((part,),) = parts(config)
    embedding, *layers, head = blocks(config, activations.vocab_size, part)

    @cache
    def profiled(kind: tuple[int, bool], number: int) -> MemoryProfile:
        return _block_profile(activations, layers[number], state)

    kinds = [(kind, layer.slides) for kind, layer in zip(part.layers, layers, strict=True)]
    first = {kind: kinds.index(kind) for kind in kinds}
    of_layers = [profiled(kind, first[kind]) for kind in kinds]
    before, after = _block_profile(activations, embedding, 0), _block_profile(activations, head, state)
    count = derived.num_micro_batches(config, world_size)
    of_micro_batch = activations.row_bytes + before.kept
    peak = 0
    for now, there in zip(layer_passes(len(layers), count), inputs.during, strict=True):
        own, layer = of_layers[now.layer], now.layer
        begun = now.micro_batch + 1 if now.is_forward and layer == 0 else count
        if now.is_forward:
            takes = [own.forward - state]
            if layer == 0:
                takes.append(before.forward - before.kept - state)
            if layer == len(layers) - 1:
                takes.append(max(after.forward, after.backward))
        else:
            takes = [own.backward - 2 * state]  # its input and the gradient of its output lie in the store
            if layer == 0:
                takes.append(before.backward - before.kept)
                begun = count - now.micro_batch
        peak = max(peak, there + of_micro_batch * begun + max(takes))
    return peak


def _block_profile(activations: Activations, block: Block, state: int) -> MemoryProfile:
    """One block alone, with the state of so many bytes that goes in; going back the one that came out is not there.
    `kept` is what only the block keeps."""
    tape = Tape()
    held = {INPUT: tape.new(state)} if state else {}
    output = activations.run(tape, block.operations, held)
    if state and block.prefix:
        tape.drop(held[INPUT])
    tape.drop(output)
    forward, kept, tape.peak = tape.peak, tape.now, 0
    tape.backward(output)
    return MemoryProfile(forward, kept, tape.peak)


# ---------------------------------------------------------------------------------------------------------------------
# Budgets: found with the function that a plan is checked with, so that what is proposed is enough at once
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NeededBudgets:
    """Budgets that would do, and why those that are there do not."""

    rooms: Capacity
    memory: list[RankMemory]  # with them
    keys: str  # as typed, a blank before each
    refusal: str


def budgets_of_node(config: Config, world_size: int) -> tuple[Budget, Budget]:
    """Budgets of the host and of the disk, as a run opens them on its own node."""
    host, disk = Budget("memory.host_budget"), Budget("memory.disk_budget")
    if world_size == launched().world_size:
        open_budgets(_there(config), host, disk)
    else:
        host.open(config.memory.host_budget, math.inf)
        disk.open(config.memory.disk_budget, math.inf)
    return host, disk


def _there(config: Config) -> MemoryConfig:
    """With a folder of the disk that is there: the run's own is made when it starts."""
    folder = config.memory.disk_dir
    if folder is None or Path(folder).absolute() != Path(config.run_dir).absolute():
        return config.memory
    own = Path(folder).absolute()
    return replace(config.memory, disk_dir=str(next(path for path in (own, *own.parents) if path.exists())))


def over_budget(memory: Sequence[RankMemory], rooms: Capacity) -> list[RankMemory]:
    """The ranks that keep more off their device than there is room for."""
    return [rank for rank in memory if rank.host > rooms.host or rank.disk > rooms.disk]


def needed_budgets(
    config: Config,
    vocab_size: int,
    world_size: int,
    device: str,
    memory: list[RankMemory],
    rooms: Capacity,
    most: float = math.inf,
) -> NeededBudgets | None:
    """The least budgets, in whole MiB, with which no rank of a plan is over, nor needs more than `most` bytes of its
    device where that can be; None where those that are there do."""
    refused = over_budget(memory, rooms)
    if not refused:
        return None
    budgets = budgets_of_node(config, world_size)
    for budget, room in zip(budgets, (rooms.host, rooms.disk), strict=True):
        budget.limit = room  # what is free may have changed since the plan
    worst, asked = max(refused, key=lambda rank: (rank.host, rank.disk)), rooms
    if config.memory.disk_dir is not None:
        rooms = replace(rooms, disk=max(rooms.disk, _whole(max(rank.disk for rank in memory))))

    def with_host(num_mib: int) -> tuple[Capacity, list[RankMemory], bool]:
        own = replace(rooms, host=max(rooms.host, float(num_mib * MIB)))
        found = rank_memory(config, vocab_size, world_size, device, rooms=own)
        fits = max(rank.total for rank in found) <= most
        return own, found, fits and not over_budget(found, own)

    least = math.ceil(_at_least(config, vocab_size, world_size, memory, rooms) / MIB)
    tried = with_host(least)
    if not tried[2]:
        endless = rank_memory(config, vocab_size, world_size, device, rooms=replace(rooms, host=math.inf))
        # layer inputs get what the fullest rank's optimizer state leaves
        apart = [[rank.host_activations for rank in endless], [rank.host - rank.host_activations for rank in endless]]
        low, high = least, max(least, math.ceil(sum(map(max, apart)) / MIB))
        if (last := with_host(high))[2]:
            tried = last
        while high - low > 1 and last[2]:
            middle = (low + high) // 2
            found = with_host(middle)
            low, high, tried = (low, middle, found) if found[2] else (middle, high, tried)
    rooms, memory, _ = tried
    kept = ["experts"] * (worst.experts is not None)
    kept += ["optimizer state"] * (worst.tiers is not None) + ["activations"] * (worst.host_activations > 0)
    what = f"{', '.join(kept[:-1])}{' and ' * (len(kept) > 1)}{kept[-1]} of rank {worst.rank}"
    raised = [
        (budget, int(room))
        for budget, room in zip(budgets, (rooms.host, rooms.disk), strict=True)
        if room > budget.limit
    ]
    # the one that cannot be had first
    raised.sort(key=lambda each: each[0].could_be(each[0].least(each[1])))
    keys = [f" {budget.key}={budget.least(num_bytes)}" for budget, num_bytes in raised]
    budget, num_bytes = raised[0]
    said = budget.refusal(num_bytes, what, "".join(keys[1:]))
    if config.optimizer.early_update == "always" and not budget.could_be(budget.least(num_bytes)):
        without = replace(config, optimizer=replace(config.optimizer, early_update="auto"))
        if not over_budget(rank_memory(without, vocab_size, world_size, device, rooms=asked), asked):
            said += ". Without shadows all fits: try optimizer.early_update=auto"
    return NeededBudgets(rooms, memory, "".join(keys), said)


def _whole(num_bytes: float) -> float:
    """In whole MiB, rounded up."""
    return float(math.ceil(num_bytes / MIB) * MIB)


def _at_least(config: Config, vocab_size: int, world_size: int, memory: Sequence[RankMemory], rooms: Capacity) -> float:
    """Bytes of the host that every rank gets by with: with state_device=auto what the other tiers hold need not be
    there."""
    if config.optimizer.state_device != "auto":
        return max(rank.host for rank in memory)
    tiers, found = TierPlan(config, vocab_size, world_size, rooms), dict[tuple[int, ...], float]()
    for rank, place in zip(memory, places(config, world_size), strict=True):
        beside = rank.total - rank.optimizer
        key = (place.stage, place.data_context, place.expert_data, beside)
        if key not in found:
            least = least_host_bytes(tiers.request(place), left(rooms, beside))
            found[key] = rank.host if least is None else rank.host_activations + least
    return max(found.values())
