"""Layout of gradient buffers as Megatron-core's DDP and distributed optimizer create them.

Parameters are stored in reverse order, each starting at a multiple of 64 elements. Each bucket is padded so that all
data-parallel ranks own equally long shares of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from configs.job import Job
from models.blueprint import model_chunks
from simulator.parameters import Parameter, parameters, state_ranks

ALIGNMENT = 64  # elements: Megatron-core's _ParamAndGradBuffer starts parameters at multiples of this
BUCKET_MULTIPLE = 128
BUCKET_SIZE, BUCKET_SIZE_PER_RANK = 40_000_000, 1_000_000  # elements: Megatron-core's defaults


@dataclass(frozen=True)
class OwnedShare:
    """Elements [start, end) of a parameter whose optimizer state one rank owns.

    `index`: of the parameter, in module order. `bucket`: index of Megatron-core's bucket.
    """

    index: int  # of the parameter, in module order
    bucket: int  # index of Megatron-core's bucket
    start: int
    end: int


@dataclass(frozen=True)
class Buffer:
    """Gradient buffer for the parameters of one model chunk whose gradients are reduced over the same ranks."""

    ranges: tuple[tuple[int, int], ...]  # [start, end) of each parameter, in elements
    bucket_ends: tuple[int, ...]
    num_ranks: int  # ranks that share the optimizer state; 1: each rank has all of it

    @property
    def size(self) -> int:
        """Length in elements, including the padding."""
        return self.bucket_ends[-1] if self.bucket_ends else 0

    def owned(self, rank: int) -> Iterator[OwnedShare]:
        """Yield the ranges of parameters whose optimizer state is on this rank."""
        start = first = 0
        for bucket, end in enumerate(self.bucket_ends):
            share = (end - start) // self.num_ranks
            low, high = start + rank * share, start + (rank + 1) * share
            while first < len(self.ranges) and self.ranges[first][0] < end:
                begin, stop = self.ranges[first]
                if max(low, begin) < min(high, stop):
                    yield OwnedShare(len(self.ranges) - 1 - first, bucket, max(low - begin, 0), min(high, stop) - begin)
                first += 1
            start = end


def make_buffer(local: Sequence[Parameter], num_ranks: int, distributed: bool, bucket_size: float) -> Buffer:
    """Return the gradient buffer of the parameters `local`, laid out as by Megatron-core's _ParamAndGradBuffer."""
    multiple = math.lcm(num_ranks, BUCKET_MULTIPLE)
    ranges, ends = list[tuple[int, int]](), list[int]()
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


def buffers(job: Job, stage: int) -> dict[str, list[Buffer]]:
    """Return a pipeline stage's gradient buffers, one per model chunk: "dense", and "expert" under expert parallelism.

    Offloaded experts have no gradient buffer.
    """
    config, sizes = job.config, state_ranks(job.config, job.world_size)
    result: dict[str, list[Buffer]] = {"dense": [], "expert": []}
    for index, chunk in enumerate(model_chunks(config)[stage]):
        whole = index > 0 or stage > 0 or not config.parallel.overlap_grad_reduce
        bucket_size = math.inf if whole else max(BUCKET_SIZE, BUCKET_SIZE_PER_RANK * sizes["dense"])
        local = [each for each in parameters(config, chunk, job.vocab_size) if not each.is_offloaded]
        for kind, buffers_of_kind in result.items():
            own = [parameter for parameter in local if parameter.is_expert == (kind == "expert")]
            buffers_of_kind.append(make_buffer(own, sizes[kind], config.optimizer.distributed, bucket_size))
    return result
