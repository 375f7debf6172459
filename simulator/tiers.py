"""Where a rank's optimizer state lies, as a run will arrange it: the same buckets, arranged by the same function
(optim/arrangement/), from the places of parameters in Megatron-core's buffers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from configs.schema import Config
from models.blueprint import parts
from optim.arrangement.arrange import Arrangement, Capacity, TierRequest, arrange, least, tier_request
from optim.arrangement.buckets import cut, largest
from optim.arrangement.off_device import ExpertRecords
from optim.arrangement.planning import Bandwidths, ElementBytes, Engine, Passes, predictions
from optim.arrangement.traffic import records_of_stage
from simulator.buffers import Buffer, buffers
from simulator.parameters import Parameter, Place, parameters

# Of a GPU's node, where a run has not measured its own: the link as arXiv 2609.14306 has it, in each direction; updates
# at about the bandwidth of an HBM3 and of a share of a server's memory.
ASSUMED = Bandwidths(up=16.3e9, down=16.3e9, host=25e9, device=2e12, read=3e9, write=2e9)


@dataclass(frozen=True)
class PlannedSlice:
    """What a rank will hold of a parameter: parallel/megatron/tiered.py's OwnedSlice without the tensors."""

    start: int
    end: int
    # Whether experts', model chunk, Megatron-core's bucket; the first alone where it is late.
    place: tuple[int, ...]
    late: bool
    order: int


class TierPlan:
    """Arrangements of the optimizer state of ranks. Ranks that own alike share one."""

    def __init__(self, config: Config, vocab_size: int, world_size: int, rooms: Capacity) -> None:
        """rooms: what each rank may use of the tiers; of the device, with all that else is there."""
        self.config, self.rooms = config, rooms
        self._static = [buffers(config, vocab_size, world_size, stage) for stage in range(config.parallel.pipeline)]
        self._local = [[parameters(config, part, vocab_size) for part in of_stage] for of_stage in parts(config)]
        self._records = [records_of_stage(config, world_size, stage) for stage in range(config.parallel.pipeline)]
        self._request, self._arranged = cache(self._want), cache(self._arrange)

    def of(self, place: Place, beside: int) -> Arrangement:
        """A rank's, where `beside` bytes of its device are taken by all else. What does not fit is arranged in the
        least memory all the same."""
        return self._arranged(place.stage, place.data_context, place.expert_data, beside)

    def request(self, place: Place) -> TierRequest:
        """A rank's buckets."""
        return self._request(place.stage, place.data_context, place.expert_data)

    def _arrange(self, stage: int, data: int, expert_data: int, beside: int) -> Arrangement:
        asked = self._request(stage, data, expert_data)
        return arrange(asked, left(self.rooms, beside)) or least(asked)

    def _want(self, stage: int, data: int, expert_data: int) -> TierRequest:
        ranks = {"dense": data, "expert": expert_data}
        slices = planned_slices(self._static[stage], self._local[stage], ranks)
        found = cut(slices, largest(slices, self.config.optimizer.bucket_parameters))
        numels, late = [bucket.numel for bucket in found], [bucket.late for bucket in found]
        return request_with_experts(self.config, numels, late, self._records[stage])


def request_with_experts(
    config: Config, numels: Sequence[int], late: Sequence[bool], records: ExpertRecords | None
) -> TierRequest:
    """What is asked for these buckets, and behind them for those of experts off the device, layer by layer."""
    own = [] if records is None else [end - first for first, end in records.buckets] * records.num_layers
    off = [False] * len(numels) + [True] * len(own) if own else []
    return tier_request(config, [*numels, *own], [*late, *(True for _ in own)], off)


def left(rooms: Capacity, beside: float) -> Capacity:
    """What optimizer state may take where `beside` bytes of the device are taken."""
    return replace(rooms, device=max(rooms.device - beside, 0.0))


def planned_slices(
    static: Mapping[str, Sequence[Buffer]], local: Sequence[Sequence[Parameter]], ranks: Mapping[str, int]
) -> list[PlannedSlice]:
    """What a rank owns of a stage's parameters, in the order of the forward pass. `static`: the stage's buffers by
    kind and model chunk; `ranks`: its place among those that share a kind's state."""
    found, first = [], 0
    for chunk, of_chunk in enumerate(local):
        for kind, is_expert in (("dense", False), ("expert", True)):
            own = [
                (first + order, each)
                for order, each in enumerate(of_chunk)
                if each.is_expert == is_expert and not each.is_off_device
            ]
            for owned in static[kind][chunk].owned(ranks[kind]):
                order, parameter = own[owned.index]
                place = (is_expert,) if parameter.is_late else (is_expert, chunk, owned.bucket)
                found.append(PlannedSlice(owned.start, owned.end, place, parameter.is_late, order))
        first += len(of_chunk)
    return sorted(found, key=lambda owned: owned.order)


def least_host_bytes(asked: TierRequest, rooms: Capacity) -> int | None:
    """The smallest host budget with which the state fits; None where no budget is enough."""
    most = arrange(replace(asked, early_update=_no_wish(asked)), replace(rooms, host=math.inf))
    if most is None:
        return None
    low, high = 0, most.host_bytes
    while high - low > 2**16:
        middle = (low + high) // 2
        fits = arrange(asked, replace(rooms, host=middle))
        low, high = (middle, high) if fits is None else (low, fits.host_bytes)
    return high


def _no_wish(asked: TierRequest) -> str:
    return "always" if asked.early_update == "always" else "never"


def engine_seconds(tiers: Arrangement, passes: float = 0.0, rates: Bandwidths = ASSUMED) -> dict[Engine, float]:
    """Seconds of a step of one rank with each engine, whose passes take so long: a third of it forward."""
    element = ElementBytes.of(tiers)
    both = Passes(passes / 3, passes * 2 / 3, any(tiers.early), any(tiers.leaving))
    of = [index for index, way in enumerate(tiers.ways) if way != "record"]
    numels, where = [tiers.numels[index] for index in of], [tiers.tiers[index] for index in of]
    return dict(predictions(numels, where, element, rates, both))
