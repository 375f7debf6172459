"""Which engine updates each bucket of optimizer state, device or host, and how long a step then takes: pure functions
of sizes and measured rates.

The work of a step is counted per resource: each direction of the link, the host's update, the device's update, the
disk, the host's memory. The busiest resource decides, while the passes run; a bucket must pass through all resources,
so the other resources' time for one bucket is added (filling). See docs/decisions/optimizer-update-engines.md.
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
SHARES = 64  # the shares of the elements that `split` tries for the host are multiples of 1 / SHARES


@dataclass(frozen=True)
class Bandwidths:
    """Bytes per second, each measured alone."""

    up: float  # the link to the device
    down: float  # the link from the device
    host: float  # read and written by the host's update
    device: float  # read and written by the device's update
    read: float = math.inf  # the disk
    write: float = math.inf
    memory: float = math.inf  # the host's memory, over all readers and writers


@dataclass(frozen=True)
class ElementBytes:
    """Bytes of an element: its record of state, and its weight, which is its own master where the record has none."""

    record: int
    weight: int
    has_master: bool

    @classmethod
    def of(cls, arrangement: Arrangement) -> ElementBytes:
        """Bytes of an element of its buckets: weights in half precision have a master."""
        return cls(arrangement.bytes_per_element, arrangement.weight_bytes, arrangement.weight_bytes < 4)


@dataclass(frozen=True)
class Passes:
    """The passes that an update overlaps with: with `early` both, otherwise the forward pass alone, with `leaving`
    except for the gradients' copies to the host."""

    forward: float = 0.0  # seconds
    backward: float = 0.0
    early: bool = False
    leaving: bool = False


@dataclass(frozen=True)
class Work:
    """Seconds of one bucket, or of all, per resource; then the seconds in each kind of stage, divided by its number of
    stages."""

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
        return Work(  # written out: a search adds up millions
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
        """Seconds of a bucket on all resources but the slowest one."""
        resources = (self.up, self.down, self.host, self.device, self.disk)
        return sum(resources) - max(resources)


@lru_cache(maxsize=2**14)
def work(
    by: BucketEngine, on_disk: bool, numel: int, element: ElementBytes, rates: Bandwidths, early: bool = False
) -> Work:
    """Return the seconds of one bucket in one step, per resource; `by`: the engine that updates it."""
    record, weights, grads = numel * element.record, numel * element.weight, numel * GRAD_BYTES
    update = 2 * record + grads + weights
    if by == "device":
        return Work(device=update / rates.device)
    disk = record / rates.read + record / rates.write if on_disk else 0.0
    if by == "device_stream":
        up, down = record + weights * early, record + weights * early  # new weights wait on the host for the norm
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
    """Return (the work of all buckets with these engines, the longest filling of one bucket in seconds)."""
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
    """Return the seconds of a step whose buckets are updated by these engines."""
    return _seconds(*_total(engines, numels, targets, element, rates, passes.early), passes)


def _seconds(total: Work, filling: float, passes: Passes) -> float:
    if passes.early:
        return max(passes.forward + passes.backward, total.longest) + filling
    if passes.leaving:
        overlapped = min(passes.backward, total.leaving)
        stages = total.host_stages - total.leaving / NUM_STAGES  # these gradients have memory of their own
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
    """Choose the engine of each bucket, in the order of first use; auto: the setting with the shortest step."""
    if engine == "auto":
        seconds = predictions(numels, targets, element, rates, passes)
        engine = min(ENGINES, key=seconds.__getitem__)
    if engine != "split":
        return _shared(numels, targets, 1.0 if engine == "host" else 0.0)
    candidates = [_shared(numels, targets, number / SHARES) for number in reversed(range(1, SHARES))]
    both = [engines for engines in candidates if {"host", "device_stream"} <= set(engines)]

    def cost(engines: Sequence[BucketEngine]) -> tuple[float, float]:
        # Of those whose work the passes hide, the one with the least work.
        total, filling = _total(engines, numels, targets, element, rates, passes.early)
        return _seconds(total, filling, passes), total.longest

    return min(both or candidates, key=cost)


def predictions(
    numels: Sequence[int], targets: Sequence[str], element: ElementBytes, rates: Bandwidths, passes: Passes = Passes()
) -> Mapping[Engine, float]:
    """Return the seconds of a step with each setting of the engine."""
    rest = numels, targets, element, rates, passes
    return {engine: predict(choose(engine, *rest), *rest) for engine in ENGINES}


def _shared(numels: Sequence[int], targets: Sequence[str], share: float) -> list[BucketEngine]:
    """Have the host update at least this share of the elements off the device.

    Its buckets are spread over the order, so that neither the link nor the host waits for the other's buckets, and it
    gets the first one: streaming a record takes longer than the copies of a host's update, and the bucket that is used
    last has the most time.
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
