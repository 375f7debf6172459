"""Choice of the engine, device or host, that updates each bucket, and the predicted step time: pure functions.

The seconds of a step are summed per resource: each direction of the link, the host's update, the device's update, the
disk, and the host's memory. The busiest resource determines the step time. As a bucket passes through all resources,
the time of one bucket on the others is added ("filling"). See docs/decisions/optimizer-update-engines.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Literal

from optim.arrangement.buckets import GRAD_BYTES, NUM_STAGES, Arrangement, BucketEngine

Engine = Literal["device_stream", "host", "split"]
ENGINES: tuple[Engine, ...] = ("device_stream", "host", "split")
SHARES = 64  # `split` tries to give the host multiples of 1 / SHARES of the elements


@dataclass(frozen=True)
class Bandwidths:
    """Bandwidths of a rank's resources in bytes per second, each measured while the rank does nothing else."""

    up: float  # the link to the device
    down: float  # the link from the device
    host: float  # read and written by the host's update
    device: float  # read and written by the device's update
    read: float = math.inf  # the disk
    write: float = math.inf
    memory: float = math.inf  # of host memory, summed over all readers and writers


@dataclass(frozen=True)
class ElementBytes:
    """Bytes per element of a bucket: its optimizer state, and its weight (its own master if there is no other)."""

    record: int
    weight: int
    has_master: bool

    @classmethod
    def of(cls, arrangement: Arrangement) -> ElementBytes:
        """Return the bytes per element of an arrangement's buckets. Half-precision weights have a separate master."""
        return cls(arrangement.bytes_per_element, arrangement.weight_bytes, arrangement.weight_bytes < 4)


@dataclass(frozen=True)
class Passes:
    """Seconds of a step's passes that optimizer updates overlap with.

    `early`: whether updates overlap with both passes, instead of only forward. `leaving`: whether gradients are copied
    to the host in the backward pass.
    """

    forward: float = 0.0  # seconds
    backward: float = 0.0
    early: bool = False
    leaving: bool = False


@dataclass(frozen=True)
class Work:
    """Seconds for which optimizer updates keep each resource busy.

    `leaving`: the part of `down` for gradients. `device_stages`, `host_stages`, `disk_stages`: use of reused buffers,
    divided by the number of buffers.
    """

    up: float = 0.0
    down: float = 0.0
    host: float = 0.0
    device: float = 0.0
    disk: float = 0.0  # reads and writes
    memory: float = 0.0
    leaving: float = 0.0  # of `down`, gradients
    device_stages: float = 0.0
    host_stages: float = 0.0  # of gradients and weights
    disk_stages: float = 0.0  # of records, on the host

    def __add__(self, other: Work) -> Work:
        return Work(  # written out for speed: a search adds millions
            self.up + other.up,
            self.down + other.down,
            self.host + other.host,
            self.device + other.device,
            self.disk + other.disk,
            self.memory + other.memory,
            self.leaving + other.leaving,
            self.device_stages + other.device_stages,
            self.host_stages + other.host_stages,
            self.disk_stages + other.disk_stages,
        )

    @property
    def longest(self) -> float:
        return max(getattr(self, each.name) for each in fields(self))

    @property
    def filling(self) -> float:
        """Start-up seconds of the update pipeline: those of one bucket on all resources except the slowest."""
        resources = (self.up, self.down, self.host, self.device, self.disk)
        return sum(resources) - max(resources)


@lru_cache(maxsize=2**14)
def work(
    by: BucketEngine, on_disk: bool, numel: int, element: ElementBytes, rates: Bandwidths, early: bool = False
) -> Work:
    """Return the seconds that updating one bucket takes on each resource. `by`: the engine that updates it."""
    record, weights, grads = numel * element.record, numel * element.weight, numel * GRAD_BYTES
    update = 2 * record + grads + weights
    if by == "device":
        return Work(device=update / rates.device)
    disk = record / rates.read + record / rates.write if on_disk else 0.0
    if by == "device_stream":
        up = down = record + weights * early  # new weights are on the host until the norm is known
        host, device = 0, update
    else:
        up, down = weights, grads + weights * (not element.has_master)
        host, device = update, 0
    traffic = up + down + host + (2 * record if on_disk else 0)
    seconds = Work(
        up=up / rates.up,
        down=down / rates.down,
        host=host / rates.host,
        device=device / rates.device,
        disk=disk,
        memory=traffic / rates.memory,
        leaving=grads / rates.down if by == "host" else 0.0,
    )
    staged = (seconds.up + seconds.down + seconds.host + seconds.device) / NUM_STAGES
    if by == "device_stream":
        stages = Work(device_stages=staged, disk_stages=(staged + disk / NUM_STAGES) * on_disk)
    else:
        stages = Work(host_stages=staged * (not early), disk_stages=(seconds.host + disk) / NUM_STAGES * on_disk)
    return seconds + stages


