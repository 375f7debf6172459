"""Best-first search of layouts (branch and bound), until no remaining candidate can be faster than the best one found.

A node stands for a set of candidates and has a lower bound of their seconds. From coarse to fine it is: all micro-batch
sizes from one on, for a group and a number of model chunks; a layout; a layout with a chunk plan of its MoE layers,
before and after its memory was counted; a candidate that fits.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from configs import derived
from configs.schema import Config
from optim.arrangement.buckets import Arrangement
from simulator.clock.prediction import Prediction
from simulator.search.answer import SearchCounts
from simulator.search.floor import LayoutFloor
from simulator.search.sizer import LayoutMemory, LayoutSizer, MemoryLimits
from simulator.search.space import LayoutCell, LayoutGroup, LayoutSpace, Saving, is_legal

SAME = 1e-9  # relative difference up to which seconds count as equal
Predict = Callable[[Config, Sequence[Arrangement | None] | None], Prediction]


@dataclass(frozen=True)
class Candidate:
    """A layout that fits into memory, with its memory savings and its predicted step time. `cell`: the layout."""

    cell: LayoutCell
    saving: Saving
    prediction: Prediction
    memory: LayoutMemory

    @property
    def rank(self) -> tuple[Any, ...]:
        """Sort key: the fastest first, and the simplest among equally fast ones."""
        return float(f"{self.prediction.seconds:.9g}"), *simplicity(self.cell, self.saving)


@dataclass(frozen=True)
class Node:
    """A set of candidates (layouts with memory savings) that all take at least `bound` seconds.

    `kind`: how far they are examined: micro, layout, sized, kept, offload or candidate (a single one).
    """

    kind: str
    bound: float
    group: LayoutGroup
    chunks: int | None
    cell: LayoutCell
    savings: tuple[Saving, ...] = ()  # all with the same numbers of chunks; the one that keeps most on the device first
    index: int = 0  # of the micro-batch size
    memory: LayoutMemory | None = None

    @property
    def order(self) -> tuple[Any, ...]:
        """Sort key: the lowest bound first, and the fewest parallel dimensions among equal bounds."""
        group = self.group
        used = sum(size > 1 for size in (group.tensor, group.pipeline, group.context, group.expert))
        return self.bound, used, group.tensor, group.pipeline, group.context, group.expert


def simplicity(cell: LayoutCell, saving: Saving) -> tuple[Any, ...]:
    """Return a sort key: fewer parallel dimensions, less recomputation, no offloading, fewer chunks, small sizes."""
    group = cell.group
    dimensions = (group.tensor, group.pipeline, group.context, group.expert, group.expert_tensor or 1)
    used = sum(size > 1 for size in dimensions) + (cell.chunks is not None) + group.sequence
    degree = saving.degree if isinstance(saving.degree, int) else 0
    chosen = (cell.heads is not None, cell.heads or 0, group.expert_tensor is not None)
    return used, saving.steps, degree, dimensions, cell.chunks or 1, chosen, cell.micro, saving.strategy


class LayoutExplorer:
    """Explores a search space and collects the candidates that it timed.

    `predict` takes a config and arrangements of optimizer state, `least` takes a config (simulator/search/timer.py).
    `near`: candidates that are faster than the best by at most this share of its seconds are not examined; with 0 the
    best is exact.
    """

    def __init__(
        self,
        space: LayoutSpace,
        sizer: LayoutSizer,
        limits: MemoryLimits,
        predict: Predict,
        least: Callable[[Config], float],
        floor: LayoutFloor,
        near: float = 0.0,
    ) -> None:
        self.space, self.sizer, self.limits, self.predict, self.least = space, sizer, limits, predict, least
        self.floor, self.near = floor, near
        self.found: list[Candidate] = []
        self.candidates = self.bounded_by_memory = self.too_large = self.timed = 0
        self._by_degree: dict[tuple[int, bool], list[tuple[Saving, ...]]] = {}
        self._must_offload: set[LayoutGroup] = set()  # groups whose experts do not fit on the device
        self._heap: list[tuple[tuple[Any, ...], int, Node]] = []
        self._number = 0
        self._push_groups()

    def counts(self) -> SearchCounts:
        """Return the number of candidates by outcome; candidates that were not examined count as bounded by time."""
        rest = self.candidates - self.bounded_by_memory - self.too_large - self.timed
        best, left = self.best, 0
        if best is not None and self.near:
            for _, _, node in self._heap:
                if node.bound < best.prediction.seconds:
                    of_micro = node.kind == "micro"
                    num_cells = self.space.num_cells(node.group, node.chunks, node.index) if of_micro else 1
                    left += num_cells * len(self._savings(node.cell) if of_micro else node.savings)
        left = min(left, rest)
        return SearchCounts(
            self.candidates, rest - left, self.bounded_by_memory, self.too_large, self.timed, left, self.near
        )

    @property
    def best(self) -> Candidate | None:
        """The fastest candidate found; None if none fits so far."""
        return min(self.found, key=lambda each: each.rank, default=None)

    def run(self, most_nodes: float = float("inf")) -> None:
        """Examine at most `most_nodes` sets of candidates, until none can beat the best by more than `near`."""
        best, examined = float("inf"), 0
        while self._heap and examined < most_nodes:
            node = self._heap[0][2]
            if node.bound > best * (1 + SAME if not self.near else 1 - self.near):
                break
            heapq.heappop(self._heap)
            examined += 1
            before = len(self.found)
            for child in getattr(self, f"_{node.kind}")(node):
                self._push(child)
            best = min([best, *(each.prediction.seconds for each in self.found[before:])])

    def _push(self, node: Node) -> None:
        self._number += 1
        heapq.heappush(self._heap, (node.order, self._number, node))

    def _push_groups(self) -> None:
        for group in self.space.groups():
            cell = next(self.space.cells(group))
            savings = self.space.legal_savings(cell)
            number = self.space.num_cells(group)
            count = number * len(savings)
            self.candidates += count
            if self.sizer.least_device_bytes(cell, _leaves(savings), _stream(savings)) > self.limits.device:
                self.bounded_by_memory += count
                continue
            if _stream(savings) and self.sizer.least_device_bytes(cell, _leaves(savings)) > self.limits.device:
                self._must_offload.add(group)  # weights and gradients of all experts are too large
                self.bounded_by_memory += number * sum(not saving.streams for saving in savings)
            for chunks in self.space.chunks_of(group):
                for node in self._micro_from(group, chunks, 0):
                    self._push(node)

    def _micro_from(self, group: LayoutGroup, chunks: int | None, index: int) -> Iterator[Node]:
        """Yield the node (set of candidates) with all micro-batch sizes from `index` on.

        Its bound is that of the first size, because with larger micro-batches the pipeline waits longer.
        """
        micros = self.space.micros_of(group, chunks)
        if index < len(micros):
            cell = LayoutCell(group, chunks, self.space.first_heads, micros[index])
            if by_degree := self._savings_by_degree(cell):
                bound = self.floor.seconds(cell, [savings[0] for savings in by_degree], self.space.first_heads)
                yield Node("micro", bound, group, chunks, cell, index=index)

    def _savings_by_degree(self, cell: LayoutCell) -> list[tuple[Saving, ...]]:
        """Return the memory savings that a layout may use, grouped by the number of chunks of MoE layers."""
        savings = self.space.legal_savings(cell)
        key = id(savings), cell.group in self._must_offload
        if key not in self._by_degree:
            self._by_degree[key] = _grouped(self._savings(cell), lambda each: (each.degree, each.backward_degree))
        return self._by_degree[key]

    def _savings(self, cell: LayoutCell) -> list[Saving]:
        """Return the memory savings that the rules allow for a layout and that a lower bound of its memory permits."""
        savings = self.space.legal_savings(cell)
        return [each for each in savings if each.streams] if cell.group in self._must_offload else savings

    def _micro(self, node: Node) -> Iterator[Node]:
        """Split a set of candidates: yield the set with larger micro-batches, and layouts with the smallest size."""
        savings = self._savings(node.cell)
        headroom = self.limits.device - self.sizer.fixed_bytes(node.cell, _leaves(savings), _stream(savings))
        numbers = self.space.heads_of(node.group, node.chunks, node.cell.micro)
        if headroom < 0 or (numbers and self.sizer.exceeds(replace(node.cell, heads=numbers[0]), savings, headroom)):
            self.bounded_by_memory += len(savings) * self.space.num_cells(node.group, node.chunks, node.index)
            return
        yield from self._micro_from(node.group, node.chunks, node.index + 1)
        for heads in numbers:
            cell = replace(node.cell, heads=heads)
            used = derived.context_heads(self.space.layout(cell, savings[0]))
            for own in self._savings_by_degree(cell):
                bound = max(node.bound, self.floor.seconds(cell, [own[0]], used), self.floor.streamed(cell, own))
                yield replace(node, kind="layout", cell=cell, savings=own, bound=bound)

    def _layout(self, node: Node) -> Iterator[Node]:
        """Yield the node of a layout again with a higher lower bound, which is computed for this layout; nothing if the
        layout is not allowed."""
        config = self.space.layout(node.cell, node.savings[0])
        if not is_legal(config, self.space.world_size):
            self.candidates -= len(node.savings)
            return
        yield replace(node, kind="sized", bound=max(node.bound, self._least(node.cell, node.savings[0])))

    def _least(self, cell: LayoutCell, saving: Saving) -> float:
        closer = self.floor.closer(cell, saving)
        return self.least(self.space.layout(cell, saving)) if closer is None else closer

    def _sized(self, node: Node) -> Iterator[Node]:
        """Split a layout's candidates: yield the one that saves least memory if it fits, and others that may be faster.

        Offloaded state may be updated during the passes, which may be faster. But if all state and the staging buffers
        of offloading fit on the device, candidates that recompute more are no faster, and are left out.
        """
        first = node.savings[0]
        kept = attrgetter("recompute", "offload", "strategy", "weights_device", "pass_order")
        groups = _grouped(node.savings, kept)
        groups[0] = groups[0][1:]
        memory = None if self._keeps_too_much(node.cell, [first]) else self._fitting(node.cell, first)
        if memory is None:
            self.too_large += 1
        else:
            yield replace(node, kind="candidate", savings=(first,), memory=memory)
            needed = memory.device
            if _leaves(node.savings):  # staging buffers and new weights take at most as much as the state itself
                needed += self.sizer.fixed_bytes(node.cell, False) - self.sizer.fixed_bytes(node.cell, True)
            if first.state_device == "device" and needed <= self.limits.device:
                groups[1:] = [group for group in groups[1:] if not first.is_below(group[0])]
                groups = [tuple(each for each in group if each.state_device != "auto") for group in groups]
        used = derived.context_heads(self.space.layout(node.cell, first))
        for group in groups:
            if group:  # bounds include recomputation before a group is examined
                bound = max(node.bound, self.floor.seconds(node.cell, [group[0]], used))
                bound = max(bound, self.floor.streamed(node.cell, group))
                yield replace(node, kind="kept", savings=group, bound=bound)

    def _kept(self, node: Node) -> Iterator[Node]:
        """Yield the candidates of a layout that keep the same activations, unless these do not fit on the device."""
        if self._keeps_too_much(node.cell, node.savings):
            self.bounded_by_memory += len(node.savings)
        else:
            yield replace(node, kind="offload", bound=max(node.bound, self._least(node.cell, node.savings[0])))

    def _keeps_too_much(self, cell: LayoutCell, savings: Sequence[Saving]) -> bool:
        least = self.sizer.fixed_bytes(cell, _leaves(savings), _stream(savings))
        return least + self.sizer.kept_floor(cell, savings[0]) > self.limits.device

    def _offload(self, node: Node) -> Iterator[Node]:
        """Yield the candidates of a layout whose offload targets and update engines fit the memory."""
        if self.sizer.device_bytes(node.cell, node.savings[0], _leaves(node.savings)) > self.limits.device:
            self.bounded_by_memory += len(node.savings)
            return
        for saving in node.savings:
            memory = self._fitting(node.cell, saving)
            if memory is None:
                self.too_large += 1
            else:
                yield replace(node, kind="candidate", savings=(saving,), memory=memory)

    def _fitting(self, cell: LayoutCell, saving: Saving) -> LayoutMemory | None:
        """Return the memory of a candidate; None if it exceeds a limit."""
        memory = self.sizer.memory(cell, saving)
        fits = all(getattr(memory, target) <= getattr(self.limits, target) for target in ("device", "host", "disk"))
        return memory if fits else None

    def _candidate(self, node: Node) -> Iterator[Node]:
        """Time a candidate that fits, and add it to the candidates found. Yields nothing."""
        assert node.memory is not None
        self.timed += 1
        prediction = self.time(node.cell, node.savings[0])
        self.found.append(Candidate(node.cell, node.savings[0], prediction, node.memory))
        yield from ()

    def time(self, cell: LayoutCell, saving: Saving) -> Prediction:
        """Return the prediction of a candidate with its arrangement of offloaded optimizer state."""
        return self.predict(self.space.layout(cell, saving), self.sizer.arrangements(cell, saving))


def _leaves(savings: Sequence[Saving]) -> bool:
    """Return whether any of these memory savings offloads optimizer state."""
    return any(saving.state_device != "device" for saving in savings)


def _stream(savings: Sequence[Saving]) -> bool:
    """Return whether any of these memory savings offloads experts."""
    return any(saving.streams for saving in savings)


def _grouped(savings: Sequence[Saving], key: Callable[[Saving], Any]) -> list[tuple[Saving, ...]]:
    """Group memory savings with equal results of `key`, and keep their order."""
    found: dict[Any, list[Saving]] = {}
    for saving in savings:
        found.setdefault(key(saving), []).append(saving)
    return [tuple(group) for group in found.values()]
