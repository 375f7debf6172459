"""The memory that each rank needs, by kind, from the configuration alone.

weights, gradients and optimizer follow Megatron-core's DDP buffers and distributed optimizer: parameters lie one after
the other in reverse order, each on a multiple of 64 numbers, and each bucket is filled up so that every data parallel
rank owns as much. activations are the most that a step has beside all that stays: what the schedule of micro-batches
holds at once and works with (simulator/activations.py), or, where that is more, what it takes to reduce and to clip the
gradients. buffers stay from step to step: the one that sequence parallelism gathers into, and the table of rotary
positions. What a GPU's libraries hold and what its allocator loses between tensors comes on top.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from configs import derived
from configs.schema import Config
from models.blueprint import parts
from moe.schedule.chunk_plan import Plan
from parallel.pipeline import passes
from simulator.activations import Activations
from simulator.layer_inputs import layer_inputs
from simulator.memory_tape import Profile
from simulator.parameters import Parameter, parameters, places
from simulator.sizes import FP32, Sizes

ALIGNMENT = 64  # numbers: Megatron-core's _ParamAndGradBuffer starts parameters at multiples
BUCKET_MULTIPLE = 128
BUCKET_SIZE, BUCKET_SIZE_PER_RANK = 40_000_000, 1_000_000  # numbers: its default
ROTARY_TABLES = 32  # that Megatron-core's cache holds
KINDS = ("weights", "gradients", "optimizer", "activations", "buffers")


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank; `host_activations` are on the host, beside the total."""

    rank: int
    stage: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int
    host_activations: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, kind) for kind in KINDS)


@dataclass(frozen=True)
class Buffer:
    """Parameters of one model chunk that are reduced over the same ranks: their places, and where buckets end."""

    ranges: tuple[tuple[int, int], ...]
    bucket_ends: tuple[int, ...]
    num_ranks: int  # that share the optimizer's state; 1: each has it all

    @property
    def size(self) -> int:
        """Numbers, padding included."""
        return self.bucket_ends[-1] if self.bucket_ends else 0

    def owned(self, rank: int) -> tuple[int, int]:
        """(numbers of parameters whose optimizer state this rank has, how many parameters these belong to)."""
        numbers = pieces = first = 0
        start = 0
        for end in self.bucket_ends:
            share = (end - start) // self.num_ranks
            low, high = start + rank * share, start + (rank + 1) * share
            while first < len(self.ranges) and self.ranges[first][0] < end:
                inside = min(high, self.ranges[first][1]) - max(low, self.ranges[first][0])
                if inside > 0:
                    numbers += inside
                    pieces += 1
                first += 1
            start = end
        return numbers, pieces


def make_buffer(local: Sequence[Parameter], num_ranks: int, distributed: bool, bucket_size: float) -> Buffer:
    """Lay parameters out as Megatron-core's _ParamAndGradBuffer does."""
    multiple = math.lcm(num_ranks, BUCKET_MULTIPLE)
    ranges: list[tuple[int, int]] = []
    ends: list[int] = []
    end = bucket_start = 0

    def close(end: int) -> int:
        nonlocal bucket_start
        bucket_start = _padded(end, multiple) if distributed else end
        ends.append(bucket_start)
        return bucket_start

    for parameter in reversed(local):
        alone = distributed and parameter.is_shared
        start = _padded(end, ALIGNMENT) if distributed else end
        if alone and start > bucket_start:
            start = close(start)
        end = start + parameter.local
        ranges.append((start, end))
        if alone or end - bucket_start >= bucket_size:
            end = close(end)
    if end > bucket_start:
        close(end)
    return Buffer(tuple(ranges), tuple(ends), num_ranks if distributed else 1)


