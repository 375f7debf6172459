"""Short measurements of computation and communication. All ranks get equal results: each time is the slowest rank's.

The model of how computation and communication slow each other down is MPipeMoE's (Zhang et al., IPDPS 2023).
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from parallel.costs.models import Curve, Line, fit_curve, fit_line

MIN_ROUNDS, MAX_ROUNDS = 3, 25  # measurements of each size, of which the median is used
MAX_SLOWDOWN = 10.0  # a larger factor is the result of a disturbance
MAX_REPEATS = 64

Call = Callable[[], None]


def _wait_for_device(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def max_over_ranks(values: Sequence[float], device: torch.device, group: dist.ProcessGroup | None) -> list[float]:
    """Return the elementwise maximum of `values` over the ranks of a group; None means this process alone."""
    if group is None or group.size() == 1:
        return list(values)
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
    return tensor.tolist()


def time_call(call: Call, device: torch.device) -> float:
    """Return the seconds that a call takes until the device has finished it."""
    _wait_for_device(device)
    start = time.perf_counter()
    call()
    _wait_for_device(device)
    return time.perf_counter() - start


def measure(
    make: Callable[[int], Call],
    sizes: Sequence[int],
    device: torch.device,
    group: dist.ProcessGroup | None,
    budget: float,
) -> tuple[list[int], list[float]]:
    """Time `make(size)()` for increasing sizes. Returns (sizes measured, median seconds of the slowest rank for each).

    Sizes alternate, so that a disturbance affects all of them. The measurement takes about `budget` seconds: sizes that
    would take longer are skipped (at least two are measured), and it repeats less often. The calls may communicate, so
    all ranks must make the same ones.
    """
    begin = time.perf_counter()
    calls: list[Call] = []
    times: list[list[float]] = []
    for number, size in enumerate(sizes):
        call = make(size)
        time_call(call, device)  # the first call allocates and compiles
        seconds, spent = max_over_ranks([time_call(call, device), time.perf_counter() - begin], device, group)
        calls.append(call)
        times.append([seconds])
        # The next size probably takes proportionally longer, and is measured at least 1 + MIN_ROUNDS times.
        ahead = seconds * sizes[number + 1] / size * (1 + MIN_ROUNDS) if number + 1 < len(sizes) else 0.0
        if number >= 1 and spent + ahead > budget:
            break
    for _ in range(MAX_ROUNDS - 1):
        for call, of_size in zip(calls, times, strict=True):
            of_size.extend(max_over_ranks([time_call(call, device)], device, group))
        (spent,) = max_over_ranks([time.perf_counter() - begin], device, group)
        if len(times[0]) >= MIN_ROUNDS and spent > budget:
            break
    return list(sizes[: len(calls)]), [statistics.median(of_size) for of_size in times]


def measure_line(
    make: Callable[[int], Call],
    sizes: Sequence[int],
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    budget: float = 2.0,
) -> Line:
    """Time calls of several sizes and fit a line: seconds over size. A collective call.

    `make(size)` returns a call that sends, copies or computes. budget: seconds for the whole measurement.
    """
    return fit_line(*measure(make, sizes, device, group, budget))


def measure_curve(
    make: Callable[[int], Call],
    sizes: Sequence[int],
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    budget: float = 1.0,
) -> Curve:
    """Time a computation for several sizes and fit a curve: seconds over size. A collective call.

    `make(size)` returns a call that computes on `size` items. budget: seconds for the whole measurement.
    """
    return fit_curve(*measure(make, sizes, device, group, budget))


def measure_copies(
    sizes: Sequence[int], device: torch.device, group: dist.ProcessGroup | None = None, budget: float = 0.5
) -> tuple[Line, Line]:
    """Time copies from the device to pinned host memory and back. Returns a line (seconds over bytes) per direction."""
    on_gpu = device.type == "cuda"
    near = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
    far = torch.zeros(max(sizes), dtype=torch.uint8, pin_memory=on_gpu)

    def copy_to(to: torch.Tensor, source: torch.Tensor) -> Callable[[int], Call]:
        def make(size: int) -> Call:
            return lambda: to[:size].copy_(source[:size], non_blocking=on_gpu)

        return make

    out, back = (measure(make, sizes, device, group, budget / 2) for make in (copy_to(far, near), copy_to(near, far)))
    return fit_line(*out), fit_line(*back)


def measure_slowdown(
    compute: Call,
    communicate: Callable[[], Callable[[], Any]],
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    budget: float = 1.0,
) -> tuple[float, float]:
    """Return the factors by which communication slows computation down, and computation slows communication down.

    `communicate` starts a transfer and returns a function that waits for it; all ranks call both in the same order.
    More transfers are started than fit beside the computation. Those that are left at its end run at full speed, so the
    total time shows how far communication got meanwhile.
    """

    def exchange(count: int) -> None:
        for wait in [communicate() for _ in range(count)]:
            wait()

    def alone(call: Call) -> float:
        return statistics.median(max_over_ranks([time_call(call, device)], device, group)[0] for _ in range(3))

    time_call(compute, device)
    time_call(communicate(), device)
    compute_seconds, exchange_seconds = alone(compute), alone(lambda: exchange(1))
    # The transfers take 1.5 to 3 times as long as all computations.
    fitting = exchange_seconds / (3.0 * compute_seconds) if compute_seconds > 0 else 1.0
    num_computations = max(1, min(MAX_REPEATS, int(fitting)))
    needed = 1.5 * num_computations * compute_seconds / max(exchange_seconds, 1e-9)
    num_exchanges = max(1, min(MAX_REPEATS, math.ceil(needed)))

    def computations() -> None:
        for _ in range(num_computations):
            compute()

    begin = time.perf_counter()
    factors: list[tuple[float, float]] = []
    for _ in range(MAX_ROUNDS):
        (compute_alone,) = max_over_ranks([time_call(computations, device)], device, group)
        (exchange_alone,) = max_over_ranks([time_call(lambda: exchange(num_exchanges), device)], device, group)
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
        # The rest is computed from maxima, because the rank that computes longest is not the one that waits longest.
        during, whole, posting = max_over_ranks([computed - posted, end - start, posted - start], device, group)
        # Starting the transfers delays the computation in any case, so the factors exclude it.
        progress = exchange_alone - posting - max(0.0, whole - posting - during)
        factors.append((during / compute_alone, during / progress if progress > 0 else 1.0))
        (spent,) = max_over_ranks([time.perf_counter() - begin], device, group)
        if len(factors) >= MIN_ROUNDS and spent > budget:
            break
    of_compute, of_exchange = (statistics.median(column) for column in zip(*factors, strict=True))
    return min(max(of_compute, 1.0), MAX_SLOWDOWN), min(max(of_exchange, 1.0), MAX_SLOWDOWN)
