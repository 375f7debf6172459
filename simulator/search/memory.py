"""What a layout's fullest rank needs by tier, as simulator/memory.py counts it, at a fraction of the cost: one rank a
kind of stage, and once what many layouts share.

Stages whose parts are alike differ in how many micro-batches wait for their backward pass: the first of them has most.
A step of a few micro-batches has all that a step of many holds at once. What equal layers keep grows by the same with
each; that is checked where it is used.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from configs import derived
from configs.schema import Config
from models.blueprint import Part, parts
from moe.planning.inputs import initial_plan
from optim.arrangement.arrange import Arrangement, Capacity, arrange, least
from optim.arrangement.buckets import cut, largest
from optim.arrangement.off_device import ExpertRecords
from optim.arrangement.traffic import records_of_stage
from simulator.activations import Activations
from simulator.buffers import Buffer, buffers
from simulator.layer_inputs import layer_inputs
from simulator.memory import activations_of_stage, after_backward_bytes, staying_bytes
from simulator.memory_tape import MemoryProfile
from simulator.parameters import parameters, places, state_ranks
from simulator.search.answer import LayoutMemory
from simulator.search.space import LayoutCell, LayoutSpace, Saving, with_keys
from simulator.sizes import FP32
from simulator.tiers import left, planned_slices, request_with_experts

MOST_COUNTED = 64  # ranks of which each is looked at; of more, the share of the fullest is taken to be whole
ENOUGH = 4  # micro-batches a stage, of which the most are held at once
FEW = 3  # equal layers after which each adds the same
OFF = ({"moe.weights_device": "device"}, {"moe.weights_device": "host"})  # by whether experts leave the device


@dataclass(frozen=True)
class _SizedStage:
    """What layouts with the same parameters share of a stage: `number` of it, `alike`: those of its kind, its buffers'
    numbers, bytes of state of the fullest rank, and the buckets of ranks whose state lies in tiers."""

    number: int
    alike: Sequence[int]
    buffers: dict[str, list[Buffer]]
    numbers: int
    state: int
    buckets: Sequence[tuple[Sequence[int], Sequence[bool]]]


def _weights_and_gradients(config: Config, stage: _SizedStage, records: ExpertRecords | None) -> int:
    """Bytes of a stage's buffers, and of the slots of experts off the device."""
    slots = records.weights_on_device + records.grads_on_device if records else 0
    return stage.numbers * (derived.element_size(config) + FP32) + slots


class _Profiles:
    """Profiles of parts: one of parts that are alike, and those of many equal layers from few."""

    def __init__(self, activations: Activations) -> None:
        self.activations = activations
        self._found: dict[Hashable, MemoryProfile] = {}
        self._pattern = derived.window_pattern(activations.config)

    def profile(self, part: Part, leaving: int = 0) -> MemoryProfile:
        """The same that Activations finds."""
        slides = tuple(self._pattern[part.first_layer : part.first_layer + len(part.layers)])
        key = part.layers, slides, part.is_first, part.is_last, leaving
        if key not in self._found:
            self._found[key] = self._profile(part, leaving)
        return self._found[key]

    def _profile(self, part: Part, leaving: int) -> MemoryProfile:
        count = len(part.layers)
        if leaving or count <= FEW + 1 or len(set(part.layers)) > 1 or self._slides_apart(part):
            return self.activations.profile(part, leaving)
        one, two = (self.activations.profile(replace(part, layers=part.layers[:number])) for number in (FEW - 1, FEW))
        step = two.kept - one.kept
        if two.forward - one.forward != step or two.backward - one.backward != step:
            return self.activations.profile(part)
        more = step * (count - FEW)
        return MemoryProfile(two.forward + more, two.kept + more, two.backward + more)

    def _slides_apart(self, part: Part) -> bool:
        return len(set(self._pattern[part.first_layer : part.first_layer + len(part.layers)])) > 1


