"""Offloaded experts in a simulated step: fetches of weights, copies of gradients and updates run on their own
resources.

Weights are fetched to device buffers one layer ahead, gradients are copied to the host, and the host updates the
weights, all while the stage computes. These resources share a link, a disk or the host's memory, which limits how short
a step can be (`ExpertStreams.busy`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from configs import derived
from configs.schema import Config
from optim.arrangement.buckets import NUM_STAGES
from optim.arrangement.engines import Bandwidths
from optim.arrangement.experts import GRAD_SLOTS, BytesMoved, LayerTraffic, layer_traffic
from parallel.pipeline import layers_of_stage, slot_fills
from simulator.clock.axes import EXPERT_REPLICAS, Group, collective
from simulator.clock.hardware import Hardware
from simulator.clock.loop import Loop
from simulator.clock.stages import BucketJob, rates

UP, DOWN, READ, WRITTEN, HOST = "up", "down", "read", "written", "host"
REASON = {UP: "host_link", DOWN: "host_link", READ: "disk", WRITTEN: "disk", HOST: "host_update"}
# Shared resource that each resource of bucket jobs (simulator/clock/stages.py) and of this file uses.
USED_BY_JOBS = {"host up": UP, "host down": DOWN, "host": HOST, "disk": READ}
USED = {
    "sums read": READ,
    "sums up": UP,
    "records read": READ,
    "records updated": HOST,
    "records written": WRITTEN,
    **{name: name for name in (UP, DOWN, READ, WRITTEN, HOST)},
}
Transfers = Sequence[tuple[str, str, float]]  # (resource, reason, seconds), one after the other


@dataclass(frozen=True)
class StreamSeconds:
    """Seconds of the transfers and updates of a pipeline stage's offloaded experts, per layer.

    `early`: whether updates follow the last gradient, instead of the start of the next step.
    """

    fetch: Transfers  # of weights to a device buffer
    gradients: Sequence[Transfers]  # of the step's first gradient, one in between, the last; fewer in a short step
    update: Transfers
    num_slots: int  # device buffers for a layer's weights
    early: bool  # updates follow the last gradient, not the start of the next step
    layer_wise: bool
    layers: Sequence[Sequence[int]]  # MoE layers of each model chunk
    inputs: Mapping[str, float]  # seconds per step in which layer inputs use the link, by direction

    def visits(self, order: Iterable[tuple[bool, int]]) -> list[int]:
        """Return the MoE layers in the order of use. `order`: (is forward, model chunk) of each pass."""
        return [each for is_forward, chunk in order for each in self.layers[chunk][:: 1 if is_forward else -1]]


def stream_seconds(
    config: Config, world_size: int, stage: int, hardware: Hardware, groups: Mapping[str, Group]
) -> StreamSeconds | None:
    """Return the seconds that a pipeline stage's offloaded experts take; None if the stage has none."""
    moves = layer_traffic(config, world_size, stage)
    if moves is None:
        return None
    of = rates(hardware, world_size)
    seconds = _Seconds(of, hardware, groups[EXPERT_REPLICAS], moves)
    records = moves.records
    numbers = range(min(moves.num_gradients, 3))  # the first, one in between, the last
    gradients = [seconds.gradient(moves.gradient(n == 0, n == numbers[-1])) for n in numbers]
    layer_wise, is_moe = config.training.pass_order == "by_layer", derived.moe_layer_pattern(config)
    inputs: dict[str, float] = {}
    if config.training.activation_offload != "none":
        # Offloaded layer inputs are copied to the host and back. In a layer-wise schedule so are the values between two
        # layers: up again for the forward pass, and the gradients in both directions.
        layers = config.model.num_layers // config.parallel.pipeline
        count = derived.layer_input_bytes(config) * layers * derived.num_micro_batches(config, world_size)
        inputs = {UP: count * (3 if layer_wise else 1) / of.up, DOWN: count * (2 if layer_wise else 1) / of.down}
    return StreamSeconds(
        seconds.fetch(moves.fetch()),
        gradients,
        seconds.update(moves.update()),
        records.weight_slots,
        records.has_shadows,
        layer_wise,
        [[each for each in chunk if is_moe[each]] for chunk in layers_of_stage(config, stage)],
        inputs,
    )


