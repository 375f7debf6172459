"""Memory that a layout's fullest rank needs, as in simulator/memory.py but faster, and the memory that it may use.

Only one rank per kind of pipeline stage is counted, and results that many layouts share are cached. Stages with equal
layers differ only in the number of micro-batches in flight; the first stage has most. A few micro-batches are enough to
reach the largest number in flight. Each further equal layer adds the same memory; `_Profiles` checks that before it
relies on it.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from base.units import GIB, MIB
from configs import derived
from configs.schema import Config
from models.blueprint import ModelChunk, model_chunks
from moe.planning.inputs import initial_plan
from optim.arrangement.buckets import Arrangement, Capacity, arrange, cut, largest, least
from optim.arrangement.experts import ExpertRecords, records_of_stage
from simulator.activations import Activations
from simulator.buffers import Buffer, buffers
from simulator.clock.hardware import Hardware
from simulator.layer_inputs import layer_inputs
from simulator.memory import TOLERANCE, activations_of_stage, after_backward_bytes, staying_bytes
from simulator.memory_tape import MemoryProfile
from simulator.offload.state import planned_slices, remaining, request_with_experts
from simulator.parameters import parameters, rank_coordinates, state_ranks
from simulator.search.space import LayoutCell, LayoutSpace, Saving, with_keys
from simulator.sizes import FP32

SHARE = 0.8  # of a node's memory that its ranks may use together; memory/budgets.py uses this share of the free bytes
MOST_COUNTED = 64  # up to this number of ranks each is counted; with more, the fullest rank's shares are rounded up
ENOUGH = 4  # micro-batches per stage that are enough to reach the largest number held at once
FEW = 3  # equal layers after which each further one adds the same memory
EXPERT_KEYS = ({"moe.weights_device": "device"}, {"moe.weights_device": "host"})  # by whether experts are offloaded


@dataclass(frozen=True)
class LayoutMemory:
    """Bytes that the fullest rank needs on its device, on the host and on the disk."""

    device: int
    host: int = 0
    disk: int = 0


@dataclass(frozen=True)
class MemoryLimits:
    """Bytes of device, host and disk that a rank may use, and the names of these limits for messages."""

    device: float = math.inf
    host: float = math.inf
    disk: float = 0.0
    device_name: str = "the device's memory"
    host_name: str = "the node's memory"

    @property
    def capacity(self) -> Capacity:
        """The limits as `Capacity`, for the arrangement of optimizer state."""
        return Capacity(self.device, self.host, self.disk)


def memory_limits(config: Config, world_size: int, hardware: Hardware) -> MemoryLimits:
    """Return the memory limits of a rank: from the config, or else shares of the hardware's memory."""
    ranks = max(1, min(int(hardware["ranks_per_node"]), world_size))
    cap = config.training.memory_limit_gib
    device = hardware["device.memory"] * (1 - TOLERANCE) if cap is None else cap * GIB
    host, disk = (hardware[name] / ranks * SHARE for name in ("host.memory", "disk.memory"))
    if config.memory.host_budget is not None:
        host = config.memory.host_budget * MIB
    if config.memory.disk_budget is not None:
        disk = config.memory.disk_budget * MIB
    return MemoryLimits(
        device or math.inf,
        host,
        0.0 if config.memory.disk_dir is None else disk,
        f"{1 - TOLERANCE:.0%} of the device's memory" if cap is None else "training.memory_limit_gib",
        "the node's memory" if config.memory.host_budget is None else "memory.host_budget",
    )


@dataclass(frozen=True)
class _SizedStage:
    """Sizes of a pipeline stage, which all layouts with the same parameters on this stage share."""

    number: int
    alike: Sequence[int]  # numbers of all stages of this kind
    buffers: dict[str, list[Buffer]]
    numbers: int  # of elements in the buffers
    state: int  # bytes of optimizer state of the fullest rank
    buckets: Sequence[tuple[Sequence[int], Sequence[bool]]]  # of ranks that offload their optimizer state


