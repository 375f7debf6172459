"""Buckets of optimizer state: how parameters are cut into them, where each is stored and updated, and their memory.

A bucket is a run of slices of a rank's parameters. Its record is its optimizer state, which is copied between device,
host and disk as a whole. Pure functions without torch.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from configs import derived
from configs.schema import Config
from memory.host_memory import padded

# A slice is cut only at multiples of this number of elements from its start: the vectorised update kernel computes
# other bits if a cut changes how many elements remain for its last vector.
CUT = 4096
# The largest share of a rank's state in one bucket, so that two buffers for the largest bucket take little memory.
MOST = 1 / 8
NUM_STAGES = 2  # the most buffers of a kind: for records, or for gradients and weights
GRAD_BYTES = 4  # of a parameter's gradient, in fp32

Target = Literal["device", "host", "disk"]  # where a record is stored
# How a bucket is updated: device: in place; device_stream: streamed through the device; host: on the host;
# record: on the host, where its weights and gradient are stored, too
BucketEngine = Literal["device", "device_stream", "host", "record"]


class Slice(Protocol):
    """Elements [start, end) of a parameter whose optimizer state a rank owns, as a protocol."""

    @property
    def start(self) -> int: ...

    @property
    def end(self) -> int: ...

    @property
    def bucket_key(self) -> Hashable: ...

    @property
    def reduced_at_step_end(self) -> bool: ...

    @property
    def order(self) -> int: ...


@dataclass(frozen=True)
class SliceSpan:
    """Elements [start, end) of a parameter, which a bucket stores from its element `offset` on.

    `index`: of the parameter's slice among the slices of the rank.
    """

    index: int
    start: int
    end: int
    offset: int


@dataclass(frozen=True)
class Bucket:
    """A run of parameter slices whose optimizer state is stored and updated together.

    `order`: position by first use in a pass. For offloaded experts, `expert_bucket` is (MoE layer on this rank, number
    of the bucket in the layer's shard), and `run_numel` is the length of the run with the padding between its spans.
    """

    slice_spans: tuple[SliceSpan, ...]
    reduced_at_step_end: bool
    order: int
    expert_bucket: tuple[int, int] | None = None
    run_numel: int | None = None

    @property
    def numel(self) -> int:
        return self.run_numel if self.run_numel is not None else sum(span.end - span.start for span in self.slice_spans)


def cut(slices: Sequence[Slice], limit: int) -> list[Bucket]:
    """Cut slices of parameters into buckets, sorted by first use.

    A bucket has at most `limit` elements, rounded down to a multiple of CUT (4096), or CUT elements if that is 0.
    """
    limit = max(limit // CUT, 1) * CUT
    runs: dict[Hashable, list[int]] = {}
    for index, owned in enumerate(slices):
        runs.setdefault((owned.bucket_key, owned.reduced_at_step_end), []).append(index)
    buckets = []
    for run in runs.values():
        spans: list[SliceSpan] = []
        for index, start in ((i, start) for i in run for start in range(slices[i].start, slices[i].end, limit)):
            end = min(start + limit, slices[index].end)
            filled = spans[-1].offset + spans[-1].end - spans[-1].start if spans else 0
            if filled + end - start > limit:
                buckets.append(_bucket(slices, spans))
                spans, filled = [], 0
            spans.append(SliceSpan(index, start, end, filled))
        buckets.append(_bucket(slices, spans))
    return sorted(buckets, key=lambda bucket: bucket.order)


def largest(slices: Sequence[Slice], bucket_parameters: int) -> int:
    """Return the most elements that a bucket may have: `bucket_parameters`, or an eighth of the rank's if fewer."""
    return min(bucket_parameters, int(MOST * sum(owned.end - owned.start for owned in slices)))


def _bucket(slices: Sequence[Slice], spans: list[SliceSpan]) -> Bucket:
    at_end = slices[spans[0].index].reduced_at_step_end
    return Bucket(tuple(spans), at_end, min(slices[span.index].order for span in spans))


@dataclass(frozen=True)
class Staging:
    """Reused buffers that buckets pass through one at a time: `number` buffers, each as large as the largest bucket."""

    number: int
    size: int

    @classmethod
    def of(cls, sizes: Sequence[int]) -> Staging:
        """Return reused buffers for buckets of these sizes; together they are never larger than the buckets."""
        largest = max(sizes, default=0)
        return cls(min(NUM_STAGES, sum(sizes) // largest), largest) if largest else cls(0, 0)

    @property
    def total(self) -> int:
        return self.number * self.size


@dataclass(frozen=True)
class Arrangement:
    """Storage of each bucket of optimizer state, and the engine that updates it. Buckets are sorted by first use."""

    numels: Sequence[int]
    bytes_per_element: int  # of a record
    weight_bytes: int  # of a parameter of the model
    targets: Sequence[Target]
    engines: Sequence[BucketEngine]
    leaving: Sequence[bool]  # whether a bucket's gradient is copied to the host during the backward pass
    early: Sequence[bool]  # whether a bucket may be updated during the backward pass, which needs a shadow
    flexible: bool = False  # whether engines may change later: there is memory for device_stream and host

    @property
    def new_weights(self) -> list[bool]:
        """For each bucket, whether it has host memory for the new weights of an update during the backward pass."""
        return [early and engine != "record" for early, engine in zip(self.early, self.engines, strict=True)]

    @property
    def sizes(self) -> list[int]:
        """Bytes of optimizer state of each bucket."""
        return [numel * self.bytes_per_element for numel in self.numels]

    def staging(self, engine: BucketEngine) -> Staging:
        """Return the reused buffers for the buckets that this engine updates or may update; sizes in elements."""
        may = (own == engine or (self.flexible and own not in ("device", "record")) for own in self.engines)
        return Staging.of([numel for numel, passes in zip(self.numels, may, strict=True) if passes])

    @property
    def disk_staging(self) -> Staging:
        """Host buffers for reading and writing optimizer state on the disk; sizes in bytes of whole disk blocks."""
        targets = zip(self.sizes, self.targets, strict=True)
        return Staging.of([padded(size) for size, target in targets if target == "disk"])

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory: optimizer state stored there, and buffers through which other state is streamed."""
        residents = sum(size for size, target in zip(self.sizes, self.targets, strict=True) if target == "device")
        each = self.bytes_per_element + (self.weight_bytes if any(self.new_weights) else 0)
        return residents + self.staging("device_stream").total * each

    @property
    def saved(self) -> int:
        """Bytes of device memory that are saved because optimizer state is stored elsewhere."""
        return sum(self.sizes) - self.device_bytes

    @property
    def host_bytes_by_purpose(self) -> dict[str, int]:
        """Bytes of host memory, as a dict from purpose to bytes."""
        records = zip(self.sizes, self.targets, self.early, strict=True)
        on_host = [(padded(size), early) for size, target, early in records if target == "host"]
        return {
            "optimizer state": sum(size for size, _ in on_host),
            "optimizer shadows": sum(size for size, early in on_host if early),
            "optimizer staging": self.disk_staging.total
            + self.staging("host").total * (GRAD_BYTES + self.weight_bytes)
            + padded(max(self.sizes, default=0)),
            "gradients": sum(GRAD_BYTES * n for n, leaves in zip(self.numels, self.leaving, strict=True) if leaves),
            "new weights": sum(
                self.weight_bytes * n for n, new in zip(self.numels, self.new_weights, strict=True) if new
            ),
        }

    @property
    def host_bytes(self) -> int:
        return sum(self.host_bytes_by_purpose.values())

    @property
    def disk_bytes(self) -> int:
        """Bytes of the scratch file on the disk.

        It has the optimizer state, and second copies (shadows) for updates during the backward pass.
        """
        records = zip(self.sizes, self.targets, self.early, strict=True)
        return sum(padded(size) * (1 + early) for size, target, early in records if target == "disk")

    @property
    def early_share(self) -> float:
        """Share of the parameters whose gradients can be copied to the host or used during the backward pass."""
        total = sum(self.numels)
        some = zip(self.numels, self.leaving, self.early, self.engines, strict=True)
        return sum(n for n, *may, engine in some if any(may) or engine == "record") / total if total else 0.0


@dataclass(frozen=True)
class ArrangementRequest:
    """The buckets of optimizer state to store, sorted by first use in the forward pass, and the config's settings.

    `arrange` chooses where each is stored and updated.
    """

    numels: Sequence[int]
    reduced_at_step_end: Sequence[bool]  # whether a bucket's gradient is not final when DDP has reduced it
    bytes_per_element: int
    weight_bytes: int
    state_device: str  # device, host, disk, auto
    engine: str  # auto, device_stream, host, split
    overlaps: bool  # whether DDP reduces gradients during the backward pass instead of after it
    early_update: str  # auto, always, never
    is_offloaded: Sequence[bool] = ()  # whether a bucket's weights and gradient are offloaded; (): none


def state_bytes_per_weight(config: Config) -> int:
    """Return the bytes of optimizer state per parameter: two moments and, in half precision, a master weight."""
    moments = 4 + (4 if config.optimizer.moment_dtype == "fp32" else 2)
    return moments + (4 if derived.element_size(config) < 4 else 0)


def arrangement_request(
    config: Config, numels: Sequence[int], reduced_at_step_end: Sequence[bool], is_offloaded: Sequence[bool] = ()
) -> ArrangementRequest:
    """Return the buckets, of `numels` elements each, to store on device, host or disk, with the config's settings."""
    settings = config.optimizer
    return ArrangementRequest(
        numels=numels,
        reduced_at_step_end=reduced_at_step_end,
        bytes_per_element=state_bytes_per_weight(config),
        weight_bytes=derived.element_size(config),
        state_device=settings.state_device,
        engine=settings.engine,
        overlaps=config.parallel.overlap_grad_reduce,
        early_update=settings.early_update,
        is_offloaded=is_offloaded,
    )


@dataclass(frozen=True)
class Capacity:
    """Bytes that are available for optimizer state on the device, on the host and on the disk."""

    device: float = math.inf
    host: float = math.inf
    disk: float = math.inf

    def fits(self, found: Arrangement) -> bool:
        """Whether an arrangement needs no more bytes than there are on device, host and disk."""
        return found.device_bytes <= self.device and found.host_bytes <= self.host and found.disk_bytes <= self.disk


def arrange(request: ArrangementRequest, capacity: Capacity) -> Arrangement | None:
    """Choose where each bucket of optimizer state is stored and updated; return None if the state does not fit.

    Updates and gradient copies start during the backward pass if the config allows it and the memory that this needs
    moves no bucket to a slower target. With state_device=auto, whole buckets in the order of first use fill device,
    host, disk.
    """
    early, leaves = request.overlaps and request.early_update != "never", request.overlaps
    choices = [(early, leaves), (False, leaves), (False, False)]
    if request.early_update == "always":
        choices = choices[:1]
    fitting = [found for choice in choices if (found := _arranged(request, capacity, *choice)) is not None]
    return max(fitting, key=lambda found: [found.targets.count(target) for target in ("device", "host")], default=None)


def least(request: ArrangementRequest) -> Arrangement:
    """Return the arrangement of buckets that needs the least memory, for errors. state_device=auto: all on the host."""
    early = request.early_update == "always"
    target = "host" if request.state_device == "auto" else request.state_device
    return _with_targets(request, [target] * len(request.numels), early, early)  # type: ignore[list-item]


def _arranged(request: ArrangementRequest, capacity: Capacity, early: bool, leaves: bool) -> Arrangement | None:
    count, target = len(request.numels), request.state_device
    if target != "auto":
        found = _with_targets(request, [target] * count, early, leaves)  # type: ignore[list-item]
        return found if capacity.fits(found) else None
    # Buffers of a target depend on which records it stores, so try from most to fewest records on the faster target.
    on_device = count
    while on_device and _filled(request, on_device, count, early, leaves).device_bytes > capacity.device:
        on_device -= 1
    for on_host in range(count, on_device - 1, -1):
        found = _filled(request, on_device, on_host, early, leaves)
        if capacity.fits(found):
            return found
    return None


def _filled(request: ArrangementRequest, on_device: int, until_host: int, early: bool, leaves: bool) -> Arrangement:
    count = len(request.numels)
    targets: list[Target] = ["device"] * on_device
    targets += ["host"] * (until_host - on_device)
    targets += ["disk"] * (count - until_host)
    return _with_targets(request, targets, early, leaves)


def _with_targets(request: ArrangementRequest, targets: Sequence[Target], early: bool, leaves: bool) -> Arrangement:
    engine: BucketEngine = "host" if request.engine == "host" else "device_stream"
    may = [t != "device" and not at_end for t, at_end in zip(targets, request.reduced_at_step_end, strict=True)]
    offloaded = request.is_offloaded or [False] * len(targets)
    # Shadows of offloaded experts are large: they exist only if the config demands early updates.
    shadowed = [is_offloaded and request.early_update == "always" for is_offloaded in offloaded]
    engines: list[BucketEngine] = ["device" if target == "device" else engine for target in targets]
    return Arrangement(
        request.numels,
        request.bytes_per_element,
        request.weight_bytes,
        targets,
        ["record" if is_offloaded else own for own, is_offloaded in zip(engines, offloaded, strict=True)],
        [leaves and each and request.engine != "device_stream" for each in may],
        [early and (each or always) for each, always in zip(may, shadowed, strict=True)],
        request.engine in ("auto", "split"),
    )