def _total(
    engines: Sequence[BucketEngine],
    numels: Sequence[int],
    targets: Sequence[str],
    element: ElementBytes,
    rates: Bandwidths,
    early: bool,
) -> tuple[Work, float]:
    """Return the seconds of all buckets' updates per resource, and the longest start-up of the update pipeline.

    The start-up is the seconds that one bucket takes on all resources but its slowest.
    """
    own = [
        work(by, target == "disk", numel, element, rates, early)
        for by, numel, target in zip(engines, numels, targets, strict=True)
    ]
    return sum(own, Work()), max((each.filling for each in own), default=0.0)


def predict(
    engines: Sequence[BucketEngine],
    numels: Sequence[int],
    targets: Sequence[str],
    element: ElementBytes,
    rates: Bandwidths,
    passes: Passes = Passes(),
) -> float:
    """Return the predicted seconds of a step in which these engines update the buckets."""
    return _seconds(*_total(engines, numels, targets, element, rates, passes.early), passes)


def _seconds(total: Work, filling: float, passes: Passes) -> float:
    if passes.early:
        return max(passes.forward + passes.backward, total.longest) + filling
    if passes.leaving:
        overlapped = min(passes.backward, total.leaving)
        stages = total.host_stages - total.leaving / NUM_STAGES  # these gradients have separate memory
        down, leaving = total.down - overlapped, total.leaving - overlapped
        total = replace(total, down=down, leaving=leaving, host_stages=stages)
    return passes.backward + max(passes.forward, total.longest) + filling


def choose(
    engine: str,
    numels: Sequence[int],
    targets: Sequence[str],
    element: ElementBytes,
    rates: Bandwidths,
    passes: Passes = Passes(),
) -> list[BucketEngine]:
    """Choose the engine that updates each bucket.

    `engine`: the setting optimizer.engine; "auto" takes the setting with the shortest predicted step.
    """
    if engine == "auto":
        seconds = predictions(numels, targets, element, rates, passes)
        engine = min(ENGINES, key=seconds.__getitem__)
    if engine != "split":
        return _shared(numels, targets, 1.0 if engine == "host" else 0.0)
    candidates = [_shared(numels, targets, number / SHARES) for number in reversed(range(1, SHARES))]
    both = [engines for engines in candidates if {"host", "device_stream"} <= set(engines)]

    def cost(engines: Sequence[BucketEngine]) -> tuple[float, float]:
        # If the passes hide all work of several candidates, the one with the least work wins.
        total, filling = _total(engines, numels, targets, element, rates, passes.early)
        return _seconds(total, filling, passes), total.longest

    return min(both or candidates, key=cost)


def predictions(
    numels: Sequence[int], targets: Sequence[str], element: ElementBytes, rates: Bandwidths, passes: Passes = Passes()
) -> Mapping[Engine, float]:
    """Return the predicted seconds of a step for each setting of optimizer.engine."""
    rest = numels, targets, element, rates, passes
    return {engine: predict(choose(engine, *rest), *rest) for engine in ENGINES}


def _shared(numels: Sequence[int], targets: Sequence[str], share: float) -> list[BucketEngine]:
    """Choose engines such that the host updates at least `share` of the offloaded elements.

    The host's buckets are spread over the order of use, so that link and host work at the same time. The first bucket
    is always the host's: streaming its state takes longer than the copies of a host update.
    """
    engines: list[BucketEngine] = []
    seen = streamed = 0
    for numel, target in zip(numels, targets, strict=True):
        if target == "device":
            engines.append("device")
            continue
        seen += numel
        streams = streamed + numel <= (1 - share) * seen
        streamed += numel * streams
        engines.append("device_stream" if streams else "host")
    return engines
