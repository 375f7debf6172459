"""Where an optimizer's buckets lie, by which way they are updated, and what memory that takes. Pure, and without torch:
a run allocates by it, and its plan counts by it.

A record is a bucket's state: `bytes_per_element` of it for each of its parameters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from configs import derived
from configs.schema import Config
from memory.host_memory import padded

Tier = Literal["device", "host", "disk"]
# where a bucket is updated; device: in place; record: on the host, where its weights and gradient lie too
Way = Literal["device", "device_stream", "host", "record"]

NUM_SLOTS = 2  # that records, or gradients and weights, pass through, at most
GRAD_BYTES = 4  # of a parameter's gradient, which is in fp32


@dataclass(frozen=True)
class Slots:
    """Memory that buckets pass through one after the other: as many slots, each for the largest bucket."""

    number: int
    size: int

    @classmethod
    def of(cls, sizes: Sequence[int]) -> Slots:
        """For buckets of these sizes. Never more than these take together."""
        largest = max(sizes, default=0)
        return cls(min(NUM_SLOTS, sum(sizes) // largest), largest) if largest else cls(0, 0)

    @property
    def total(self) -> int:
        return self.number * self.size


@dataclass(frozen=True)
class Arrangement:
    """Buckets in the order of first use in the forward pass, one entry each."""

    numels: Sequence[int]
    bytes_per_element: int  # of a record
    weight_bytes: int  # of a parameter of the model
    tiers: Sequence[Tier]
    ways: Sequence[Way]
    leaving: Sequence[bool]  # its gradient goes to memory of its own on the host during the backward pass
    early: Sequence[bool]  # it may be updated then: it has a shadow
    flexible: bool = False  # the ways may change: there is memory for both

    @property
    def new_weights(self) -> list[bool]:
        """Whether a bucket has memory for its new weights on the host: it may be updated early, and they return."""
        return [early and way != "record" for early, way in zip(self.early, self.ways, strict=True)]

    @property
    def sizes(self) -> list[int]:
        """Bytes of each record."""
        return [numel * self.bytes_per_element for numel in self.numels]

    def slots(self, way: Way) -> Slots:
        """Through which the buckets pass that go this way, or may; sizes in parameters."""
        may = (of == way or (self.flexible and of not in ("device", "record")) for of in self.ways)
        return Slots.of([numel for numel, goes in zip(self.numels, may, strict=True) if goes])

    @property
    def disk_slots(self) -> Slots:
        """The host's slots for records of the disk; sizes in bytes, of whole blocks."""
        tiers = zip(self.sizes, self.tiers, strict=True)
        return Slots.of([padded(size) for size, tier in tiers if tier == "disk"])

    @property
    def device_bytes(self) -> int:
        """Residents, and slots for the records that come by."""
        residents = sum(size for size, tier in zip(self.sizes, self.tiers, strict=True) if tier == "device")
        each = self.bytes_per_element + (self.weight_bytes if any(self.new_weights) else 0)
        return residents + self.slots("device_stream").total * each

    @property
    def saved(self) -> int:
        """Bytes of the device that it has free because state lies elsewhere."""
        return sum(self.sizes) - self.device_bytes

    @property
    def host_parts(self) -> dict[str, int]:
        """Bytes on the host by what they are for."""
        on_host = [tier == "host" for tier in self.tiers]
        return {
            "optimizer state": sum(padded(size) for size, here in zip(self.sizes, on_host, strict=True) if here),
            "optimizer shadows": sum(
                padded(size)
                for size, here, early in zip(self.sizes, on_host, self.early, strict=True)
                if here and early
            ),
            "optimizer staging": self.disk_slots.total
            + self.slots("host").total * (GRAD_BYTES + self.weight_bytes)
            + padded(max(self.sizes, default=0)),
            "gradients": sum(GRAD_BYTES * n for n, leaves in zip(self.numels, self.leaving, strict=True) if leaves),
            "new weights": sum(
                self.weight_bytes * n for n, come in zip(self.numels, self.new_weights, strict=True) if come
            ),
        }

    @property
    def host_bytes(self) -> int:
        return sum(self.host_parts.values())

    @property
    def disk_bytes(self) -> int:
        """Bytes of the file: records, then shadows."""
        on_disk = [tier == "disk" for tier in self.tiers]
        return sum(
            padded(size) * (1 + early)
            for size, here, early in zip(self.sizes, on_disk, self.early, strict=True)
            if here
        )

    @property
    def early_share(self) -> float:
        """The share of the parameters whose gradient can leave, or be used, during the backward pass."""
        total = sum(self.numels)
        some = zip(self.numels, self.leaving, self.early, self.ways, strict=True)
        return sum(n for n, *may, way in some if any(may) or way == "record") / total if total else 0.0