class LayoutSizer:
    """The memory of candidates of a space. `rooms`: what a rank may use of each tier."""

    def __init__(self, space: LayoutSpace, vocab_size: int, rooms: Capacity) -> None:
        self.space, self.vocab_size, self.rooms = space, vocab_size, rooms
        self.world_size, self.kind = space.world_size, space.kind
        self._stages: dict[Hashable, list[_SizedStage]] = {}
        self._working: dict[Hashable, list[tuple[int, int]]] = {}
        self._of_cell: LayoutCell | None = None
        self._counts: dict[Hashable, dict[str, int]] = {}
        self._arranged_by: dict[Hashable, list[Arrangement]] = {}
        self._one_layer: dict[Hashable, dict[int, MemoryProfile]] = {}

    def memory(self, cell: LayoutCell, saving: Saving) -> LayoutMemory:
        """What the fullest rank needs, each tier by itself."""
        config = self._short(self.space.layout(cell, saving))
        stages = self.stages(cell, saving.streams)
        working = self._work(cell, saving, config, self.rooms.host)
        staying = [staying_bytes(config, stage.number) for stage in stages]
        records = [records_of_stage(config, self.world_size, stage.number) for stage in stages]
        fixed = [_weights_and_gradients(config, stage, of) for stage, of in zip(stages, records, strict=True)]
        if not derived.has_tiers(config):
            device = max(
                some + of.state + live + stay
                for some, of, (live, _), stay in zip(fixed, stages, working, staying, strict=True)
            )
            return LayoutMemory(device, max(host for _, host in working), 0)
        found = self._tiers(config, stages, working)
        if any(host for _, host in working):  # layer inputs get what optimizer state leaves
            most = max(each.host_bytes for of_stage in found for each in of_stage)
            most += max(of.host_bytes if of else 0 for of in records)
            working = self._work(cell, saving, config, max(self.rooms.host - most, 0))
        each = [
            (
                some + live + stay + tiers.device_bytes,
                host + tiers.host_bytes + (of.host_bytes if of else 0),
                tiers.disk_bytes + (of.disk_bytes if of else 0),
            )
            for some, (live, host), stay, of_stage, of in zip(fixed, working, staying, found, records, strict=True)
            for tiers in of_stage
        ]
        return LayoutMemory(*(max(numbers) for numbers in zip(*each)))

    def arrangements(self, cell: LayoutCell, saving: Saving) -> list[Arrangement | None] | None:
        """Where optimizer state lies, of a rank of each stage; None where all of it is on the device. Stages that are
        alike have the first one's, which holds most beside it."""
        config = self._short(self.space.layout(cell, saving))
        if not derived.has_tiers(config):
            return None
        stages = self.stages(cell, saving.streams)
        found = self._tiers(config, stages, self._work(cell, saving, config, self.rooms.host))
        result: list[Arrangement | None] = [None] * config.parallel.pipeline
        for stage, of_stage in zip(stages, found, strict=True):
            for number in stage.alike:
                result[number] = of_stage[0]
        return result

    def _tiers(
        self, config: Config, stages: Sequence[_SizedStage], working: Sequence[tuple[int, int]]
    ) -> list[list[Arrangement]]:
        """By stage, of each kind of rank."""
        found, records = [], [records_of_stage(config, self.world_size, stage.number) for stage in stages]
        taken = max((of.host_bytes for of in records if of), default=0)
        taken_disk = max((of.disk_bytes for of in records if of), default=0)
        rooms = replace(self.rooms, host=max(self.rooms.host - taken, 0), disk=max(self.rooms.disk - taken_disk, 0))
        for stage, (live, _), of in zip(stages, working, records, strict=True):
            beside = _weights_and_gradients(config, stage, of) + live + staying_bytes(config, stage.number)
            key = id(stage), config.optimizer.state_device, config.optimizer.engine, beside, taken, taken_disk
            if key not in self._arranged_by:
                self._arranged_by[key] = self._arranged(config, stage, left(rooms, beside), of)
            found.append(self._arranged_by[key])
        return found

    def beside_state(self, cell: LayoutCell, saving: Saving, state_leaves: bool) -> int:
        """Bytes of the fullest rank's device, where state may leave without it."""
        config = self._short(self.space.layout(cell, saving))
        working = self._work(cell, saving, config, self.rooms.host)
        return max(
            _weights_and_gradients(config, stage, records_of_stage(config, self.world_size, stage.number))
            + live
            + staying_bytes(config, stage.number)
            + (0 if state_leaves else stage.state)
            for stage, (live, _) in zip(self.stages(cell, saving.streams), working, strict=True)
        )

    def has_no_room(self, cell: LayoutCell, savings: Sequence[Saving], room: float) -> bool:
        """Whether a layer takes more while it goes back, whatever keeps least of its inputs: also in larger
        micro-batches."""
        most = max(saving.steps[0] for saving in savings)
        degrees = [saving.degree for saving in savings if isinstance(saving.degree, int)]
        least = max(degrees, default=savings[0].degree)
        some = {each.strategy: each for each in savings if each.steps[0] == most and each.degree == least}
        return all(self._of_layer(cell, saving) > room for saving in some.values())

    def _of_layer(self, cell: LayoutCell, saving: Saving) -> int:
        return max(profile.backward for profile in self._layers(cell, saving).values())

    def _layers(self, cell: LayoutCell, saving: Saving) -> dict[int, MemoryProfile]:
        """A layer in the middle of the model, dense (0) or with experts (1)."""
        kept = saving.recompute, saving.degree, saving.backward_degree, saving.strategy
        key = replace(cell.group, pipeline=1), cell.heads, cell.micro, kept
        if key not in self._one_layer:
            config = self._short(self.space.layout(cell, saving))
            activations = Activations(config, self.vocab_size, self.kind, initial_plan(config))
            kinds = set(derived.moe_layer_pattern(config))
            self._one_layer[key] = {kind: activations.profile(Part((kind,), False, False, 1)) for kind in kinds}
        return self._one_layer[key]

    def kept_floor(self, cell: LayoutCell, saving: Saving) -> int:
        """Bytes that the first stage keeps at least of its layers between passes: of as many micro-batches as there are
        stages, where there are so many."""
        layers = self._layers(cell, saving)
        if saving.offload != "none":
            return max(profile.backward for profile in layers.values())
        config = self.space.config
        copies = self.world_size // (cell.group.tensor * cell.group.pipeline * cell.group.context)
        count = config.training.global_batch_size // (copies * cell.micro)
        chunks, pattern = cell.chunks or 1, derived.moe_layer_pattern(config)
        size = len(pattern) // (cell.group.pipeline * chunks)
        first = range(0, len(pattern), size * cell.group.pipeline)
        kept = sum(layers[kind].kept for start in first for kind in pattern[start : start + size])
        return kept * min(count, cell.group.pipeline)

    def staying_bytes(self, cell: LayoutCell, state_leaves: bool, experts_leave: bool = False) -> int:
        """Bytes of weights, gradients and, unless it may leave, state of the fullest rank; without experts that may
        leave."""
        element = derived.element_size(self.space.config)
        return max(
            of.numbers * (element + FP32) + (0 if state_leaves else of.state) for of in self.stages(cell, experts_leave)
        )

    def least_device_bytes(self, cell: LayoutCell, state_leaves: bool, experts_leave: bool = False) -> float:
        """Bytes that the fullest rank has at least of weights, gradients and, unless it may leave, state, for every
        layout of the cell's group: those of the mean stage without padding."""
        config = self.space.layout(cell, self.space.savings(cell.group.expert > 1)[0])
        numbers, element = self._numbers(cell, config, experts_leave), derived.element_size(config)
        fixed = sum(numbers.values()) * (element + FP32)
        if state_leaves:
            return fixed
        state = 2 * FP32 + (FP32 if element < FP32 else 0)
        shared = state_ranks(config, self.world_size) if config.optimizer.distributed else {"dense": 1, "expert": 1}
        return fixed + sum(number / shared[kind] for kind, number in numbers.items()) * state

    def _numbers(self, cell: LayoutCell, config: Config, experts_leave: bool) -> dict[str, float]:
        key = "numbers", cell.group.tensor, cell.group.expert, cell.group.expert_tensor, experts_leave
        if key not in self._counts:
            whole = with_keys(config, {"parallel.pipeline": 1, "parallel.virtual_pipeline": None, **OFF[experts_leave]})
            found = {"dense": 0, "expert": 0}
            for parameter in parameters(whole, parts(whole)[0][0], self.vocab_size):
                found["expert" if parameter.is_expert else "dense"] += parameter.local * (not parameter.is_off_device)
            self._counts[key] = found
        return {kind: number / cell.group.pipeline for kind, number in self._counts[key].items()}

    # -- pieces --------------------------------------------------------------------------------------------------------

    def _short(self, config: Config) -> Config:
        """The config with as many micro-batches as show the most that is held: by layer all."""
        if config.training.pass_order == "by_layer":
            return config
        count = min(derived.num_micro_batches(config, self.world_size), ENOUGH * config.parallel.pipeline)
        copies = derived.data_parallel_size(config, self.world_size)
        size = count * config.training.micro_batch_size * copies
        return with_keys(config, {"training.global_batch_size": size})

    def stages(self, cell: LayoutCell, streams: bool = False) -> list[_SizedStage]:
        """One stage of each kind, with experts on the device or off it."""
        group = cell.group
        key = group.tensor, group.sequence, group.pipeline, cell.chunks, group.expert, group.expert_tensor, streams
        if key not in self._stages:
            config = with_keys(self.space.layout(cell, self._tiered(cell)), OFF[streams])
            self._stages[key] = list(self._make_stages(config))
        return self._stages[key]

    def _tiered(self, cell: LayoutCell) -> Saving:
        found = self.space.savings(cell.group.expert > 1)
        return found[-1]

    def _make_stages(self, config: Config) -> Any:
        kinds: dict[Hashable, list[int]] = {}
        slides = derived.window_pattern(config)
        for number, of_stage in enumerate(parts(config)):
            signature = tuple(
                (
                    part.layers,
                    part.is_first,
                    part.is_last,
                    tuple(slides[part.first_layer : part.first_layer + len(part.layers)]),
                )
                for part in of_stage
            )
            kinds.setdefault(signature, []).append(number)
        pairs: dict[int, set[tuple[int, int]]] = {}
        if self.world_size <= MOST_COUNTED:
            for place in places(config, self.world_size):
                pairs.setdefault(place.stage, set()).add((place.data_context, place.expert_data))
        for alike in kinds.values():
            yield self._stage(config, alike, sorted(pairs.get(alike[0], ())))

    def _stage(self, config: Config, alike: Sequence[int], pairs: Sequence[tuple[int, int]]) -> _SizedStage:
        number = alike[0]
        found = buffers(config, self.vocab_size, self.world_size, number)
        local = [parameters(config, part, self.vocab_size) for part in parts(config)[number]]
        element = derived.element_size(config)
        of_state = 2 * FP32 + (FP32 if element < FP32 else 0)
        distributed = config.optimizer.distributed

        def owned(kind: str, rank: int) -> int:
            each = [share for buffer in found[kind] for share in buffer.owned(rank if distributed else 0)]
            return sum((share.end - share.start) * of_state + FP32 for share in each)

        if pairs:
            state = max(owned("dense", data) + owned("expert", expert) for data, expert in pairs)
        else:
            every = [buffer for kind in found.values() for buffer in kind]
            state = sum(-(-buffer.size // buffer.num_ranks) * of_state + FP32 * len(buffer.ranges) for buffer in every)
        buckets, seen = [], set()
        if distributed:
            ranks = state_ranks(config, self.world_size)
            some = pairs or [(0, 0), (ranks["dense"] - 1, max(ranks["expert"] - 1, 0))]
            for data, expert in some:
                slices = planned_slices(found, local, {"dense": data, "expert": expert})
                of_rank = cut(slices, largest(slices, config.optimizer.bucket_parameters))
                entry = tuple(bucket.numel for bucket in of_rank), tuple(bucket.late for bucket in of_rank)
                if entry not in seen:
                    seen.add(entry)
                    buckets.append(entry)
        numbers = sum(buffer.size for kind in found.values() for buffer in kind)
        return _SizedStage(number, alike, found, numbers, state, buckets)

    def _arranged(
        self, config: Config, stage: _SizedStage, rooms: Capacity, records: ExpertRecords | None
    ) -> list[Arrangement]:
        requests = [request_with_experts(config, numels, late, records) for numels, late in stage.buckets]
        return [arrange(asked, rooms) or least(asked) for asked in requests]

    def _work(self, cell: LayoutCell, saving: Saving, config: Config, room: float) -> list[tuple[int, int]]:
        """By stage: bytes of activations on the device, and of layer inputs on the host, with so much room for them."""
        if cell != self._of_cell:
            self._of_cell, self._working = cell, {}
        key = (saving.recompute, saving.offload, saving.degree, saving.backward_degree, saving.strategy)
        key = (*key, saving.streams, saving.pass_order)  # type: ignore[assignment]
        if saving.offload != "none":
            key = (*key, room)  # type: ignore[assignment]
        if key not in self._working:
            profiles: Any = Activations(config, self.vocab_size, self.kind, initial_plan(config))
            if config.training.pass_order != "by_layer":
                profiles = _Profiles(profiles)
            alone = state_ranks(config, self.world_size)["dense"] == 1
            found = []
            for stage in self.stages(cell, saving.streams):
                inputs = layer_inputs(config, self.world_size, stage.number, room)
                live = activations_of_stage(config, profiles, self.world_size, stage.number, inputs)
                after = after_backward_bytes(config, stage.buffers, self.kind, alone)
                found.append((max(live, after), inputs.host))
            self._working[key] = found
        return self._working[key]
