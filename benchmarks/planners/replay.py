"""What a planner's answers to a layer's calls come to: balance, copies, what travels.

A planner with memory keeps a layer's copies for the step, as many as there are slots, the last used ones. At the next
step their weights are stale: one that is used again is refreshed. The passes of a micro-batch follow each other, so the
backward pass finds the copies of its forward. A planner without memory sends each copy for the forward and again for
the backward pass of each micro-batch. A copy's gradient goes home once: with its end, or with the micro-batch.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.planners import Entry
from moe.placement.quotas import Costs, ReplicaLimits, at_primaries, check, outcome
from moe.placement_map import Integers, PlacementMap

PUSHES = ("first", "refresh", "second")  # why weights travel: a new copy, a stale one, once more for the backward pass
LINKS = ("in_node", "between")
TRIPS = 4  # of a row: to the expert and back, its gradient the same way


@dataclass
class Tally:
    """Sums over calls, each of one micro-batch of a layer."""

    calls: int = 0
    imbalance: float = 0.0
    worst: float = 0.0
    num_replicas: int = 0  # that the calls compute with
    assignments: int = 0
    seconds: int = 0  # predicted, of the busiest ranks, in the unit of Costs
    seconds_at_home: int = 0
    planning: float = 0.0  # seconds of this machine
    pushes: Counter[tuple[str, str]] = field(default_factory=Counter)  # (why, link): weights of an expert
    away_rows: Counter[str] = field(default_factory=Counter)  # link: assignments that are computed on another rank

    def add(self, other: Tally) -> None:
        for name, value in vars(other).items():
            here = getattr(self, name)
            setattr(self, name, max(here, value) if name == "worst" else here + value)

    def figures(self, steps: int, expert_bytes: int, row_bytes: int, grad_bytes: int = 0) -> dict[str, float]:
        """By call, bytes by step; `grad_bytes` of a copy's gradient."""
        calls, off_rank = max(self.calls, 1), sum(self.away_rows.values())
        pushed = {why: sum(self.pushes[why, link] for link in LINKS) for why in PUSHES}
        # For each copy that came a gradient goes back: the weights of a backward pass bring none of their own.
        returned = {link: (self.pushes["first", link] + self.pushes["refresh", link]) * grad_bytes for link in LINKS}
        by_link = {
            link: sum(self.pushes[why, link] for why in PUSHES) * expert_bytes
            + returned[link]
            + self.away_rows[link] * row_bytes * TRIPS
            for link in LINKS
        }
        return {
            "max_over_mean": self.imbalance / calls,
            "worst": self.worst,
            "copies": self.num_replicas / calls,
            **{f"{why}_bytes": number * expert_bytes / steps for why, number in pushed.items()},
            "grad_bytes": sum(returned.values()) / steps,
            **{f"{link}_bytes": number / steps for link, number in by_link.items()},
            "off_rank": off_rank / max(self.assignments, 1),
            "predicted_time": self.seconds / max(self.seconds_at_home, 1),
            "planning_ms": 1e3 * self.planning / calls,
        }


