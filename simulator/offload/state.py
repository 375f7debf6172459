"""Planned arrangement of each rank's optimizer state over device, host and disk.

The functions of a run (optim/arrangement/) cut buckets and arrange them, from the offsets of parameters in
Megatron-core's buffers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from configs import derived
from configs.job import Job
from configs.schema import Config
from models.blueprint import model_chunks
from optim.arrangement.buckets import (
    Arrangement,
    ArrangementRequest,
    Capacity,
    arrange,
    arrangement_request,
    cut,
    largest,
    least,
)
from optim.arrangement.engines import Bandwidths, ElementBytes, Engine, Passes, predictions
from optim.arrangement.experts import ExpertRecords, records_of_stage
from simulator.buffers import Buffer, buffers
from simulator.parameters import Parameter, RankCoordinates, parameters, rank_coordinates

# Bandwidths of a GPU's node that are assumed until a run has measured its own: the link of arXiv 2609.14306 in each
# direction; updates at about the bandwidth of an HBM3 and of a share of a server's memory.
ASSUMED = Bandwidths(up=16.3e9, down=16.3e9, host=25e9, device=2e12, read=3e9, write=2e9)


@dataclass(frozen=True)
class PlannedSlice:
    """Elements [start, end) of a parameter whose optimizer state a rank will own, as a plan without tensors."""

    start: int
    end: int
    # (whether it is an expert's, model chunk, Megatron-core's bucket); the first alone if reduced_at_step_end
    bucket_key: tuple[int, ...]
    reduced_at_step_end: bool
    order: int


class OffloadPlan:
    """Arranges each rank's optimizer state on device, host and disk; ranks with the same slices share the result."""

    def __init__(self, job: Job, capacity: Capacity) -> None:
        """Prepare to arrange the optimizer state of every rank on device, host and disk.

        `capacity`: bytes of each rank's device, host and disk, including those that other tensors use.
        """
        self.config, self.capacity = job.config, capacity
        stages = range(job.config.parallel.pipeline)
        self._static = [buffers(job, stage) for stage in stages]
        self._local = [
            [parameters(job.config, chunk, job.vocab_size) for chunk in stage] for stage in model_chunks(job.config)
        ]
        self._records = [records_of_stage(job.config, job.world_size, stage) for stage in stages]
        self._request, self._arranged = cache(self._requested), cache(self._arrange)

    def of(self, coordinates: RankCoordinates, used: int) -> Arrangement:
        """Return a rank's arrangement of optimizer state if other tensors take `used` bytes of its device.

        State that does not fit is arranged with the least possible memory.
        """
        return self._arranged(coordinates.stage, coordinates.data_context, coordinates.expert_data, used)

    def request(self, coordinates: RankCoordinates) -> ArrangementRequest:
        """Return the buckets of a rank's optimizer state, with the settings by which they are stored."""
        return self._request(coordinates.stage, coordinates.data_context, coordinates.expert_data)

    def _arrange(self, stage: int, data: int, expert_data: int, used: int) -> Arrangement:
        request = self._request(stage, data, expert_data)
        return arrange(request, remaining(self.capacity, used)) or least(request)

    def _requested(self, stage: int, data: int, expert_data: int) -> ArrangementRequest:
        ranks = {"dense": data, "expert": expert_data}
        slices = planned_slices(self._static[stage], self._local[stage], ranks)
        found = cut(slices, largest(slices, self.config.optimizer.bucket_parameters))
        at_end = [bucket.reduced_at_step_end for bucket in found]
        return request_with_experts(self.config, [bucket.numel for bucket in found], at_end, self._records[stage])


def request_with_experts(
    config: Config, numels: Sequence[int], reduced_at_step_end: Sequence[bool], records: ExpertRecords | None
) -> ArrangementRequest:
    """Return the buckets of optimizer state to store on device, host or disk, with the config's settings.

    They are the given ones, followed by those of offloaded experts, layer by layer.
    """
    own = [] if records is None else [end - first for first, end in records.buckets] * records.num_layers
    is_offloaded = [False] * len(numels) + [True] * len(own) if own else []
    return arrangement_request(config, [*numels, *own], [*reduced_at_step_end, *(True for _ in own)], is_offloaded)


def remaining(capacity: Capacity, used: float) -> Capacity:
    """Return the capacity that is left for optimizer state if other tensors take `used` bytes of the device."""
    return replace(capacity, device=max(capacity.device - used, 0.0))


def planned_slices(
    static: Mapping[str, Sequence[Buffer]], local: Sequence[Sequence[Parameter]], ranks: Mapping[str, int]
) -> list[PlannedSlice]:
    """Return the ranges of a stage's parameters whose optimizer state a rank owns, in the order of the forward pass.

    `static`: gradient buffers by kind and model chunk. `local`: parameters by model chunk. `ranks`: by kind, the index
    among ranks that share the state.
    """
    found, first = [], 0
    for chunk, of_chunk in enumerate(local):
        for kind, is_expert in (("dense", False), ("expert", True)):
            own = [
                (first + order, each)
                for order, each in enumerate(of_chunk)
                if each.is_expert == is_expert and not each.is_offloaded
            ]
            for owned in static[kind][chunk].owned(ranks[kind]):
                order, parameter = own[owned.index]
                key = (is_expert,) if parameter.reduced_at_step_end else (is_expert, chunk, owned.bucket)
                found.append(PlannedSlice(owned.start, owned.end, key, parameter.reduced_at_step_end, order))
        first += len(of_chunk)
    return sorted(found, key=lambda owned: owned.order)


def least_host_bytes(request: ArrangementRequest, capacity: Capacity) -> int | None:
    """Return the smallest host budget in bytes with which the optimizer state fits; None if no budget is enough."""
    early_update = "always" if request.early_update == "always" else "never"
    most = arrange(replace(request, early_update=early_update), replace(capacity, host=math.inf))
    if most is None:
        return None
    low, high = 0, most.host_bytes
    while high - low > 2**16:
        middle = (low + high) // 2
        fits = arrange(request, replace(capacity, host=middle))
        low, high = (middle, high) if fits is None else (low, fits.host_bytes)
    return high


def engine_seconds(arrangement: Arrangement, passes: float = 0.0, rates: Bandwidths = ASSUMED) -> dict[Engine, float]:
    """Return the predicted seconds of a step for each setting of optimizer.engine.

    `passes`: seconds of both passes; a third is the forward pass.
    """
    element = ElementBytes.of(arrangement)
    both = Passes(passes / 3, passes * 2 / 3, any(arrangement.early), any(arrangement.leaving))
    indices = [index for index, engine in enumerate(arrangement.engines) if engine != "record"]
    numels = [arrangement.numels[index] for index in indices]
    targets = [arrangement.targets[index] for index in indices]
    return dict(predictions(numels, targets, element, rates, both))


def stage_arrangements(job: Job, capacity: Capacity) -> list[Arrangement | None]:
    """Return the arrangement of offloaded optimizer state on the first rank of each pipeline stage.

    `capacity`: bytes of device, host and disk that the state may use.
    """
    stages = range(job.config.parallel.pipeline)
    if not derived.has_own_optimizer_state(job.config):
        return [None for _ in stages]
    plan = OffloadPlan(job, capacity)
    first = {each.stage: each for each in reversed(list(rank_coordinates(job.config, job.world_size)))}
    return [plan.of(first[stage], 0) for stage in stages]