def _weights_and_gradients(config: Config, stage: _SizedStage, records: ExpertRecords | None) -> int:
    """Return the bytes of a stage's gradient buffers and weights, and of the device buffers of offloaded experts."""
    experts = records.weights_on_device + records.grads_on_device if records else 0
    return stage.numbers * (derived.element_size(config) + FP32) + experts


class _Profiles:
    """Memory profiles of model chunks: equal chunks share one, and many equal layers are extrapolated."""

    def __init__(self, activations: Activations) -> None:
        self.activations = activations
        self._found: dict[Hashable, MemoryProfile] = {}
        self._pattern = derived.window_pattern(activations.config)

    def profile(self, chunk: ModelChunk, leaving: int = 0) -> MemoryProfile:
        """Return the memory of one micro-batch in a model chunk.

        The inputs of the first `leaving` layers are on the host between forward and backward pass.
        """
        slides = tuple(self._pattern[chunk.first_layer : chunk.first_layer + len(chunk.layers)])
        key = chunk.layers, slides, chunk.is_first, chunk.is_last, leaving
        if key not in self._found:
            are_equal = len(set(chunk.layers)) == 1 and len(set(slides)) <= 1
            extrapolates = are_equal and not leaving and len(chunk.layers) > FEW + 1
            found = self._extrapolated(chunk) if extrapolates else None
            self._found[key] = found or self.activations.profile(chunk, leaving)
        return self._found[key]

    def _extrapolated(self, chunk: ModelChunk) -> MemoryProfile | None:
        """Return the memory of one micro-batch in a model chunk, extrapolated from a few equal layers.

        Returns None if memory does not grow linearly with the number of layers.
        """
        less, some = (self.activations.profile(replace(chunk, layers=chunk.layers[:n])) for n in (FEW - 1, FEW))
        step = some.kept - less.kept
        if some.forward - less.forward != step or some.backward - less.backward != step:
            return None
        more = step * (len(chunk.layers) - FEW)
        return MemoryProfile(some.forward + more, some.kept + more, some.backward + more)


