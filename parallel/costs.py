"""What computation and communication cost here: models fitted to short measurements, and a cache of them on disk.

A planner that decides from these numbers must decide alike on all ranks, so every number ends up equal on all of them, bit by
bit: times are maxima over the ranks, and what is cached is what the group's first rank read or measured. A model is a straight
line (startup plus time per byte, as in PipeMoE, Shi et al., INFOCOM 2023) or, where small sizes are slower than a line says, a
piecewise linear curve. How much computation and communication slow each other down follows MPipeMoE (Zhang et al., IPDPS 2023).
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import platform
import statistics
import tempfile
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

VERSION = 2  # of what the cache's files hold: raise it when a measurement or a model changes its meaning
MIN_ROUNDS, MAX_ROUNDS = 3, 25  # how often each size is timed; the median counts
MAX_SLOWDOWN = 10.0  # more is a disturbed measurement
MAX_REPEATS = 64

logger = logging.getLogger(__name__)

Call = Callable[[], None]


# ---------------------------------------------------------------------------------------------------------------------
# Models
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """Seconds against a size: `alpha` + `beta` * size, and nothing for size 0 (nothing is started then)."""

    alpha: float
    beta: float
    r2: float = 1.0  # of the fit, on plain times

    def __call__(self, size: float) -> float:
        return self.alpha + self.beta * size if size > 0 else 0.0


@dataclass(frozen=True)
class Curve:
    """Seconds against a size, never falling: linear between the points, level before the first, on with the last slope.

    So it keeps the knee below which smaller work is no faster. With one point it is level everywhere.
    """

    sizes: tuple[float, ...]
    seconds: tuple[float, ...]

    def __call__(self, size: float) -> float:
        sizes, seconds = self.sizes, self.seconds
        if size <= sizes[0] or len(sizes) == 1:
            return seconds[0]
        i = min(bisect_left(sizes, size), len(sizes) - 1)
        slope = (seconds[i] - seconds[i - 1]) / (sizes[i] - sizes[i - 1])
        return seconds[i - 1] + slope * (size - sizes[i - 1])


NOTHING = Line(0.0, 0.0)


def fit_line(sizes: Sequence[float], seconds: Sequence[float]) -> Line:
    """Least squares with weights 1 / seconds^2 (every size counts alike), neither part negative. Raises ValueError without sizes."""
    if not sizes or len(sizes) != len(seconds):
        raise ValueError(f"a line is fitted to as many times as sizes, at least one; got {len(sizes)} sizes, {len(seconds)} times")
    weights = [1.0 / max(t, 1e-12) ** 2 for t in seconds]
    total = sum(weights)
    mean_size = sum(w * n for w, n in zip(weights, sizes, strict=True)) / total
    mean_time = sum(w * t for w, t in zip(weights, seconds, strict=True)) / total
    spread = sum(w * (n - mean_size) ** 2 for w, n in zip(weights, sizes, strict=True))
    together = sum(w * (n - mean_size) * (t - mean_time) for w, n, t in zip(weights, sizes, seconds, strict=True))
    beta = together / spread if spread > 0 else 0.0
    alpha = mean_time - beta * mean_size
    if beta <= 0:  # the best with no slope
        alpha, beta = mean_time, 0.0
    elif alpha < 0:  # the best through the origin
        products = sum(w * n * t for w, n, t in zip(weights, sizes, seconds, strict=True))
        alpha, beta = 0.0, products / sum(w * n * n for w, n in zip(weights, sizes, strict=True))
    plain_mean = statistics.fmean(seconds)
    variance = sum((t - plain_mean) ** 2 for t in seconds)
    errors = sum((alpha + beta * n - t) ** 2 for n, t in zip(sizes, seconds, strict=True))
    return Line(alpha, beta, 1.0 - errors / variance if variance > 0 else 1.0)


def fit_curve(sizes: Sequence[float], seconds: Sequence[float]) -> Curve:
    """A curve near measured points (positive sizes in rising order) on which time never falls with size, nor time per item rises.

    So a whole never costs more than its parts: what seems to be gained by computing in parts is a disturbance (or a cache that the
    parts of a layer do not find warm either), and must not look like a reason to cut. Neighbours that contradict this share their
    mean time per item. Raises ValueError for other sizes.
    """
    if not sizes or len(sizes) != len(seconds) or sizes[0] <= 0 or any(b <= a for a, b in zip(sizes, sizes[1:], strict=False)):
        raise ValueError(f"a curve needs as many times as sizes, at least one, the sizes rising; got {list(sizes)}, {len(seconds)} times")
    pools: list[tuple[float, int]] = []  # (time per item, points that share it), falling
    for size, time_of_size in zip(sizes, seconds, strict=True):
        rate, count = time_of_size / size, 1
        while pools and rate > pools[-1][0]:
            other, points = pools.pop()
            rate, count = (rate * count + other * points) / (count + points), count + points
        pools.append((rate, count))
    rates = [rate for rate, count in pools for _ in range(count)]
    return Curve(tuple(map(float, sizes)), tuple(accumulate((rate * size for rate, size in zip(rates, sizes, strict=True)), max)))


# ---------------------------------------------------------------------------------------------------------------------
# Measuring
# ---------------------------------------------------------------------------------------------------------------------


def _wait_for_device(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def agree(values: Sequence[float], device: torch.device, group: dist.ProcessGroup | None) -> list[float]:
    """The maxima over the ranks of `group` (None: this process alone)."""
    if group is None or group.size() == 1:
        return list(values)
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
    return tensor.tolist()


def time_call(call: Call, device: torch.device) -> float:
    """Seconds of one call, until the device is done with it."""
    _wait_for_device(device)
    start = time.perf_counter()
    call()
    _wait_for_device(device)
    return time.perf_counter() - start


def measure(
    make: Callable[[int], Call], sizes: Sequence[int], device: torch.device, group: dist.ProcessGroup | None, budget: float
) -> tuple[list[int], list[float]]:
    """Median seconds of `make(size)()` for rising sizes, each the slowest rank's.

    Sizes take turns, so that a disturbance hits all of them. Takes about `budget` seconds: sizes that would take longer are left
    out (two stay at least), and rounds end early. The calls may communicate: all ranks make the same ones.
    """
    begin = time.perf_counter()
    calls: list[Call] = []
    times: list[list[float]] = []
    for number, size in enumerate(sizes):
        call = make(size)
        time_call(call, device)  # the first one allocates and compiles
        seconds, spent = agree([time_call(call, device), time.perf_counter() - begin], device, group)
        calls.append(call)
        times.append([seconds])
        # The next size takes about as many times longer as it is larger, and will be called at least 1 + MIN_ROUNDS times.
        ahead = seconds * sizes[number + 1] / size * (1 + MIN_ROUNDS) if number + 1 < len(sizes) else 0.0
        if number >= 1 and spent + ahead > budget:
            break
    for _ in range(MAX_ROUNDS - 1):
        for call, of_size in zip(calls, times, strict=True):
            of_size.extend(agree([time_call(call, device)], device, group))
        (spent,) = agree([time.perf_counter() - begin], device, group)
        if len(times[0]) >= MIN_ROUNDS and spent > budget:
            break
    return list(sizes[: len(calls)]), [statistics.median(of_size) for of_size in times]


def measure_line(
    make: Callable[[int], Call], sizes: Sequence[int], device: torch.device, group: dist.ProcessGroup | None = None, budget: float = 2.0
) -> Line:
    """The line of what grows with a size: `make(size)` gives a call that moves, copies or computes so much; all ranks call it."""
    return fit_line(*measure(make, sizes, device, group, budget))


def measure_curve(
    make: Callable[[int], Call], sizes: Sequence[int], device: torch.device, group: dist.ProcessGroup | None = None, budget: float = 1.0
) -> Curve:
    """The curve of a computation: `make(size)` gives a call that computes on `size` items."""
    return fit_curve(*measure(make, sizes, device, group, budget))


def measure_copies(
    sizes: Sequence[int], device: torch.device, group: dist.ProcessGroup | None = None, budget: float = 0.5
) -> tuple[Line, Line]:
    """Lines over bytes of copies from the device to (pinned) host memory and back; on a host, of copying within its memory."""
    on_gpu = device.type == "cuda"
    near = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
    far = torch.zeros(max(sizes), dtype=torch.uint8, pin_memory=on_gpu)

    def copy(to: torch.Tensor, source: torch.Tensor) -> Callable[[int], Call]:
        def make(size: int) -> Call:
            return lambda: to[:size].copy_(source[:size], non_blocking=on_gpu)

        return make

    out, back = (measure(make, sizes, device, group, budget / 2) for make in (copy(far, near), copy(near, far)))
    return fit_line(*out), fit_line(*back)


def measure_slowdown(
    compute: Call,
    communicate: Callable[[], Callable[[], Any]],
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    budget: float = 1.0,
) -> tuple[float, float]:
    """How many times longer computation takes while communication runs, and communication while computation runs.

    `communicate` starts an exchange and returns what waits for it; all ranks call both in the same order. Exchanges are started
    until they outlast the computation; so its time beside them is slowed all along, and what is left of them afterwards, at full
    speed, tells how far they got meanwhile.
    """

    def exchange(count: int) -> None:
        for wait in [communicate() for _ in range(count)]:
            wait()

    def alone(call: Call) -> float:
        return statistics.median(agree([time_call(call, device)], device, group)[0] for _ in range(3))

    time_call(compute, device)
    time_call(communicate(), device)
    compute_seconds, exchange_seconds = alone(compute), alone(lambda: exchange(1))
    # Exchanges that take 1.5 to 3 times as long as all of the computation.
    num_computations = max(1, min(MAX_REPEATS, int(exchange_seconds / (3.0 * compute_seconds)) if compute_seconds > 0 else 1))
    num_exchanges = max(1, min(MAX_REPEATS, math.ceil(1.5 * num_computations * compute_seconds / max(exchange_seconds, 1e-9))))

    def computations() -> None:
        for _ in range(num_computations):
            compute()

    begin = time.perf_counter()
    factors: list[tuple[float, float]] = []
    for _ in range(MAX_ROUNDS):
        (compute_alone,) = agree([time_call(computations, device)], device, group)
        (exchange_alone,) = agree([time_call(lambda: exchange(num_exchanges), device)], device, group)
        _wait_for_device(device)
        start = time.perf_counter()
        waits = [communicate() for _ in range(num_exchanges)]
        posted = time.perf_counter()
        computations()
        _wait_for_device(device)
        computed = time.perf_counter()
        for wait in waits:
            wait()
        _wait_for_device(device)
        end = time.perf_counter()
        # What is left follows from the whole: the rank that computes longest is not the one that then waits longest.
        beside, whole, posting = agree([computed - posted, end - start, posted - start], device, group)
        # What starting the exchanges takes is the computation's loss in either case, so it is no part of the factors.
        progress = exchange_alone - posting - max(0.0, whole - posting - beside)
        factors.append((beside / compute_alone, beside / progress if progress > 0 else 1.0))
        (spent,) = agree([time.perf_counter() - begin], device, group)
        if len(factors) >= MIN_ROUNDS and spent > budget:
            break
    of_compute, of_exchange = (statistics.median(column) for column in zip(*factors, strict=True))
    return min(max(of_compute, 1.0), MAX_SLOWDOWN), min(max(of_exchange, 1.0), MAX_SLOWDOWN)


# ---------------------------------------------------------------------------------------------------------------------
# The cache
# ---------------------------------------------------------------------------------------------------------------------


def hardware_key(device: torch.device) -> dict[str, Any]:
    """What the speed of computation on this machine depends on."""
    key: dict[str, Any] = {"device": device.type, "processor": _processor_name(), "cores": os.cpu_count()}
    key |= {"threads": torch.get_num_threads(), "torch": torch.__version__}
    if device.type == "cuda":
        key["gpu"] = torch.cuda.get_device_name(device)
    return key


def layout_key(group: dist.ProcessGroup | None) -> dict[str, Any]:
    """What the speed of communication depends on, as far as the process knows."""
    if group is None:
        return {"group_size": 1}
    return {"group_size": group.size(), "world_size": dist.get_world_size(), "backend": str(dist.get_backend(group))}


def _processor_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()


def cached(
    folder: str | os.PathLike[str] | None,
    key: dict[str, Any],
    make: Callable[[], dict[str, Any]],
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    still_true: Callable[[dict[str, Any]], bool] | None = None,
) -> dict[str, Any]:
    """The values (JSON) of `key`: from a file of `folder`, or made and written there; None: always made, never written.

    All ranks of `group` call it and get what its first rank read or made. `still_true(values)` may measure whether cached values
    hold; it must answer alike on all ranks. A file that is damaged or of another version is made again, with a line in the log.
    """
    is_first = group is None or group.rank() == 0
    path = None if folder is None else cache_path(folder, key)
    values = read_cache(path, key) if path is not None and is_first else None
    values = _from_first(values, device, group)
    if values is not None and still_true is not None and not still_true(values):
        if is_first:
            logger.warning("measured costs in %s no longer hold here; measuring again", path)
        values = None
    if values is None:
        values = _from_first(make(), device, group)
        assert values is not None
        if path is not None and is_first:
            write_cache(path, key, values)
    return values


def cache_path(folder: str | os.PathLike[str], key: dict[str, Any]) -> Path:
    """The file of a key."""
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return Path(folder) / f"costs_{name}.json"


def read_cache(path: Path, key: dict[str, Any]) -> dict[str, Any] | None:
    """The values in a file; None if there is none, or, with a line in the log, if it is not what `write_cache` wrote."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        logger.warning("cannot read measured costs from %s (%s); measuring again", path, error)
        return None
    if not isinstance(content, dict) or not isinstance(content.get("values"), dict):
        logger.warning("%s holds no measured costs; measuring again", path)
    elif content.get("version") != VERSION:
        logger.warning("%s has version %s of measured costs, not %d; measuring again", path, content.get("version"), VERSION)
    elif content.get("key") != json.loads(json.dumps(key)):
        logger.warning("%s holds measured costs of something else; measuring again", path)
    elif content.get("digest") != _digest(content["values"]):
        logger.warning("the measured costs in %s are damaged; measuring again", path)
    else:
        return content["values"]
    return None


def write_cache(path: Path, key: dict[str, Any], values: dict[str, Any]) -> None:
    """Write so that a reader finds the old file or the new one, whole. A folder that cannot be written to costs a line in the log."""
    content = {"version": VERSION, "key": key, "values": values, "digest": _digest(values)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, prefix=path.stem, suffix=".tmp", delete=False) as file:
            json.dump(content, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.replace(file.name, path)
    except OSError as error:
        logger.warning("cannot keep measured costs in %s (%s); the next run measures again", path, error)


def _digest(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _from_first(values: dict[str, Any] | None, device: torch.device, group: dist.ProcessGroup | None) -> dict[str, Any] | None:
    # Through JSON on every way, so that a value is the same whether it was read, received or just made.
    message = [json.dumps(values)]
    if group is not None and group.size() > 1:
        dist.broadcast_object_list(message, group=group, group_src=0, device=device)
    return json.loads(message[0])