class Replay:
    """One layer's calls through one planner; homes are in order, or as they are set between steps."""

    primaries: tuple[int, ...] | None = None

    def __init__(self, entry: Entry, costs: Costs, limits: ReplicaLimits) -> None:
        self.tally = Tally()
        self._entry, self._costs, self._limits = entry, costs, limits
        self._held: list[tuple[int, int]] = []  # copies (expert, rank) in slots, the last used ones last

    def step(self, counts_MRE: Integers) -> None:
        """The micro-batches of a step."""
        stale, self._held = set(self._held), []
        num_ranks, num_experts = counts_MRE.shape[1:]
        for counts_RE in counts_MRE:
            placement = PlacementMap(num_experts, num_ranks, self.primaries, tuple(sorted(self._held)))
            start = time.perf_counter()
            quotas_ER = self._entry.plan(counts_RE, placement, self._costs, self._limits)
            self.tally.planning += time.perf_counter() - start
            replica_slots = placement.num_expert_slots if self._entry.own_slots else self._limits.replica_slots
            check(quotas_ER, counts_RE, placement, ReplicaLimits(replica_slots, self._limits.ranks_per_node))
            self._count(counts_RE, quotas_ER, placement)
            used = self._push(quotas_ER, placement, stale)
            if self._entry.keeps:
                self._keep(used, replica_slots)

    def _count(self, counts_RE: Integers, quotas_ER: Integers, placement: PlacementMap) -> None:
        tally, limits = self.tally, self._limits
        result = outcome(quotas_ER, placement, self._costs, limits)
        before = outcome(at_primaries(counts_RE, placement), placement, self._costs, limits)
        tally.calls += 1
        tally.imbalance += result.imbalance if counts_RE.any() else 1.0
        tally.worst = max(tally.worst, result.imbalance)
        tally.seconds += result.seconds
        tally.seconds_at_home += before.seconds
        tally.assignments += int(counts_RE.sum())
        off_rank, between = sent_rows(counts_RE, quotas_ER, limits.ranks_per_node)
        tally.away_rows.update({"in_node": off_rank - between, "between": between})

    def _push(self, quotas_ER: Integers, placement: PlacementMap, stale: set[tuple[int, int]]) -> set[tuple[int, int]]:
        """The copies that are used, once their weights are counted where they travel."""
        primaries = placement.primary_ranks
        pairs = [(int(expert), int(rank)) for expert, rank in zip(*np.nonzero(quotas_ER))]
        used = {(expert, rank) for expert, rank in pairs if primaries[expert] != rank}
        self.tally.num_replicas += len(used)
        for expert, rank in used - set(self._held):
            node = self._limits.ranks_per_node
            link = "in_node" if primaries[expert] // node == rank // node else "between"
            self.tally.pushes["refresh" if (expert, rank) in stale else "first", link] += 1
            if not self._entry.keeps:
                self.tally.pushes["second", link] += 1
        stale -= used
        return used

    def _keep(self, used: set[tuple[int, int]], replica_slots: int) -> None:
        """What was used last stays, as far as there are slots."""
        free: Counter[int] = Counter()
        kept = []
        for expert, rank in [*sorted(used), *(replica for replica in reversed(self._held) if replica not in used)]:
            if free[rank] < replica_slots:
                free[rank] += 1
                kept.append((expert, rank))
        self._held = kept[::-1]


def sent_rows(counts_RE: Integers, quotas_ER: Integers, ranks_per_node: int) -> tuple[int, int]:
    """Assignments that leave their rank, and those of them that leave its node, as `moe.placement.quotas.shares` sends
    them."""
    own_ER = np.minimum(counts_RE.T, quotas_ER)
    starts = np.arange(0, counts_RE.shape[0], ranks_per_node)
    demand = np.add.reduceat(counts_RE.T - own_ER, starts, axis=1)
    headroom = np.add.reduceat(quotas_ER - own_ER, starts, axis=1)
    off_rank = int(demand.sum())
    return off_rank, off_rank - int(np.minimum(demand, headroom).sum())


def spread(counts_RE: Integers, ranks: int) -> Integers:
    """The same assignments from another number of ranks: each is split, to one assignment evenly in total and of each
    expert, or neighbours are added up."""
    sources, experts = counts_RE.shape
    num_chunks = math.lcm(sources, ranks) // sources
    ends = counts_RE.cumsum(1)[:, None]  # a rank's assignments are numbered; each parts-th is of one part
    chunk = np.arange(num_chunks)[:, None]
    split = (ends + num_chunks - 1 - chunk) // num_chunks - (
        ends - counts_RE[:, None] + num_chunks - 1 - chunk
    ) // num_chunks
    return split.reshape(ranks, -1, experts).sum(1)


def correlation(totals: Sequence[Integers]) -> float | None:
    """Of the experts' counts [E] in a call with those in the next, on average; None where nothing varies."""
    found = [np.corrcoef(now, then)[0, 1] for now, then in zip(totals, totals[1:]) if now.std() > 0 and then.std() > 0]
    return float(np.mean(found)) if found else None