class LayoutSizer:
    """Counts the memory of a search space's candidates. `capacity`: bytes of device, host and disk per rank."""

    def __init__(self, space: LayoutSpace, capacity: Capacity) -> None:
        self.space, self.job, self.world_size, self.capacity = space, space.job, space.world_size, capacity
        self._stages: dict[Hashable, list[_SizedStage]] = {}
        self._activations: dict[Hashable, list[tuple[int, int]]] = {}  # of `_last_cell`
        self._last_cell: LayoutCell | None = None
        self._counts: dict[Hashable, dict[str, int]] = {}
        self._arranged_by: dict[Hashable, list[Arrangement]] = {}
        self._one_layer: dict[Hashable, dict[int, MemoryProfile]] = {}

    def memory(self, cell: LayoutCell, saving: Saving) -> LayoutMemory:
        """Return the largest bytes that any rank needs on device, host and disk, each separately."""
        config = self._few_micro_batches(self.space.layout(cell, saving))
        stages = self.stages(cell, saving.streams)
        working = self._activation_bytes(cell, saving, config, self.capacity.host)
        staying = [staying_bytes(config, stage.number) for stage in stages]
        records = [records_of_stage(config, self.world_size, stage.number) for stage in stages]
        fixed = [_weights_and_gradients(config, stage, of) for stage, of in zip(stages, records, strict=True)]
        if not derived.has_own_optimizer_state(config):
            every = zip(fixed, stages, working, staying, strict=True)
            device = max(some + of.state + live + stay for some, of, (live, _), stay in every)
            return LayoutMemory(device, max(host for _, host in working), 0)
        found = self._stage_arrangements(config, stages, working)
        if any(host for _, host in working):  # layer inputs get the host memory that optimizer state leaves
            most = max(each.host_bytes for of_stage in found for each in of_stage)
            most += max(of.host_bytes if of else 0 for of in records)
            working = self._activation_bytes(cell, saving, config, max(self.capacity.host - most, 0))
        each = [
            (
                some + live + stay + state.device_bytes,
                host + state.host_bytes + (of.host_bytes if of else 0),
                state.disk_bytes + (of.disk_bytes if of else 0),
            )
            for some, (live, host), stay, of_stage, of in zip(fixed, working, staying, found, records, strict=True)
            for state in of_stage
        ]
        return LayoutMemory(*(max(numbers) for numbers in zip(*each)))

    def arrangements(self, cell: LayoutCell, saving: Saving) -> list[Arrangement | None] | None:
        """Return each stage's arrangement of offloaded optimizer state on one rank; None if all state is on the device.

        Equal stages use the arrangement of the first of them, which has the most other memory.
        """
        config = self._few_micro_batches(self.space.layout(cell, saving))
        if not derived.has_own_optimizer_state(config):
            return None
        stages = self.stages(cell, saving.streams)
        working = self._activation_bytes(cell, saving, config, self.capacity.host)
        found = self._stage_arrangements(config, stages, working)
        by_stage = {n: of[0] for stage, of in zip(stages, found, strict=True) for n in stage.alike}
        return [by_stage[number] for number in range(config.parallel.pipeline)]

    def _stage_arrangements(
        self, config: Config, stages: Sequence[_SizedStage], working: Sequence[tuple[int, int]]
    ) -> list[list[Arrangement]]:
        """Return each stage's arrangements of offloaded optimizer state, one per kind of rank.

        `working`: activation bytes on the device, and layer-input bytes on the host, per stage.
        """
        found, records = [], [records_of_stage(config, self.world_size, stage.number) for stage in stages]
        taken = max((of.host_bytes for of in records if of), default=0)
        taken_disk = max((of.disk_bytes for of in records if of), default=0)
        host, disk = max(self.capacity.host - taken, 0), max(self.capacity.disk - taken_disk, 0)
        capacity = replace(self.capacity, host=host, disk=disk)
        for stage, (live, _), of in zip(stages, working, records, strict=True):
            others = _weights_and_gradients(config, stage, of) + live + staying_bytes(config, stage.number)
            key = id(stage), config.optimizer.state_device, config.optimizer.engine, others, taken, taken_disk
            if key not in self._arranged_by:
                free = remaining(capacity, others)
                requests = [request_with_experts(config, numels, at_end, of) for numels, at_end in stage.buckets]
                self._arranged_by[key] = [arrange(asked, free) or least(asked) for asked in requests]
            found.append(self._arranged_by[key])
        return found

    def device_bytes(self, cell: LayoutCell, saving: Saving, state_leaves: bool) -> int:
        """Return the bytes on the fullest rank's device, without optimizer state if `state_leaves`."""
        config = self._few_micro_batches(self.space.layout(cell, saving))
        working = self._activation_bytes(cell, saving, config, self.capacity.host)
        return max(
            _weights_and_gradients(config, stage, records_of_stage(config, self.world_size, stage.number))
            + live
            + staying_bytes(config, stage.number)
            + (0 if state_leaves else stage.state)
            for stage, (live, _) in zip(self.stages(cell, saving.streams), working, strict=True)
        )

    def exceeds(self, cell: LayoutCell, savings: Sequence[Saving], limit: float) -> bool:
        """Return whether a layer's backward pass exceeds `limit` bytes with all memory savings and any micro-batch."""
        most = max(saving.steps[0] for saving in savings)
        degrees = [saving.degree for saving in savings if isinstance(saving.degree, int)]
        least = max(degrees, default=savings[0].degree)
        some = {each.strategy: each for each in savings if each.steps[0] == most and each.degree == least}
        layers = (self._layers(cell, saving).values() for saving in some.values())
        return all(max(profile.backward for profile in of_kinds) > limit for of_kinds in layers)

    def _layers(self, cell: LayoutCell, saving: Saving) -> dict[int, MemoryProfile]:
        """Return the memory profiles of a layer in the middle of the model: dense (0) and with experts (1)."""
        kept = saving.recompute, saving.degree, saving.backward_degree, saving.strategy
        key = replace(cell.group, pipeline=1), cell.heads, cell.micro, kept
        if key not in self._one_layer:
            config = self._few_micro_batches(self.space.layout(cell, saving))
            activations = Activations(config, self.job.vocab_size, self.job.device, initial_plan(config))
            kinds = set(derived.moe_layer_pattern(config))
            self._one_layer[key] = {kind: activations.profile(ModelChunk((kind,), False, False, 1)) for kind in kinds}
        return self._one_layer[key]

    def kept_floor(self, cell: LayoutCell, saving: Saving) -> int:
        """Return a lower bound of the activation bytes that the first stage keeps between passes.

        It counts one micro-batch per stage, or all micro-batches if there are fewer.
        """
        layers = self._layers(cell, saving)
        if saving.offload != "none":
            return max(profile.backward for profile in layers.values())
        config = self.space.config
        replicas = self.world_size // (cell.group.tensor * cell.group.pipeline * cell.group.context)
        count = config.training.global_batch_size // (replicas * cell.micro)
        chunks, pattern = cell.chunks or 1, derived.moe_layer_pattern(config)
        size = len(pattern) // (cell.group.pipeline * chunks)
        first = range(0, len(pattern), size * cell.group.pipeline)
        kept = sum(layers[kind].kept for start in first for kind in pattern[start : start + size])
        return kept * min(count, cell.group.pipeline)

    def fixed_bytes(self, cell: LayoutCell, state_leaves: bool, experts_leave: bool = False) -> int:
        """Return the bytes of weights, gradients and optimizer state on the fullest rank's device.

        `state_leaves`, `experts_leave`: leave out optimizer state, or experts, because they may be offloaded.
        """
        per_number, stages = derived.element_size(self.space.config) + FP32, self.stages(cell, experts_leave)
        return max(of.numbers * per_number + (0 if state_leaves else of.state) for of in stages)

    def least_device_bytes(self, cell: LayoutCell, state_leaves: bool, experts_leave: bool = False) -> float:
        """Return a lower bound of a rank's bytes of weights, gradients and optimizer state, for a group of layouts.

        It is the mean over the pipeline stages, without padding. `state_leaves`, `experts_leave`: leave out optimizer
        state, or experts, because they may be offloaded.
        """
        config = self.space.layout(cell, self.space.savings(cell.group.expert > 1)[0])
        element, group = derived.element_size(config), cell.group
        key = group.tensor, group.expert, group.expert_tensor, experts_leave
        if key not in self._counts:
            one_stage = {"parallel.pipeline": 1, "parallel.virtual_pipeline": None}
            whole = with_keys(config, {**one_stage, **EXPERT_KEYS[experts_leave]})
            self._counts[key] = {"dense": 0, "expert": 0}
            for parameter in parameters(whole, model_chunks(whole)[0][0], self.job.vocab_size):
                if not parameter.is_offloaded:
                    self._counts[key]["expert" if parameter.is_expert else "dense"] += parameter.local
        numbers = {kind: number / group.pipeline for kind, number in self._counts[key].items()}
        fixed = sum(numbers.values()) * (element + FP32)
        if state_leaves:
            return fixed
        state = 2 * FP32 + (FP32 if element < FP32 else 0)
        shared = state_ranks(config, self.world_size) if config.optimizer.distributed else {"dense": 1, "expert": 1}
        return fixed + sum(number / shared[kind] for kind, number in numbers.items()) * state

    def _few_micro_batches(self, config: Config) -> Config:
        """Return the config with just enough micro-batches to reach the largest number in flight.

        A layer-wise schedule keeps all micro-batches in flight, so its number is not changed.
        """
        if config.training.pass_order == "by_layer":
            return config
        count = min(derived.num_micro_batches(config, self.world_size), ENOUGH * config.parallel.pipeline)
        size = count * config.training.micro_batch_size * derived.data_parallel_size(config, self.world_size)
        return with_keys(config, {"training.global_batch_size": size})

    def stages(self, cell: LayoutCell, offloads_experts: bool = False) -> list[_SizedStage]:
        """Return the sizes of pipeline stages, one of each kind (stages with equal parameters)."""
        group = cell.group
        layout = group.tensor, group.sequence, group.pipeline, cell.chunks, group.expert, group.expert_tensor
        key = (*layout, offloads_experts)
        if key not in self._stages:
            offloaded = self.space.savings(group.expert > 1)[-1]
            config = with_keys(self.space.layout(cell, offloaded), EXPERT_KEYS[offloads_experts])
            self._stages[key] = list(self._make_stages(config))
        return self._stages[key]

    def _make_stages(self, config: Config) -> Iterator[_SizedStage]:
        kinds: dict[Hashable, list[int]] = {}
        slides = derived.window_pattern(config)
        for number, of_stage in enumerate(model_chunks(config)):
            signature = tuple(
                (each.layers, each.is_first, each.is_last, tuple(slides[each.first_layer :][: len(each.layers)]))
                for each in of_stage
            )
            kinds.setdefault(signature, []).append(number)
        pairs: dict[int, set[tuple[int, int]]] = {}
        if self.world_size <= MOST_COUNTED:
            for each in rank_coordinates(config, self.world_size):
                pairs.setdefault(each.stage, set()).add((each.data_context, each.expert_data))
        for alike in kinds.values():
            yield self._stage(config, alike, sorted(pairs.get(alike[0], ())))

    def _stage(self, config: Config, alike: Sequence[int], pairs: Sequence[tuple[int, int]]) -> _SizedStage:
        number = alike[0]
        found = buffers(replace(self.job, config=config), number)
        local = [parameters(config, chunk, self.job.vocab_size) for chunk in model_chunks(config)[number]]
        element = derived.element_size(config)
        state_bytes = 2 * FP32 + (FP32 if element < FP32 else 0)
        distributed = config.optimizer.distributed

        def owned(kind: str, rank: int) -> int:
            each = [share for buffer in found[kind] for share in buffer.owned(rank if distributed else 0)]
            return sum((share.end - share.start) * state_bytes + FP32 for share in each)

        if pairs:
            state = max(owned("dense", data) + owned("expert", expert) for data, expert in pairs)
        else:
            every = [buffer for kind in found.values() for buffer in kind]
            state = sum(-(-each.size // each.num_ranks) * state_bytes + FP32 * len(each.ranges) for each in every)
        buckets: dict[tuple[tuple[int, ...], tuple[bool, ...]], None] = {}
        if distributed:
            ranks = state_ranks(config, self.world_size)
            for data, expert in pairs or [(0, 0), (ranks["dense"] - 1, max(ranks["expert"] - 1, 0))]:
                slices = planned_slices(found, local, {"dense": data, "expert": expert})
                of_rank = cut(slices, largest(slices, config.optimizer.bucket_parameters))
                numels = tuple(each.numel for each in of_rank)
                buckets[numels, tuple(each.reduced_at_step_end for each in of_rank)] = None
        numbers = sum(buffer.size for kind in found.values() for buffer in kind)
        return _SizedStage(number, alike, found, numbers, state, list(buckets))

    def _activation_bytes(
        self, cell: LayoutCell, saving: Saving, config: Config, host_bytes: float
    ) -> list[tuple[int, int]]:
        """Return, per stage, activation bytes on the device and layer-input bytes (up to `host_bytes`) on the host."""
        if cell != self._last_cell:
            self._last_cell, self._activations = cell, {}
        kept = saving.recompute, saving.offload, saving.degree, saving.backward_degree, saving.strategy
        key = *kept, saving.streams, saving.pass_order, host_bytes if saving.offload != "none" else None
        if key not in self._activations:
            profiles: Any = Activations(config, self.job.vocab_size, self.job.device, initial_plan(config))
            if config.training.pass_order != "by_layer":
                profiles = _Profiles(profiles)
            alone = state_ranks(config, self.world_size)["dense"] == 1
            found = []
            for stage in self.stages(cell, saving.streams):
                inputs = layer_inputs(config, self.world_size, stage.number, host_bytes)
                live = activations_of_stage(config, profiles, self.world_size, stage.number, inputs)
                after = after_backward_bytes(config, stage.buffers, self.job.device, alone)
                found.append((max(live, after), inputs.host))
            self._activations[key] = found
        return self._activations[key]
