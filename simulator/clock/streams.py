"""Experts off the device in a step's loop: their weights come to slots one layer ahead, their gradients leave, and they
are updated on the host, each on a lane of its own beside the stage's computing.

Lanes that use the same link, disk or memory never carry more together than that does: `busy`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from configs import derived
from configs.schema import Config
from optim.arrangement.arrange import NUM_SLOTS
from optim.arrangement.off_device import GRAD_SLOTS
from optim.arrangement.planning import Bandwidths
from optim.arrangement.traffic import LayerMoves, Moved, layer_moves
from parallel.pipeline import layers_of_stage, slot_fills
from simulator.clock.axes import EXPERT_COPIES, Group, collective
from simulator.clock.hardware import Hardware
from simulator.clock.loop import Loop
from simulator.clock.stages import BucketJob, rates

UP, DOWN, READ, WRITTEN, HOST = "up", "down", "read", "written", "host"
REASON = {UP: "host_link", DOWN: "host_link", READ: "disk", WRITTEN: "disk", HOST: "host_update"}
# What lanes of bucket jobs use, by the names that simulator/clock/stages.py gives them.
OF_JOBS = {"host up": UP, "host down": DOWN, "host": HOST, "disk": READ}
Parts = Sequence[tuple[str, str, float]]  # (what carries it out, reason, seconds), one after the other


@dataclass(frozen=True)
class StreamParts:
    """What a stage's experts off the device take, of one layer: the way of weights to a slot, those of the gradients
    that leave in a step, the update. `inputs`: seconds in which layer inputs of a step use the link each way."""

    fetch: Parts
    gradients: Sequence[Parts]
    update: Parts
    slots: int
    early: bool  # updates come behind the last gradient, and not with the next step
    by_layer: bool
    layers: Sequence[Sequence[int]]  # the MoE layers of each model chunk
    inputs: Mapping[str, float]

    def visits(self, order: Iterable[tuple[bool, int]]) -> list[int]:
        """MoE layers in the order of use, where passes of model chunks come in this order."""
        return [each for ahead, chunk in order for each in self.layers[chunk][:: 1 if ahead else -1]]


def stream_parts(
    config: Config, world_size: int, stage: int, hardware: Hardware, groups: Mapping[str, Group]
) -> StreamParts | None:
    """What a stage's experts off the device take; None where there are none."""
    moves = layer_moves(config, world_size, stage)
    if moves is None:
        return None
    of = rates(hardware, world_size)
    seconds = _Seconds(of, hardware, groups[EXPERT_COPIES], moves)
    records = moves.records
    numbers = range(min(moves.gradients, 3))  # the first, one between, the last
    gradients = [seconds.leaving(moves.gradient(n == 0, n == numbers[-1])) for n in numbers]
    by_layer, is_moe = config.training.pass_order == "by_layer", derived.moe_layer_pattern(config)
    return StreamParts(
        seconds.coming(moves.fetch()),
        gradients,
        seconds.update(moves.update()),
        records.weight_slots,
        records.has_shadows,
        by_layer,
        [[each for each in chunk if is_moe[each]] for chunk in layers_of_stage(config, stage)],
        _inputs(config, world_size, stage, of),
    )


def least_streamed_seconds(config: Config, world_size: int, hardware: Hardware) -> float:
    """No more than a step takes where its experts lie off the device: what the first stage's use most. 0 where none
    do."""
    moves = layer_moves(config, world_size, 0)
    if moves is None:
        return 0.0
    records, of = moves.records, rates(hardware, world_size)
    rounds = 1 if config.training.pass_order == "by_layer" else derived.num_micro_batches(config, world_size)
    # at each turn of the passes as many layers are there as there are slots, at most
    passes = 2 * rounds if config.parallel.pipeline == 1 else 1
    fills = passes * records.num_layers - records.weight_slots * (passes - 1)
    total = moves.fetch().times(fills) + moves.left + moves.updated
    return max(
        _over(total.up, of.up),
        _over(total.down, of.down),
        _over(total.host, of.host),
        _over(total.read, of.read),
        _over(total.written, of.write),
    )


class _Seconds:
    """Bytes in seconds, one after the other as a layer's pass through them."""

    def __init__(self, of: Bandwidths, hardware: Hardware, group: Group, moves: LayerMoves) -> None:
        self.of, self.hardware, self.group = of, hardware, group
        self.reduction = "reduce_scatter" if moves.records.parts > 1 else "all_reduce"

    def _between(self, kind: str, num_bytes: int) -> float:
        return collective(self.hardware, kind, self.group, num_bytes)

    def coming(self, moved: Moved) -> Parts:
        place = self.group.place
        return _some(
            [
                (READ, REASON[READ], _over(moved.read, self.of.read)),
                (UP, REASON[UP], _over(moved.up, self.of.up)),
                ("gathers", f"weights:{place}", self._between("all_gather", moved.gathered)),
            ]
        )

    def leaving(self, moved: Moved) -> Parts:
        return _some(
            [
                ("sums read", REASON[READ], _over(moved.read, self.of.read)),
                ("sums up", REASON[UP], _over(moved.up, self.of.up)),
                ("reductions", f"gradients:{self.group.place}", self._between(self.reduction, moved.reduced)),
                (DOWN, REASON[DOWN], _over(moved.down, self.of.down)),
                (HOST, REASON[HOST], _over(moved.host, self.of.host)),
                (WRITTEN, REASON[WRITTEN], _over(moved.written, self.of.write)),
            ]
        )

    def update(self, moved: Moved) -> Parts:
        return _some(
            [
                ("records read", REASON[READ], _over(moved.read, self.of.read)),
                ("records updated", REASON[HOST], _over(moved.host, self.of.host)),
                ("records written", REASON[WRITTEN], _over(moved.written, self.of.write)),
            ]
        )


