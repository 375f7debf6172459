"""Names ranks that are slower than the others who do the same work: the step waits for them."""

from __future__ import annotations

import socket
import statistics
import time
from collections import deque
from collections.abc import Callable

import torch
import torch.distributed as dist

from parallel.costs.measure import max_over_ranks, time_call
from parallel.liveness import collective_log
from training.resilience import events
from training.run import Callback, Metrics, Run

WINDOW = 20  # steps: a rank must be slow in their median, which no single pause moves
LEAST_SECONDS = 0.002  # differences below this are noise
# A GPU is timed with matrix products that take so long together, by what the slowest rank's first ones took.
PROBE_SECONDS = 0.01
LEAST_SIZE, MOST_SIZE, MOST_REPEATS = 64, 4096, 64


class Stragglers(Callback):
    """Compares, every WINDOW steps, each rank's own seconds a step with the median of its pipeline stage's other ranks.

    On a host a rank's own seconds are those outside of collectives, data and callbacks included. A GPU's waits are not
    seen from its host: there matrix products are timed once a window instead, which shows a slow device but not a slow
    host. The numbers travel with the step's loss. A rank is named when it is slower by `training.straggler_factor`
    (null: never).
    """

    def on_start(self, run: Run) -> None:
        topology = run.topology
        self._on = run.config.training.straggler_factor is not None and topology.world_size > 1
        if not self._on:
            return
        self._log = collective_log.install()
        self._seconds: deque[list[float]] = deque(maxlen=WINDOW)
        self._steps = 0
        self._named: set[int] = set()
        places: list[tuple[str, int]] = [("", 0)] * topology.world_size
        dist.all_gather_object(places, (socket.gethostname(), topology.pipeline.rank))
        self._hosts, self._stages = [host for host, _ in places], [stage for _, stage in places]
        self._slot = torch.zeros(topology.world_size, dtype=torch.float64, device=topology.device)
        self._probe = _Probe(topology.device) if topology.device.type == "cuda" else None
        self._mark = time.monotonic(), self._log.waited
        run.engine.sums.register("own_seconds", lambda: self._own_seconds(topology.rank))

    def _own_seconds(self, rank: int) -> torch.Tensor:
        before, waited_before = self._mark
        self._mark = now, waited = time.monotonic(), self._log.waited
        own = now - before - (waited - waited_before)
        if self._probe is not None:
            own = self._probe.last
        slots = self._slot.clone()
        slots.narrow(0, rank, 1).fill_(own)  # slots[rank] = own would wait for the device
        return slots

    def after_step(self, run: Run, metrics: Metrics) -> None:
        if not self._on:
            return
        assert run.result is not None
        self._steps += 1
        self._seconds.append(run.result.sums["own_seconds"].tolist())
        if self._steps == 1:
            self._seconds.clear()  # it holds the start
        if self._steps % WINDOW == 0:
            self._report(run)
            if self._probe is not None:
                self._probe.measure()

    def _report(self, run: Run) -> None:
        factor = run.config.training.straggler_factor
        assert factor is not None
        medians = [statistics.median(of_rank) for of_rank in zip(*self._seconds)]
        slow = find_slow(medians, self._stages, factor)
        for rank, others in slow.items():
            text = (
                f"rank {rank} on {self._hosts[rank]} is slow: {1000 * medians[rank]:.1f} ms of its own a step, where "
                f"the others of its stage need {1000 * others:.1f} ms (median of {WINDOW} steps)"
            )
            if run.is_main:
                events.record(
                    run.run_dir,
                    "straggler",
                    text,
                    step=run.progress.step,
                    slow_rank=rank,
                    seconds=medians[rank],
                    others=others,
                )
            if rank not in self._named:  # a line once, until it has recovered
                run.say(text)
        self._named = set(slow)


def find_slow(seconds: list[float], stages: list[int], factor: float) -> dict[int, float]:
    """The ranks that take more than `factor` times the median of the other ranks of their stage, and that median."""
    slow = {}
    for rank, own in enumerate(seconds):
        others = [s for other, s in enumerate(seconds) if other != rank and stages[other] == stages[rank]]
        if others and own > factor * (median := statistics.median(others)) and own - median > LEAST_SECONDS:
            slow[rank] = median
    return slow


def choose_products(seconds_of: Callable[[int], float]) -> tuple[int, int]:
    """Size and number of square matrix products that take about PROBE_SECONDS; `seconds_of(size)` times one.

    A product of twice the size takes about eight times as long: it is tried only where that is not too long. So no
    device, and no processor that stands for one, computes for long.
    """
    size = LEAST_SIZE
    seconds = seconds_of(size)
    while size < MOST_SIZE and 8 * seconds <= PROBE_SECONDS:
        size *= 2
        seconds = seconds_of(size)
    return size, max(1, min(MOST_REPEATS, round(PROBE_SECONDS / max(seconds, 1e-9))))


class _Probe:
    """The time of some matrix products on this rank's GPU, the same ones on all ranks. Made on all ranks together."""

    def __init__(self, device: torch.device):
        self._device = device
        size, self._repeats = choose_products(self._slowest)
        self._matrix = self._of_size(size)
        self.last = 0.0
        self.measure()

    def _of_size(self, size: int) -> torch.Tensor:
        return torch.ones(size, size, dtype=torch.float16, device=self._device)

    def _slowest(self, size: int) -> float:
        """Seconds of one product on the slowest rank."""
        matrix = self._of_size(size)
        torch.mm(matrix, matrix)  # the first one starts cuBLAS
        own = min(time_call(lambda: torch.mm(matrix, matrix), self._device) for _ in range(2))
        return max_over_ranks([own], self._device, dist.group.WORLD)[0]

    def measure(self) -> None:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        begin.record()
        for _ in range(self._repeats):
            torch.mm(self._matrix, self._matrix)
        end.record()
        end.synchronize()
        self.last = begin.elapsed_time(end) / 1000
