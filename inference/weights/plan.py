"""What of a model stays in memory and what comes from the files in every pass: a pure function of sizes.

The order of use is a known cycle, in which a cache of what was used last, or most often, would hit nothing. So a fixed
part stays, and the rest streams through a ring that holds the unit in use and the next one. What is used in every pass
stays first; experts, of which a pass uses few, get what is left, and tables of which it reads single rows come last.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from configs.schema import ConfigError

MIB = 2**20
# Slots for experts beside a ring: those that a token's layer chooses, and as many on their way.
SLOTS_OF_A_LAYER = 2


class BudgetTooSmall(ConfigError):
    """A budget that does not even hold one unit at a time; `wanted` MiB would do."""

    def __init__(self, text: str, wanted: int) -> None:
        super().__init__(text)
        self.wanted = wanted


@dataclass(frozen=True)
class HeldSizes:
    """Bytes on this rank: of what always stays, of each unit in the order of use, of an expert, and of the table of
    tokens where it is no output layer too; how many experts there are, and how many a token chooses."""

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
        """Bytes of what there must be room for: what always stays, the largest unit, and an expert."""
        return self.small + max((size for _, size in self.units), default=0) + min(1, self.num_experts) * self.expert


@dataclass(frozen=True)
class StreamPlan:
    """Units that stay, bytes of the ring for the others, slots for experts, and whether the table of tokens stays."""

    kept: frozenset[str]
    ring_bytes: int
    expert_slots: int
    keeps_words: bool
    streamed_bytes: int  # of a pass, without experts


def plan_weights(sizes: HeldSizes, budget: float, other_bytes: int, given: float | None) -> StreamPlan:
    """Divide `budget` bytes, of which `other_bytes` go to the cache and to what a pass computes. `given`: MiB of
    --memory-budget, for the message. Raises BudgetTooSmall where not even one unit at a time fits."""
    room = budget - other_bytes
    names = [name for name, _ in sizes.units]
    if sizes.total <= room:
        return StreamPlan(frozenset(names), 0, sizes.num_experts, True, 0)
    room -= sizes.small
    in_units = sum(size for _, size in sizes.units)
    fewest = min(1, sizes.num_experts)
    if in_units + fewest * sizes.expert <= room:
        slots = min(sizes.num_experts, int((room - in_units) // sizes.expert)) if sizes.num_experts else 0
        left = room - in_units - slots * sizes.expert
        return StreamPlan(frozenset(names), 0, slots, sizes.words <= left, 0)
    least = sizes.least - sizes.small
    largest = least - fewest * sizes.expert
    if room < least:
        raise _refusal(sizes, budget, other_bytes, least, given)
    slots = min(sizes.num_experts, SLOTS_OF_A_LAYER * sizes.top_k)
    while slots > fewest and largest + slots * sizes.expert > room:
        slots -= 1
    room -= slots * sizes.expert
    ring = min(int(room), _pair(sizes.units))
    kept = _kept(sizes.units, room - ring)
    streamed = [(name, size) for name, size in sizes.units if name not in kept]
    ring = min(ring, max(_pair(streamed), largest if len(streamed) == 1 else 0))
    return StreamPlan(kept, ring, slots, False, sum(size for _, size in streamed))


def _pair(units: Sequence[tuple[str, int]]) -> int:
    """Bytes of the largest two units that follow each other, so that one comes while the other is used."""
    sizes = [size for _, size in units]
    return max((a + b for a, b in zip(sizes, [*sizes[1:], *sizes[:1]])), default=0) if len(sizes) > 1 else sum(sizes)


def _kept(units: Sequence[tuple[str, int]], room: float) -> frozenset[str]:
    """Units of at most `room` bytes together, spread evenly over the order of use, so that the reader is never far
    ahead; then whatever else still fits, the largest first."""
    total, kept, held = sum(size for _, size in units), set[str](), 0
    share, due = room / total, 0.0
    for name, size in units:
        due += size * share
        if held + size <= due:
            kept.add(name)
            held += size
    for name, size in sorted(units, key=lambda unit: -unit[1]):
        if name not in kept and held + size <= room:
            kept.add(name)
            held += size
    return frozenset(kept)


def _refusal(sizes: HeldSizes, budget: float, other: int, least: int, given: float | None) -> BudgetTooSmall:
    wanted = math.ceil((other + sizes.small + least) / MIB)
    said = f"--memory-budget ({given:g})" if given is not None else f"the memory that is left ({budget / MIB:.0f} MiB)"
    what = "one unit of the weights" + (" and an expert" if sizes.num_experts else "")
    # Advice to name a budget beyond what is left would end in the kernel's killing.
    try_this = f"--memory-budget {wanted}" if given is not None else f"a machine or a limit that leaves {wanted} MiB"
    text = (
        f"{said} must hold {other / MIB:.1f} MiB for keys, values and what a pass computes, {sizes.small / MIB:.1f} "
        f"for norms and tables and {least / MIB:.1f} for {what}. Try {try_this}, fewer prompts at once (--batch) or "
        "shorter ones"
    )
    return BudgetTooSmall(text, wanted)