USES = {
    "sums read": READ,
    "sums up": UP,
    "records read": READ,
    "records updated": HOST,
    "records written": WRITTEN,
    **{name: name for name in (UP, DOWN, READ, WRITTEN, HOST)},
}


def _some(parts: Parts) -> Parts:
    return [part for part in parts if part[2] > 0]


def _over(num_bytes: float, rate: float) -> float:
    """Seconds; without a disk, a file of figures has a rate of 0 for it."""
    return num_bytes / rate if num_bytes and rate else float("inf") if num_bytes else 0.0


def _inputs(config: Config, world_size: int, stage: int, of: Bandwidths) -> dict[str, float]:
    """Layer inputs that the host keeps go down once and come up once; by layer, what is between two layers does so
    too: up for the forward pass, and the gradients both ways."""
    if config.training.activation_offload == "none":
        return {}
    layers = config.model.num_layers // config.parallel.pipeline
    count = derived.layer_input_bytes(config) * layers * derived.num_micro_batches(config, world_size)
    by_layer = config.training.pass_order == "by_layer"
    return {UP: count * (3 if by_layer else 1) / of.up, DOWN: count * (2 if by_layer else 1) / of.down}


class StreamLanes:
    """The tasks of a stage's experts. `begin` and `end` are called around each visit's piece of computing."""

    def __init__(self, loop: Loop, parts: StreamParts, name: str, visits: Sequence[int]) -> None:
        self.loop, self.parts, self.name = loop, parts, name
        self._fills = {fill.visit: fill for fill in slot_fills(visits, parts.slots)}
        self._visits, self._pieces = visits, list[int]()
        self._left: list[int] = []  # the task with which a gradient's slot is free, by backward visit
        self._counts: dict[int, int] = {}
        self._ends: list[int] = []  # of updates
        # Each layer's update, in the order of use: the task behind which its weights may be fetched.
        before = () if parts.early else dict.fromkeys(visits)
        self._updates = {layer: self._update(layer, []) for layer in before}

    def _update(self, layer: int, waits: list[int]) -> int:
        """The task with which a layer is updated, behind others and the update before the last."""
        if len(self._ends) >= NUM_SLOTS:
            waits = [*waits, self._ends[-NUM_SLOTS]]
        for lane, reason, seconds in self.parts.update:
            waits = [self.loop.add(f"{self.name} {lane}", f"update layer {layer}", {reason: seconds}, waits)]
        self._ends += waits
        return waits[0]

    def begin(self, is_backward: bool) -> list[int]:
        """What the next visit's computing waits for."""
        visit = len(self._pieces)
        waits: list[int] = []
        fill = self._fills.get(visit)
        if fill is not None:
            waits = [self._updates[fill.layer]] if fill.layer in self._updates else []
            waits += [self._pieces[fill.after]] if fill.after >= 0 else []
            for lane, reason, seconds in self.parts.fetch:
                waits = [
                    self.loop.add(f"{self.name} {lane}", f"weights of layer {fill.layer}", {reason: seconds}, waits)
                ]
        if is_backward and len(self._left) >= GRAD_SLOTS:
            waits.append(self._left[-GRAD_SLOTS])
        return waits

    def end(self, piece: int, is_backward: bool, is_last: bool) -> None:
        """The visit is computed by task `piece`; of a backward pass the gradient leaves. `is_last`: in this step."""
        layer = self._visits[len(self._pieces)]
        self._pieces.append(piece)
        if not is_backward:
            return
        number = self._counts.get(layer, 0)
        self._counts[layer] = number + 1
        kinds = self.parts.gradients
        leaves = kinds[-1] if is_last else kinds[0] if number == 0 else kinds[len(kinds) // 2]
        waits, free = [piece], piece
        for lane, reason, seconds in leaves:
            waits = [self.loop.add(f"{self.name} {lane}", f"gradient of layer {layer}", {reason: seconds}, waits)]
            free = free if lane == WRITTEN else waits[0]
        self._left.append(free)
        if is_last and self.parts.early:
            self._update(layer, waits)

    def busy(self, jobs: Sequence[BucketJob], beside: float = 1.0) -> dict[str, float]:
        """Seconds of a step by reason in which what is used most is in use; with the jobs of other buckets, and
        `beside` of the step's layer inputs."""
        total = {use: seconds * beside for use, seconds in self.parts.inputs.items()}
        start = f"{self.name} "
        for task in self.loop.tasks:
            if task.resource.startswith(start):
                use = USES.get(task.resource[len(start) :])
                if use is not None:
                    total[use] = total.get(use, 0.0) + task.seconds
        for job in jobs:
            for resource, _, seconds in job.parts:
                if resource in OF_JOBS:
                    total[OF_JOBS[resource]] = total.get(OF_JOBS[resource], 0.0) + seconds
        if not total:
            return {}
        most = max(total, key=lambda use: total[use])
        return {REASON[most]: total[most]}