@dataclass(frozen=True)
class TierRequest:
    """Buckets in the order of first use, and what a config asks for them."""

    numels: Sequence[int]
    late: Sequence[bool]  # its gradient is not final when DDP has reduced it
    bytes_per_element: int
    weight_bytes: int
    state_device: str  # device, host, disk, auto
    engine: str  # auto, device_stream, host, split
    overlaps: bool  # DDP reduces gradients during the backward pass, and not after it
    early_update: str  # auto, always, never
    off_device: Sequence[bool] = ()  # its weights and gradient lie off the device; (): those of none


def tier_request(
    config: Config, numels: Sequence[int], late: Sequence[bool], off_device: Sequence[bool] = ()
) -> TierRequest:
    """What a config asks for these buckets."""
    settings, weight_bytes = config.optimizer, derived.element_size(config)
    moments = 4 + (4 if settings.moment_dtype == "fp32" else 2)
    return TierRequest(
        numels=numels,
        late=late,
        bytes_per_element=moments + (4 if weight_bytes < 4 else 0),
        weight_bytes=weight_bytes,
        state_device=settings.state_device,
        engine=settings.engine,
        overlaps=config.parallel.overlap_grad_reduce,
        early_update=settings.early_update,
        off_device=off_device,
    )


@dataclass(frozen=True)
class Capacity:
    """Bytes that each tier has left."""

    device: float = math.inf
    host: float = math.inf
    disk: float = math.inf

    def hold(self, found: Arrangement) -> bool:
        """Whether an arrangement fits."""
        return found.device_bytes <= self.device and found.host_bytes <= self.host and found.disk_bytes <= self.disk


def arrange(request: TierRequest, rooms: Capacity) -> Arrangement | None:
    """Early updates, and gradients that leave early, where they may and there is room; None where the state does not
    fit without them. No record goes to a slower tier to make it.

    state_device=auto fills the device, then the host, then the disk, with whole buckets: those used last go first.
    """
    early, leaves = request.overlaps and request.early_update != "never", request.overlaps
    choices = [(early, leaves), (False, leaves), (False, False)]
    if request.early_update == "always":
        choices = choices[:1]
    fitting = [found for choice in choices if (found := _arranged(request, rooms, *choice)) is not None]
    return max(fitting, key=lambda found: [found.tiers.count(tier) for tier in ("device", "host")], default=None)


def least(request: TierRequest) -> Arrangement:
    """What the config asks for in the least memory: what is refused without it. auto: all on the host."""
    early = request.early_update == "always"
    tier = "host" if request.state_device == "auto" else request.state_device
    return _with_tiers(request, [tier] * len(request.numels), early, early)  # type: ignore[list-item]


def _arranged(request: TierRequest, rooms: Capacity, early: bool, leaves: bool) -> Arrangement | None:
    count, tier = len(request.numels), request.state_device
    if tier != "auto":
        found = _with_tiers(request, [tier] * count, early, leaves)  # type: ignore[list-item]
        return found if rooms.hold(found) else None
    # What a tier holds beside its records depends on which these are: as many as leave room for it, the fast tier
    # first.
    on_device = count
    while on_device and _filled(request, on_device, count, early, leaves).device_bytes > rooms.device:
        on_device -= 1
    for on_host in range(count, on_device - 1, -1):
        found = _filled(request, on_device, on_host, early, leaves)
        if rooms.hold(found):
            return found
    return None


def _filled(request: TierRequest, on_device: int, until_host: int, early: bool, leaves: bool) -> Arrangement:
    count = len(request.numels)
    tiers: list[Tier] = ["device"] * on_device
    tiers += ["host"] * (until_host - on_device)
    tiers += ["disk"] * (count - until_host)
    return _with_tiers(request, tiers, early, leaves)


def _with_tiers(request: TierRequest, tiers: Sequence[Tier], early: bool, leaves: bool) -> Arrangement:
    way: Way = "host" if request.engine == "host" else "device_stream"
    may = [tier != "device" and not late for tier, late in zip(tiers, request.late, strict=True)]
    off = request.off_device or [False] * len(tiers)
    # The shadows of what lies off the device are large: it has them where they were asked for.
    of_records = [is_off and request.early_update == "always" for is_off in off]
    ways: list[Way] = ["device" if tier == "device" else way for tier in tiers]
    return Arrangement(
        request.numels,
        request.bytes_per_element,
        request.weight_bytes,
        tiers,
        ["record" if is_off else way for way, is_off in zip(ways, off, strict=True)],
        [leaves and each and request.engine != "device_stream" for each in may],
        [early and (each or always) for each, always in zip(may, of_records, strict=True)],
        request.engine in ("auto", "split"),
    )
