"""Name ranks that are slower than others with the same work, since every step waits for the slowest rank."""

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

WINDOW = 20  # steps over whose median a rank must be slow, which no single pause changes
LEAST_SECONDS = 0.002  # differences below this are noise
PROBE_SECONDS = 0.01  # of matrix multiplications that time a GPU; the slowest rank's first times decide their number
LEAST_SIZE, MOST_SIZE, MOST_REPEATS = 64, 4096, 64


class Stragglers(Callback):
    """Every WINDOW steps, compares the time that each rank spends per step with the median of the other ranks in its
    pipeline stage.

    On a CPU, this is the time outside collectives, including data loading and callbacks. A GPU's waits are not visible
    to its host, so on a GPU a few matrix multiplications are timed once per window. This shows a slow device, but not a
    slow host. The times share the all-reduce of the loss. A rank is named if its time is more than
    `training.straggler_factor` times that median (null: never).
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
        ranks: list[tuple[str, int]] = [("", 0)] * topology.world_size
        dist.all_gather_object(ranks, (socket.gethostname(), topology.pipeline.rank))
        self._hosts, self._stages = [host for host, _ in ranks], [stage for _, stage in ranks]
        self._zeros = torch.zeros(topology.world_size, dtype=torch.float64, device=topology.device)
        self._probe = _Probe(topology.device) if topology.device.type == "cuda" else None
        self._last_seen = time.monotonic(), self._log.waited
        run.engine.sums.register("own_seconds", lambda: self._own_seconds(topology.rank))

    def _own_seconds(self, rank: int) -> torch.Tensor:
        before, waited_before = self._last_seen
        self._last_seen = now, waited = time.monotonic(), self._log.waited
        own = now - before - (waited - waited_before) if self._probe is None else self._probe.last
        by_rank = self._zeros.clone()
        by_rank.narrow(0, rank, 1).fill_(own)  # by_rank[rank] = own would wait for the device
        return by_rank

    def after_step(self, run: Run, metrics: Metrics) -> None:
        if not self._on:
            return
        assert run.result is not None
        self._steps += 1
        self._seconds.append(run.result.sums["own_seconds"].tolist())
        if self._steps == 1:
            self._seconds.clear()  # it includes the start
        if self._steps % WINDOW != 0:
            return
        factor = run.config.training.straggler_factor
        assert factor is not None
        medians = [statistics.median(seconds) for seconds in zip(*self._seconds)]
        slow = find_slow(medians, self._stages, factor)
        for rank, others in slow.items():
            text = (
                f"rank {rank} on {self._hosts[rank]} is slow: its own work takes {1000 * medians[rank]:.1f} ms "
                f"per step, that of its stage's other ranks {1000 * others:.1f} ms (median of {WINDOW} steps)"
            )
            if run.is_main:
                fields = {"step": run.progress.step, "slow_rank": rank, "seconds": medians[rank], "others": others}
                events.record(run.run_dir, "straggler", text, **fields)
            if rank not in self._named:  # a line once, until the rank has recovered
                run.log(text)
        self._named = set(slow)
        if self._probe is not None:
            self._probe.measure()


def find_slow(seconds: list[float], stages: list[int], factor: float) -> dict[int, float]:
    """Return the ranks whose `seconds` exceed `factor` times the median of the other ranks in their pipeline stage, as
    a dict from rank to that median in seconds."""
    slow = {}
    for rank, own in enumerate(seconds):
        others = [s for other, s in enumerate(seconds) if other != rank and stages[other] == stages[rank]]
        if others and own > factor * (median := statistics.median(others)) and own - median > LEAST_SECONDS:
            slow[rank] = median
    return slow


def choose_products(seconds_of: Callable[[int], float]) -> tuple[int, int]:
    """Return the size and number of square matrix multiplications that take about PROBE_SECONDS together.
    `seconds_of(size)` times one multiplication. The size is doubled only while the next multiplication, which takes
    about eight times as long, fits into PROBE_SECONDS. So a slow device or a CPU does not compute for long."""
    size = LEAST_SIZE
    while (seconds := seconds_of(size)) * 8 <= PROBE_SECONDS and size < MOST_SIZE:
        size *= 2
    return size, max(1, min(MOST_REPEATS, round(PROBE_SECONDS / max(seconds, 1e-9))))


class _Probe:
    """Times equal matrix multiplications on every rank's GPU. All ranks must create this object together."""

    def __init__(self, device: torch.device):
        self._device = device
        size, self._repeats = choose_products(self._slowest)
        self._matrix = torch.ones(size, size, dtype=torch.float16, device=device)
        self.last = 0.0
        self.measure()

    def _slowest(self, size: int) -> float:
        """Return the seconds that one matrix multiplication of this size takes on the slowest rank."""
        matrix = torch.ones(size, size, dtype=torch.float16, device=self._device)
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
