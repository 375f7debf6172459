"""Variants of a computation measured in turns on all ranks of a cluster, beside whatever else the machine does.

In each round all variants run once, starting with another one each time; a barrier comes before each. What a variant
reports is the largest over the ranks. A round is dropped when other processes took more of the machine than DISTURBED
during any of its variants. Ratios are medians over the rounds of one round's ratio: slow drifts of the machine then
cancel out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import glob
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.kit.cluster import Cluster

# A variant is disturbed when other processes used more than this share of all cores beside it, or the hypervisor gave
# more than that to others. Both are counted in clock ticks; a busy process is 50% of two cores. What the kernel does
# for our packets belongs to no process and is not counted: 20 to 30% at 200 Mbit/s to 1 Gbit/s between two ranks.
DISTURBED, TICKS = 0.05, 0.02
KERNEL_THREADS = 2  # process id of their parent
ANY_LOAD = "MIXTRAIN_ANY_LOAD"  # an environment variable: where it is set, nobody compares the times
MAX_DROPPED = 2  # rounds dropped for each one that counts, before we give up
FOR_ALL = 3  # rounds in which all variants run, where only contenders go on
CONTENDS = 0.1  # what takes up to this much longer than the fastest may yet be as fast


@dataclasses.dataclass(frozen=True)
class Rounds:
    """`seconds[variant][part]` lists one value per clean round; a variant that left has only the first ones."""

    seconds: dict[str, dict[str, list[float]]]
    num_rounds: int
    num_dropped: int

    def median(self, variant: str, component: str) -> float:
        """Seconds."""
        return statistics.median(self.seconds[variant][component])

    def speedup(self, variant: str, component: str, baseline: str) -> float:
        """Median over rounds of the baseline's time by the variant's."""
        pairs = zip(self.seconds[baseline][component], self.seconds[variant][component])
        return statistics.median(base / own for base, own in pairs)


def standard_error(values: Sequence[float]) -> float:
    """Return the standard error of the values' median, assuming a normal distribution."""
    return 1.2533 * statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0


@dataclasses.dataclass(frozen=True)
class Load:
    """CPU seconds since boot of processes that are not ours, and those that the hypervisor gave to others."""

    others: float
    stolen: float
    wall: float

    @staticmethod
    def now(ours: set[int]) -> Load:
        """Read /proc (proc(5)). What a process leaves when it ends is its parent's, so short ones count too."""
        tick, others = os.sysconf("SC_CLK_TCK"), 0.0
        for path in glob.glob("/proc/[0-9]*/stat"):
            with contextlib.suppress(OSError), open(path) as file:  # it has just ended
                # After the name, which may hold spaces: state, parent, ...
                fields = file.read().rpartition(")")[2].split()
                process = int(path.split("/")[2])
                is_kernel = process == KERNEL_THREADS or int(fields[1]) == KERNEL_THREADS
                if process not in ours and not is_kernel:
                    others += sum(int(field) for field in fields[11:15]) / tick
        with open("/proc/stat") as file:
            stolen = int(file.readline().split()[8]) / tick
        return Load(others, stolen, time.monotonic())


def times_count() -> bool:
    """Whether somebody compares the measured times; not where ANY_LOAD is set."""
    return not os.environ.get(ANY_LOAD)


def is_disturbed(before: Load, after: Load) -> bool:
    """Whether another program used the machine in between, and times are to be compared."""
    if not times_count():
        return False
    allowed = DISTURBED * (os.cpu_count() or 1) * (after.wall - before.wall) + TICKS
    return after.others - before.others > allowed or after.stolen - before.stolen > allowed


def measure(
    cluster: Cluster,
    function: Callable[..., dict[str, float]],
    variants: Mapping[str, tuple[Any, ...]],
    rounds: int,
    warm_up: int = 1,
) -> Rounds:
    """`function(*variants[name])` on all ranks in turns; it returns seconds by part, of which the most counts.

    Raises RuntimeError when the machine is too busy for `rounds` clean rounds.
    """
    names = list(variants)
    for _ in range(warm_up):
        for name in names:
            cluster.call(_timed, function, variants[name])
    cluster.call(_freeze_objects)
    ours = {os.getpid(), *cluster.pids}
    seconds: dict[str, dict[str, list[float]]] = {name: {} for name in names}
    clean = dropped = 0
    while clean < rounds:
        turn = (clean + dropped) % len(names)
        this_round: dict[str, dict[str, float]] = {}
        disturbed = False
        for name in names[turn:] + names[:turn]:
            before = Load.now(ours)
            results = cluster.call(_timed, function, variants[name])
            disturbed = disturbed or is_disturbed(before, Load.now(ours))
            this_round[name] = {
                component: max(components[component] for components in results) for component in results[0]
            }
        if disturbed:
            dropped += 1
            if dropped > MAX_DROPPED * rounds + MAX_DROPPED:
                raise RuntimeError(
                    f"only {clean} of {clean + dropped} rounds were undisturbed: too much else runs on this machine"
                )
            continue
        clean += 1
        for name, components in this_round.items():
            for component, value in components.items():
                seconds[name].setdefault(component, []).append(value)
    return Rounds(seconds, clean, dropped)


def measure_contenders(
    cluster: Cluster,
    function: Callable[..., dict[str, float]],
    variants: Mapping[str, tuple[Any, ...]],
    rounds: int,
    contenders: Callable[[Rounds], set[str]],
) -> Rounds:
    """Measure all variants for FOR_ALL rounds without warm-up, then only those that `contenders` selects from these
    rounds."""
    first = measure(cluster, function, variants, min(FOR_ALL, rounds), warm_up=0)
    left = contenders(first)
    going_on = {name: args for name, args in variants.items() if name in left}
    more = measure(cluster, function, going_on, rounds - first.num_rounds, warm_up=0)
    seconds = {
        name: {
            component: values + more.seconds.get(name, {}).get(component, [])
            for component, values in components.items()
        }
        for name, components in first.seconds.items()
    }
    return Rounds(seconds, rounds, first.num_dropped + more.num_dropped)


def _freeze_objects() -> None:
    """On a rank: what is there stays, so that collections are short from now on."""
    gc.collect()
    gc.freeze()


def _timed(function: Callable[..., dict[str, float]], args: tuple[Any, ...]) -> dict[str, float]:
    """On a rank: call the function after a barrier, without garbage collection."""
    import torch.distributed as dist

    gc.collect()
    gc.disable()
    try:
        dist.barrier()
        return function(*args)
    finally:
        gc.enable()