def least_streamed_seconds(config: Config, world_size: int, hardware: Hardware) -> float:
    """Return a lower bound of the seconds of a step with offloaded experts; 0 without offloaded experts.

    It is the time of the resource (link, host or disk) that the experts of the first pipeline stage use most.
    """
    moves = layer_traffic(config, world_size, 0)
    if moves is None:
        return 0.0
    records, of = moves.records, rates(hardware, world_size)
    rounds = 1 if config.training.pass_order == "by_layer" else derived.num_micro_batches(config, world_size)
    # at each change between forward and backward passes, at most as many layers are on the device as it has buffers
    passes = 2 * rounds if config.parallel.pipeline == 1 else 1
    fills = passes * records.num_layers - records.weight_slots * (passes - 1)
    total = moves.fetch().times(fills) + moves.gradients_out + moves.updates
    moved = total.up, total.down, total.host, total.read, total.written
    return max(map(_over, moved, (of.up, of.down, of.host, of.read, of.write)))


class _Seconds:
    """Converts the bytes that a layer's experts move into seconds of consecutive transfers."""

    def __init__(self, of: Bandwidths, hardware: Hardware, group: Group, moves: LayerTraffic) -> None:
        self.of, self.hardware, self.group = of, hardware, group
        self.reduction = "reduce_scatter" if moves.records.num_shards > 1 else "all_reduce"

    def fetch(self, moved: BytesMoved) -> Transfers:
        """Return the transfers that bring a layer's weights to the device. `moved`: bytes by resource."""
        gathering = collective(self.hardware, "all_gather", self.group, moved.gathered)
        return _nonzero(
            (READ, REASON[READ], _over(moved.read, self.of.read)),
            (UP, REASON[UP], _over(moved.up, self.of.up)),
            ("gathers", f"weights:{self.group.link}", gathering),
        )

    def gradient(self, moved: BytesMoved) -> Transfers:
        """Return the transfers of a layer's gradient off the device, with its reduction. `moved`: bytes by resource."""
        reducing = collective(self.hardware, self.reduction, self.group, moved.reduced)
        return _nonzero(
            ("sums read", REASON[READ], _over(moved.read, self.of.read)),
            ("sums up", REASON[UP], _over(moved.up, self.of.up)),
            ("reductions", f"gradients:{self.group.link}", reducing),
            (DOWN, REASON[DOWN], _over(moved.down, self.of.down)),
            (HOST, REASON[HOST], _over(moved.host, self.of.host)),
            (WRITTEN, REASON[WRITTEN], _over(moved.written, self.of.write)),
        )

    def update(self, moved: BytesMoved) -> Transfers:
        """Return the transfers for the update of a layer's optimizer state. `moved`: bytes by resource."""
        return _nonzero(
            ("records read", REASON[READ], _over(moved.read, self.of.read)),
            ("records updated", REASON[HOST], _over(moved.host, self.of.host)),
            ("records written", REASON[WRITTEN], _over(moved.written, self.of.write)),
        )


def _nonzero(*transfers: tuple[str, str, float]) -> Transfers:
    return [transfer for transfer in transfers if transfer[2] > 0]


def _over(num_bytes: float, rate: float) -> float:
    """Return the seconds of a transfer; infinity for bytes at rate 0, as on a machine without a disk."""
    return num_bytes / rate if num_bytes and rate else float("inf") if num_bytes else 0.0