def _padded(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def buffers(config: Config, vocab_size: int, world_size: int, stage: int) -> dict[str, list[Buffer]]:
    """The stage's buffers by model chunk: "dense", and "expert" for the experts under expert parallelism."""
    sizes = {
        "dense": derived.data_parallel_size(config, world_size),
        "expert": derived.expert_data_parallel_size(config, world_size),
    }
    result: dict[str, list[Buffer]] = {"dense": [], "expert": []}
    for index, part in enumerate(parts(config)[stage]):
        whole = index > 0 or stage > 0 or not config.parallel.overlap_grad_reduce
        bucket_size = math.inf if whole else max(BUCKET_SIZE, BUCKET_SIZE_PER_RANK * sizes["dense"])
        local = parameters(config, part, vocab_size)
        for kind, own in (
            ("dense", [p for p in local if not p.is_expert]),
            ("expert", [p for p in local if p.is_expert]),
        ):
            result[kind].append(make_buffer(own, sizes[kind], config.optimizer.distributed, bucket_size))
    return result


def rank_memory(
    config: Config, vocab_size: int, world_size: int, device: str, plan: Plan | None = None
) -> list[RankMemory]:
    """The memory of every rank. `plan` is that of the MoE layers; by default what the config fixes."""
    element = derived.element_size(config)
    # both moments, and the fp32 weights of a half precision model
    state_bytes = 2 * FP32 + (FP32 if element < FP32 else 0)
    activations = Activations(config, vocab_size, device, plan)
    stages = config.parallel.pipeline
    static = [buffers(config, vocab_size, world_size, stage) for stage in range(stages)]
    most = [
        max(
            activations_of_stage(config, activations, world_size, stage), _after_backward(config, static[stage], device)
        )
        for stage in range(stages)
    ]
    staying = [_staying(config, stage) for stage in range(stages)]
    leaving = [layer_inputs(config, world_size, stage).host for stage in range(stages)]
    distributed = config.optimizer.distributed

    @cache
    def optimizer(stage: int, kind: str, rank: int) -> int:
        owned = [buffer.owned(rank if distributed else 0) for buffer in static[stage][kind]]
        return sum(numbers * state_bytes + pieces * FP32 for numbers, pieces in owned)

    result = []
    for place in places(config, world_size):
        numbers = sum(buffer.size for kind in static[place.stage].values() for buffer in kind)
        state = optimizer(place.stage, "dense", place.data) + optimizer(place.stage, "expert", place.expert_data)
        result.append(
            RankMemory(
                place.rank,
                place.stage,
                numbers * element,
                numbers * FP32,
                state,
                most[place.stage],
                staying[place.stage],
                leaving[place.stage],
            )
        )
    return result


def _staying(config: Config, stage: int) -> int:
    """The buffer that sequence parallelism gathers into, and the tables of rotary positions: one for each model chunk,
    with latent attention one for each layer, as far as they are remembered."""
    model, of_stage = config.model, parts(config)[stage]
    latent = model.attention == "latent"
    # What goes into the widest layer that is split by its outputs.
    sizes = Sizes(config)
    result = sizes.tokens * model.hidden_size * sizes.element if config.parallel.sequence else 0
    if model.position_embedding == "rope":
        channels = model.rotary_head_dim if latent else int(derived.head_dim(config) * model.rotary_fraction)
        tables = sum(len(part.layers) for part in of_stage) if latent else len(of_stage)
        result += min(tables, ROTARY_TABLES) * model.sequence_length * channels * FP32
    return result


def _after_backward(config: Config, of_stage: dict[str, list[Buffer]], device: str) -> int:
    """gloo's reduce-scatter works on a copy of all that it reduces, and clipping on one of each parameter's gradient in
    turn."""
    every = [buffer for kind in of_stage.values() for buffer in kind]
    copies = sum(buffer.size for buffer in every) if device == "cpu" and config.optimizer.distributed else 0
    largest = max((end - start for buffer in every for start, end in buffer.ranges), default=0)
    return FP32 * max(copies, largest if config.optimizer.clip_grad > 0 else 0)


# ---------------------------------------------------------------------------------------------------------------------
# Micro-batches in flight
# ---------------------------------------------------------------------------------------------------------------------


def activations_of_stage(config: Config, activations: Activations, world_size: int, stage: int) -> int:
    """The most that a stage's micro-batches hold at once."""
    of_stage, leaving = parts(config)[stage], iter(layer_inputs(config, world_size, stage).leaving)
    in_flight: list[deque[Profile]] = [deque() for _ in of_stage]

    @cache
    def profiled(chunk: int, leaving: int) -> Profile:
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
