"""The memory budget of a rank, and which weights stay in memory within it.

The order of use is a known cycle, in which an LRU or LFU cache would never hit. So a fixed set of units stays, and the
others stream through a ring that holds the unit in use and the next one. Units, which every pass uses, are kept first;
experts, of which a pass uses few, get the rest; tables of which a pass reads single rows come last.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from base.errors import ConfigError
from base.ranks import launched
from memory import host_memory

MIB = 2**20
# Expert slots in addition to a ring, in layers: the experts that a token chooses in one layer, and as many in flight.
SLOTS_OF_A_LAYER = 2
SHARE = 0.8  # of the free memory, without a limit from outside
LEFT_IN_GROUP = 0.95  # of what a control group leaves
OF_ADDRESSES = 0.6  # of what `ulimit -v` leaves: threads reserve addresses that they never use


class BudgetTooSmall(ConfigError):
    """A budget that does not even hold one unit at a time; `wanted` MiB would do."""

    def __init__(self, text: str, wanted: int) -> None:
        super().__init__(text)
        self.wanted = wanted


@dataclass(frozen=True)
class HeldSizes:
    """Bytes of this rank's weights, by how they are used.

    small: weights that always stay. units: (key, bytes) in the order of use. expert: bytes of one of `num_experts`
    experts, of which a token chooses `top_k`. words: bytes of the table of tokens, 0 if it is the output layer too.
    """

    small: int
    units: tuple[tuple[str, int], ...]
    expert: int = 0
    num_experts: int = 0
    top_k: int = 0
    words: int = 0

    @property
    def total(self) -> int:
        """Bytes of all weights."""
        return self.small + sum(size for _, size in self.units) + self.expert * self.num_experts + self.words

    @property
    def least(self) -> int:
        """Bytes that a budget must hold: the small weights, the largest unit, and an expert."""
        return self.small + max((size for _, size in self.units), default=0) + min(1, self.num_experts) * self.expert


@dataclass(frozen=True)
class StreamPlan:
    """Keys of the units that stay, bytes of the ring for the others, and whether the table of tokens stays."""

    kept: frozenset[str]
    ring_bytes: int
    expert_slots: int
    keeps_words: bool
    streamed_bytes: int  # per pass, without experts


def plan_weights(sizes: HeldSizes, budget: float, other_bytes: int, given: float | None) -> StreamPlan:
    """Divide `budget` bytes, of which the cache and a pass's computation take `other_bytes`.

    given: MiB of --memory-budget, for the message. Raises BudgetTooSmall if not even one unit at a time fits.
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
    """Return the bytes of the largest two consecutive units: one is loaded while the other is used."""
    sizes = [size for _, size in units]
    return max((a + b for a, b in zip(sizes, [*sizes[1:], *sizes[:1]])), default=0) if len(sizes) > 1 else sum(sizes)


def _kept(units: Sequence[tuple[str, int]], capacity: float) -> frozenset[str]:
    """Choose units of at most `capacity` bytes together, spread evenly over the order of use, so that reads
    are spread evenly, too; then whatever else still fits, the largest first."""
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
    what = "one unit of the weights" + (" and an expert" if sizes.num_experts else "")
    # A budget beyond what is left, if advised, would have the kernel kill the process.
    try_this = f"--memory-budget {wanted}" if given is not None else f"a machine or a limit that leaves {wanted} MiB"
    text = (
        f"{limit} must hold {other / MIB:.1f} MiB for keys, values and what a pass computes, {sizes.small / MIB:.1f} "
        f"for norms and tables and {least / MIB:.1f} for {what}. Try {try_this}, fewer prompts at once (--batch) or "
        "shorter ones"
    )
    return BudgetTooSmall(text, wanted)


def memory_budget(given: float | None, device: torch.device) -> float:
    """Return this rank's budget in bytes: `given` MiB, or a share of the memory that is left.

    The share is 95% of what the control groups leave or 80% of what is free, of the host or the GPU, divided by the
    ranks of this node; and at most 60% of what the process's own limit leaves.
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
    """Raise BudgetTooSmall on every rank if the budget of any is too small, with the message of the rank that needs
    most. A collective call."""
    if dist.get_world_size() == 1:
        if problem is not None:
            raise problem
        return
    found: list[tuple[int, str]] = [(0, "")] * dist.get_world_size()
    dist.all_gather_object(found, (0, "") if problem is None else (problem.wanted, str(problem)))
    wanted, rank = max((wanted, -rank) for rank, (wanted, _) in enumerate(found))
    if wanted:
        raise BudgetTooSmall(f"{found[-rank][1]} (rank {-rank})", wanted)
