"""The memory budget of a rank, and the choice of the weights that stay in memory within it.

A pass uses the units (the weights of a layer's attention or feed-forward block, or a block of the output layer) in a
known cycle, in which an LRU or LFU cache would never hit. So a fixed set of units stays in memory, and the others are
streamed through a ring buffer for two units: the one in use and the next. Units have priority, because every pass uses
them. Experts, of which a pass uses few, get the remaining memory. Embedding tables, of which a pass reads single rows,
come last.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from base.errors import ConfigError
from base.ranks import launched
from base.units import MIB
from memory import host_memory

# Expert slots next to a ring buffer, in multiples of top_k: experts of one token in use, and as many in flight.
SLOTS_OF_A_LAYER = 2
SHARE = 0.8  # fraction of the free memory of the machine or GPU
LEFT_IN_GROUP = 0.95  # fraction of the headroom of the control groups
OF_ADDRESSES = 0.6  # fraction of the address space that `ulimit -v` leaves: threads reserve addresses they never use


class BudgetTooSmall(ConfigError):
    """Error of a budget that cannot hold even one unit of weights at a time. `wanted`: a sufficient budget in MiB."""

    def __init__(self, text: str, wanted: int) -> None:
        super().__init__(text)
        self.wanted = wanted


@dataclass(frozen=True)
class HeldSizes:
    """Bytes of this rank's weights, grouped by their treatment in a memory budget.

    small: weights that always stay in memory. units: (key, bytes) of weights that are used together, in the order of
    use. expert: bytes of one of `num_experts` experts, of which a token chooses `top_k`. words: bytes of the token
    embedding, 0 if the output layer shares it.
    """

    small: int
    units: tuple[tuple[str, int], ...]
    expert: int = 0
    num_experts: int = 0
    top_k: int = 0
    words: int = 0

    @property
    def total(self) -> int:
        """Bytes of all weights of this rank."""
        return self.small + sum(size for _, size in self.units) + self.expert * self.num_experts + self.words

    @property
    def least(self) -> int:
        """Fewest bytes of memory in which the weights can be used: small weights, the largest unit and one expert."""
        return self.small + max((size for _, size in self.units), default=0) + min(1, self.num_experts) * self.expert


@dataclass(frozen=True)
class StreamPlan:
    """The division of a memory budget: keys of the units that stay in memory, bytes of the ring buffer for the other
    units, number of expert slots, and whether the token embedding stays."""

    kept: frozenset[str]
    ring_bytes: int
    expert_slots: int
    keeps_words: bool
    streamed_bytes: int  # per pass, without experts


def plan_weights(sizes: HeldSizes, budget: float, other_bytes: int, given: float | None) -> StreamPlan:
    """Divide a budget of `budget` bytes over the weights, after subtracting `other_bytes` for the cache and
    activations.

    given: value of --memory-budget in MiB, for the error message. Raises BudgetTooSmall if one unit at a time does not
    fit.
    """
    headroom = budget - other_bytes
    names = [name for name, _ in sizes.units]
    if sizes.total <= headroom:
        return StreamPlan(frozenset(names), 0, sizes.num_experts, True, 0)
    headroom -= sizes.small
    in_units = sum(size for _, size in sizes.units)
    fewest = min(1, sizes.num_experts)
    if in_units + fewest * sizes.expert <= headroom:
        num_slots = min(sizes.num_experts, int((headroom - in_units) // sizes.expert)) if sizes.num_experts else 0
        left = headroom - in_units - num_slots * sizes.expert
        return StreamPlan(frozenset(names), 0, num_slots, sizes.words <= left, 0)
    least = sizes.least - sizes.small
    largest = least - fewest * sizes.expert
    if headroom < least:
        raise _too_small(sizes, budget, other_bytes, least, given)
    num_slots = min(sizes.num_experts, SLOTS_OF_A_LAYER * sizes.top_k)
    while num_slots > fewest and largest + num_slots * sizes.expert > headroom:
        num_slots -= 1
    headroom -= num_slots * sizes.expert
    ring = min(int(headroom), _pair(sizes.units))
    kept = _kept(sizes.units, headroom - ring)
    streamed = [(name, size) for name, size in sizes.units if name not in kept]
    ring = min(ring, max(_pair(streamed), largest if len(streamed) == 1 else 0))
    return StreamPlan(kept, ring, num_slots, False, sum(size for _, size in streamed))


def _pair(units: Sequence[tuple[str, int]]) -> int:
    """Return the bytes of the largest two consecutive units, where the first follows the last: one is loaded while the
    other is used."""
    sizes = [size for _, size in units]
    return max((a + b for a, b in zip(sizes, [*sizes[1:], *sizes[:1]])), default=0) if len(sizes) > 1 else sum(sizes)


def _kept(units: Sequence[tuple[str, int]], capacity: float) -> frozenset[str]:
    """Choose the units that stay in memory, spread evenly over the order of use, which also spreads the file reads."""
    total, kept, held = sum(size for _, size in units), set[str](), 0
    share, due = capacity / total, 0.0
    for name, size in units:
        due += size * share
        if held + size <= due:
            kept.add(name)
            held += size
    for name, size in sorted(units, key=lambda unit: -unit[1]):
        if name not in kept and held + size <= capacity:
            kept.add(name)
            held += size
    return frozenset(kept)


def _too_small(sizes: HeldSizes, budget: float, other: int, least: int, given: float | None) -> BudgetTooSmall:
    wanted = math.ceil((other + sizes.small + least) / MIB)
    limit = f"--memory-budget ({given:g})" if given is not None else f"the memory that is left ({budget / MIB:.0f} MiB)"
    what = "the largest matrices used at once" + (" and an expert" if sizes.num_experts else "")
    # Do not advise a budget larger than the free memory: the kernel would kill the process.
    try_this = f"--memory-budget {wanted}" if given is not None else f"a machine or a limit that leaves {wanted} MiB"
    text = (
        f"{limit} is too small: {other / MIB:.1f} MiB are needed for key-value cache and activations, "
        f"{sizes.small / MIB:.1f} MiB for norms and position tables, and {least / MIB:.1f} MiB for {what}. Try "
        f"{try_this}, a smaller --batch or shorter texts"
    )
    return BudgetTooSmall(text, wanted)


def memory_budget(given: float | None, device: torch.device) -> float:
    """Return this rank's memory budget in bytes: `given` MiB, or by default a share of the free memory.

    The share on a GPU is 80% of its free memory. On the host, it is the smaller of 80% of the free memory and 95% of
    what the control groups leave, divided by the ranks of the node, and at most 60% of what the process limit leaves.
    """
    if given is not None:
        return given * MIB
    if device.type == "cuda":
        return SHARE * torch.cuda.mem_get_info(device)[0]
    launch = launched()
    ranks = launch.local_world_size or launch.world_size
    group, addresses = host_memory.left_by_cgroups(), host_memory.left_of_addresses()
    shared = [SHARE * host_memory.free(), *([] if group is None else [LEFT_IN_GROUP * group])]
    return min([min(shared) / ranks, *([] if addresses is None else [OF_ADDRESSES * addresses])])


def refuse_together(problem: BudgetTooSmall | None) -> None:
    """Raise BudgetTooSmall on every rank if the memory budget of any rank is too small. A collective call.

    problem: this rank's error, or None. The message is that of the rank that needs the most memory.
    """
    if dist.get_world_size() == 1:
        if problem is not None:
            raise problem
        return
    found: list[tuple[int, str]] = [(0, "")] * dist.get_world_size()
    dist.all_gather_object(found, (0, "") if problem is None else (problem.wanted, str(problem)))
    wanted, rank = max((wanted, -rank) for rank, (wanted, _) in enumerate(found))
    if wanted:
        raise BudgetTooSmall(f"{found[-rank][1]} (rank {-rank})", wanted)
