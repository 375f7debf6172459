"""Which buckets of optimizer state the device updates and which the host, and how long a step then takes: pure
functions of sizes and measured rates.

The work of a step is counted by what does it: each direction of the link, the host's update, the device's, the disk,
the host's memory. What has most to do decides, beside the passes; a bucket must pass through all of it, so that the
others' time for one bucket is added (filling). See docs/decisions/engines.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Literal

from optim.arrangement.arrange import GRAD_BYTES, NUM_SLOTS, Arrangement, Way

Engine = Literal["device_stream", "host", "split"]
ENGINES: tuple[Engine, ...] = ("device_stream", "host", "split")
SHARES = 64  # into how many parts `split` cuts the elements at most


@dataclass(frozen=True)
class Bandwidths:
    """Bytes per second, each measured alone."""

    up: float  # the link to the device
    down: float  # and from it
    host: float  # the host's update: what it reads and writes
    device: float  # the device's
    read: float = math.inf  # the disk
    write: float = math.inf
    memory: float = math.inf  # the host's memory, whoever reads and writes it


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
    """What an update may hide behind. early: it runs beside both passes, else beside the forward pass alone, where
    `leaving` but for the gradients' way to the host."""

    forward: float = 0.0  # seconds
    backward: float = 0.0
    early: bool = False
    leaving: bool = False


@dataclass(frozen=True)
class Work:
    """Seconds of one bucket, or of all, by what does it; then the time in its slots, by the number of these."""

    up: float = 0.0
    down: float = 0.0
    host: float = 0.0
    device: float = 0.0
    disk: float = 0.0  # it reads or writes
    memory: float = 0.0
    leaving: float = 0.0  # the part of `down` that is gradients
    device_slots: float = 0.0
    stages: float = 0.0  # of gradients and weights on the host
    disk_slots: float = 0.0  # of records on the host

    def __add__(self, other: Work) -> Work:
        return Work(  # written out: a search adds up millions
            self.up + other.up,
            self.down + other.down,
            self.host + other.host,
            self.device + other.device,
            self.disk + other.disk,
            self.memory + other.memory,
            self.leaving + other.leaving,
            self.device_slots + other.device_slots,
            self.stages + other.stages,
            self.disk_slots + other.disk_slots,
        )

    @property
    def longest(self) -> float:
        return max(getattr(self, part.name) for part in fields(self))

    @property
    def filling(self) -> float:
        """What else a bucket passes through beside what takes longest."""
        stages = (self.up, self.down, self.host, self.device, self.disk)
        return sum(stages) - max(stages)


@lru_cache(maxsize=2**14)
def work(way: Way, on_disk: bool, numel: int, element: ElementBytes, rates: Bandwidths, early: bool = False) -> Work:
    """Seconds of one bucket in one step, by what is at work."""
    record, weights, grads = numel * element.record, numel * element.weight, numel * GRAD_BYTES
    update = 2 * record + grads + weights
    if way == "device":
        return Work(device=update / rates.device)
    disk = record / rates.read + record / rates.write if on_disk else 0.0
    if way == "device_stream":
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
        leaving=grads / rates.down if way == "host" else 0.0,
    )
    under_way = (seconds.up + seconds.down + seconds.host + seconds.device) / NUM_SLOTS
    if way == "device_stream":
        slots = Work(device_slots=under_way, disk_slots=(under_way + disk / NUM_SLOTS) * on_disk)
    else:
        slots = Work(stages=under_way * (not early), disk_slots=(seconds.host + disk) / NUM_SLOTS * on_disk)
    return seconds + slots


def _total(
    ways: Sequence[Way],
    numels: Sequence[int],
    tiers: Sequence[str],
    element: ElementBytes,
    rates: Bandwidths,
    early: bool,
) -> tuple[Work, float]:
    """(of all buckets that go these ways, the longest filling of one in seconds)."""
    own = [
        work(way, tier == "disk", numel, element, rates, early)
        for way, numel, tier in zip(ways, numels, tiers, strict=True)
    ]
    return sum(own, Work()), max((each.filling for each in own), default=0.0)


def predict(
    ways: Sequence[Way],
    numels: Sequence[int],
    tiers: Sequence[str],
    element: ElementBytes,
    rates: Bandwidths,
    passes: Passes = Passes(),
) -> float:
    """Seconds of a step whose buckets go these ways."""
    return _seconds(*_total(ways, numels, tiers, element, rates, passes.early), passes)


def _seconds(total: Work, filling: float, passes: Passes) -> float:
    if passes.early:
        return max(passes.forward + passes.backward, total.longest) + filling
    if passes.leaving:
        gone = min(passes.backward, total.leaving)
        stages = total.stages - total.leaving / NUM_SLOTS  # whose gradients have memory of their own
        total = replace(total, down=total.down - gone, leaving=total.leaving - gone, stages=stages)
    return passes.backward + max(passes.forward, total.longest) + filling


def choose(
    engine: str,
    numels: Sequence[int],
    tiers: Sequence[str],
    element: ElementBytes,
    rates: Bandwidths,
    passes: Passes = Passes(),
) -> list[Way]:
    """The way of each bucket, which come in the order of first use; auto is the engine with the shortest step."""
    if engine == "auto":
        seconds = predictions(numels, tiers, element, rates, passes)
        engine = min(ENGINES, key=seconds.__getitem__)
    if engine != "split":
        return _shared(numels, tiers, 1.0 if engine == "host" else 0.0)
    tried = [_shared(numels, tiers, part / SHARES) for part in reversed(range(1, SHARES))]
    both = [ways for ways in tried if {"host", "device_stream"} <= set(ways)]

    def cost(ways: Sequence[Way]) -> tuple[float, float]:
        # What hides behind the passes anyway is best as short as can be.
        total, filling = _total(ways, numels, tiers, element, rates, passes.early)
        return _seconds(total, filling, passes), total.longest

    return min(both or tried, key=cost)


def predictions(
    numels: Sequence[int], tiers: Sequence[str], element: ElementBytes, rates: Bandwidths, passes: Passes = Passes()
) -> Mapping[Engine, float]:
    """Seconds of a step with each engine."""
    return {
        engine: predict(choose(engine, numels, tiers, element, rates, passes), numels, tiers, element, rates, passes)
        for engine in ENGINES
    }


def _shared(numels: Sequence[int], tiers: Sequence[str], share: float) -> list[Way]:
    """The host updates at least this share of the elements off the device. All along the order, so that neither the
    link nor the host waits for the other's buckets, the host first: a record takes longer to come and go than what the
    host's updates move, and what is used last has the most time."""
    ways: list[Way] = []
    seen = streamed = 0
    for numel, tier in zip(numels, tiers, strict=True):
        if tier == "device":
            ways.append("device")
            continue
        seen += numel
        streams = streamed + numel <= (1 - share) * seen
        streamed += numel * streams
        ways.append("device_stream" if streams else "host")
    return ways