class ExpertStreams:
    """Adds the tasks of a pipeline stage's offloaded experts to the event loop.

    Call `begin` before and `end` after adding the computation of each visit (pass through an MoE layer).
    """

    def __init__(self, loop: Loop, seconds: StreamSeconds, name: str, visits: Sequence[int]) -> None:
        self.loop, self.seconds, self.name = loop, seconds, name
        self._fills = {fill.visit: fill for fill in slot_fills(visits, seconds.num_slots)}
        self._visits, self._computed = visits, list[int]()  # layer and task of each visit
        self._freed: list[int] = []  # task that frees a gradient's device buffer, by backward visit
        self._reduced: set[int] = set()  # layers that have had a backward visit
        self._ends: list[int] = []  # of updates
        # Each layer's update, in the order of use: its weights may be fetched after this task.
        before = () if seconds.early else dict.fromkeys(visits)
        self._updates = {layer: self._update(layer, []) for layer in before}

    def _update(self, layer: int, waits: list[int]) -> int:
        """Add a layer's update, which waits for `waits` and for a free staging buffer; return its last task."""
        if len(self._ends) >= NUM_STAGES:
            waits = [*waits, self._ends[-NUM_STAGES]]
        waits = self._transfer(self.seconds.update, f"update layer {layer}", waits)
        self._ends += waits
        return waits[0]

    def _transfer(self, transfers: Transfers, name: str, waits: list[int]) -> list[int]:
        """Add consecutive transfers, the first of which waits for `waits`, and return the last transfer's task."""
        for resource, reason, seconds in transfers:
            waits = [self.loop.add(f"{self.name} {resource}", name, {reason: seconds}, waits)]
        return waits

    def begin(self, is_backward: bool) -> list[int]:
        """Return the tasks that the computation of the next visit (pass through an MoE layer) must wait for."""
        visit = len(self._computed)
        waits: list[int] = []
        if (fill := self._fills.get(visit)) is not None:
            waits = [self._updates[fill.layer]] if fill.layer in self._updates else []
            waits += [self._computed[fill.after]] if fill.after >= 0 else []
            waits = self._transfer(self.seconds.fetch, f"weights of layer {fill.layer}", waits)
        if is_backward and len(self._freed) >= GRAD_SLOTS:
            waits.append(self._freed[-GRAD_SLOTS])
        return waits

    def end(self, task: int, is_backward: bool, is_last: bool) -> None:
        """Record that `task` computes the current visit (pass through an MoE layer).

        After a backward pass, the copy of the gradient is added. `is_last`: whether this is the layer's last visit in
        the step.
        """
        layer = self._visits[len(self._computed)]
        self._computed.append(task)
        if not is_backward:
            return
        kinds = self.seconds.gradients
        gradient = kinds[-1] if is_last else kinds[len(kinds) // 2] if layer in self._reduced else kinds[0]
        self._reduced.add(layer)
        waits, freed = [task], task
        for resource, reason, seconds in gradient:
            waits = [self.loop.add(f"{self.name} {resource}", f"gradient of layer {layer}", {reason: seconds}, waits)]
            freed = freed if resource == WRITTEN else waits[0]
        self._freed.append(freed)
        if is_last and self.seconds.early:
            self._update(layer, waits)

    def busy(self, jobs: Sequence[BucketJob], share: float = 1.0) -> dict[str, float]:
        """Return how many seconds per step the most used resource is busy, by reason.

        `jobs`: updates of other offloaded buckets, which count, too. `share`: part of a step's layer inputs that
        counts.
        """
        total = defaultdict(float, {used: seconds * share for used, seconds in self.seconds.inputs.items()})
        start = f"{self.name} "
        for task in self.loop.tasks:
            if task.resource.startswith(start) and (used := USED.get(task.resource.removeprefix(start))):
                total[used] += task.seconds
        for job in jobs:
            for resource, _, seconds in job.steps:
                if resource in USED_BY_JOBS:
                    total[USED_BY_JOBS[resource]] += seconds
        if not total:
            return {}
        most = max(total, key=total.__getitem__)
        return {REASON[most]: total[most]}
