"""What a step moves of experts off the device. Pure, and without torch: a run's plan counts by it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

from configs import derived
from configs.schema import Config
from optim.arrangement.arrange import GRAD_BYTES
from optim.arrangement.off_device import ExpertRecords, expert_records
from parallel.pipeline import SlotFill, layer_visits, layers_of_stage, slot_fills

MASTER_BYTES = 4  # of a weight that is its own master


@dataclass(frozen=True)
class Moved:
    """Bytes that one rank moves of experts: over the link `up` to the device and `down` from it, `read` from the disk
    and `written` to it; `gathered` and `reduced` among ranks that hold the same experts, all ranks' together; `host`:
    memory of the host that additions and updates read and write."""

    up: int = 0
    down: int = 0
    read: int = 0
    written: int = 0
    gathered: int = 0
    reduced: int = 0
    host: int = 0

    def __add__(self, other: Moved) -> Moved:
        return Moved(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def times(self, number: int) -> Moved:
        """The same so many times."""
        return Moved(*(number * each for each in astuple(self)))


@dataclass(frozen=True)
class LayerMoves:
    """What moves of a layer's experts on one rank; `state_tier`, `state_bytes`: of a parameter's optimizer state."""

    records: ExpertRecords
    state_tier: str
    state_bytes: int
    gradients: int  # that leave of a layer in a step

    @property
    def on_disk(self) -> bool:
        return self.records.tier == "disk"

    @property
    def left(self) -> Moved:
        """Gradients of all layers in a step."""
        ends = self.gradient(True, self.gradients == 1)
        if self.gradients > 1:
            ends += self.gradient(False, True) + self.gradient(False, False).times(self.gradients - 2)
        return ends.times(self.records.num_layers)

    @property
    def updated(self) -> Moved:
        """Updates of all layers."""
        return self.update().times(self.records.num_layers)

    def fetch(self) -> Moved:
        """Weights come to a slot: a rank's part from its tier, the rest from the ranks that hold the others."""
        part = self.records.part_numel * self.records.weight_bytes
        whole = self.records.padded_numel * self.records.weight_bytes
        return Moved(up=part, read=part * self.on_disk, gathered=whole if self.records.parts > 1 else 0)

    def gradient(self, is_first: bool, is_last: bool) -> Moved:
        """A gradient leaves: a micro-batch's, which the host adds to those before it, or the sum of all."""
        of, disk = self.records, int(self.on_disk)
        kept, whole = of.part_numel * GRAD_BYTES, of.padded_numel * GRAD_BYTES
        reduced = whole if of.alike > 1 else 0
        if not of.sums_on_host:
            return Moved(down=kept, written=kept * disk, reduced=reduced)
        if is_last and of.alike > 1:
            return Moved(up=whole, down=kept, read=whole * disk, written=kept * disk, reduced=reduced)
        come, again = of.padded_numel * of.weight_bytes, 0 if is_first else whole
        return Moved(down=come, read=again * disk, written=whole * disk, host=come + again + whole)

    def update(self) -> Moved:
        """The optimizer's step of a rank's part, on the host."""
        of, state = self.records, self.state_bytes
        weights, disk = of.weight_bytes, int(self.on_disk)
        state_disk = state * (self.state_tier == "disk")
        own = weights if weights == MASTER_BYTES else 0  # a weight that is no master is not read
        copied = 2 * of.has_shadows * (state * (self.state_tier == "host") + own * (1 - disk))  # to shadows of the host
        return Moved(
            read=of.part_numel * (disk * (GRAD_BYTES + own) + state_disk),
            written=of.part_numel * (disk * weights + state_disk),
            host=of.part_numel * (2 * state + copied + GRAD_BYTES + weights + own),
        )


@dataclass(frozen=True)
class ExpertTraffic:
    """A step of one rank. `visits`: MoE layers in the order of use; `fills`: their weights' ways to the device."""

    moves: LayerMoves
    visits: Sequence[int]
    fills: Sequence[SlotFill]

    @property
    def gradients(self) -> int:
        """How many leave of a layer in a step."""
        return self.moves.gradients

    @property
    def fetched(self) -> Moved:
        return self.moves.fetch().times(len(self.fills))

    @property
    def left(self) -> Moved:
        """Gradients of all layers."""
        return self.moves.left

    @property
    def updated(self) -> Moved:
        return self.moves.updated

    @property
    def total(self) -> Moved:
        return self.fetched + self.left + self.updated


def state_bytes(config: Config) -> int:
    """Bytes of a parameter's state beside its weight: two moments, and a master where the weight is none."""
    moments = 4 + (4 if config.optimizer.moment_dtype == "fp32" else 2)
    return moments + (4 if derived.element_size(config) < 4 else 0)


def moe_visits(config: Config, num_micro_batches: int, stage: int, forward_only: bool = False) -> list[int]:
    """The MoE layers of a stage, from 0 in the whole model, in the order in which a step visits them."""
    is_moe = derived.moe_layer_pattern(config)
    return [layer for layer in layer_visits(config, num_micro_batches, stage, forward_only) if is_moe[layer]]


def records_of_stage(config: Config, world_size: int, stage: int) -> ExpertRecords | None:
    """Records of a stage's ranks; None where experts lie on the device or there are none."""
    is_moe = derived.moe_layer_pattern(config)
    layers = [layer for chunk in layers_of_stage(config, stage) for layer in chunk]
    return expert_records(config, world_size, sum(bool(is_moe[layer]) for layer in layers))


def layer_moves(config: Config, world_size: int, stage: int) -> LayerMoves | None:
    """What moves of one layer on a stage's ranks; None where no experts lie off their devices."""
    records = records_of_stage(config, world_size, stage)
    if records is None:
        return None
    apart = derived.num_micro_batches(config, world_size) if records.sums_on_host else 1
    return LayerMoves(records, config.optimizer.state_device, state_bytes(config), apart)


def expert_traffic(config: Config, world_size: int, stage: int) -> ExpertTraffic | None:
    """A step of a stage's ranks; None where no experts lie off their devices."""
    moves = layer_moves(config, world_size, stage)
    if moves is None:
        return None
    visits = moe_visits(config, derived.num_micro_batches(config, world_size), stage)
    return ExpertTraffic(moves, visits, slot_fills(visits, moves.records.weight_slots))
