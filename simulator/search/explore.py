"""Best first: what may be fastest is looked at next, until nothing that is left can beat what was found.

A node stands for candidates and has seconds that none of them is below. It is a micro-batch size (and all larger ones)
of a group and a number of chunks; a layout; a layout with a number of chunks of its MoE layers, before and after its
memory was counted; a candidate that fits.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from configs import derived
from configs.schema import Config
from optim.arrangement.arrange import Arrangement
from simulator.clock.prediction import Prediction
from simulator.search.answer import LayoutMemory, MemoryLimits, SearchCounts
from simulator.search.floor import LayoutFloor
from simulator.search.memory import LayoutSizer
from simulator.search.space import LayoutCell, LayoutGroup, LayoutSpace, Saving, is_legal

SAME = 1e-9  # relative difference of seconds that are taken to be the same
Predict = Callable[[Config, Sequence[Arrangement | None] | None], Prediction]


@dataclass(frozen=True)
class Candidate:
    """A candidate that fits, with its time."""

    cell: LayoutCell
    saving: Saving
    prediction: Prediction
    memory: LayoutMemory

    @property
    def rank(self) -> tuple[Any, ...]:
        """The fastest first; of those as fast, the simplest."""
        return float(f"{self.prediction.seconds:.9g}"), *simplicity(self.cell, self.saving)


@dataclass(frozen=True)
class Node:
    """Candidates that take `bound` seconds at least. `rest`: indices of what the micro-batch sizes go on with."""

    kind: str
    bound: float
    group: LayoutGroup
    chunks: int | None
    cell: LayoutCell | None = None
    row: tuple[Saving, ...] = ()  # with one degree, what keeps most first
    index: int = 0
    memory: LayoutMemory | None = None

    @property
    def order(self) -> tuple[Any, ...]:
        """Before which node it is looked at."""
        group = self.group
        used = sum(size > 1 for size in (group.tensor, group.pipeline, group.context, group.expert))
        return self.bound, used, group.tensor, group.pipeline, group.context, group.expert


def simplicity(cell: LayoutCell, saving: Saving) -> tuple[Any, ...]:
    """Fewer dimensions, less recomputation, no tiers, fewer chunks, small sizes."""
    group = cell.group
    dimensions = (group.tensor, group.pipeline, group.context, group.expert, group.expert_tensor or 1)
    used = sum(size > 1 for size in dimensions) + (cell.chunks is not None) + group.sequence
    degree = saving.degree if isinstance(saving.degree, int) else 0
    chosen = (cell.heads is not None, cell.heads or 0, group.expert_tensor is not None)
    return used, saving.steps, degree, dimensions, cell.chunks or 1, chosen, cell.micro, saving.strategy


class LayoutExplorer:
    """Explores a space. `predict` takes a config and arrangements, `least` a config; see simulator/search/timer.py.
    `near`: a share of the best's seconds by which nothing need be faster to be looked at; 0: the best is exact."""

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
        self._rows_of: dict[tuple[int, bool], list[tuple[Saving, ...]]] = {}
        self._streamed: set[LayoutGroup] = set()  # groups whose experts must leave the device
        self._heap: list[tuple[tuple[Any, ...], int, Node]] = []
        self._number = 0
        self._begin()

    def counts(self) -> SearchCounts:
        """What became of all candidates: those that nobody looked at were bounded by time."""
        rest = self.candidates - self.bounded_by_memory - self.too_large - self.timed
        best, left = self.best, 0
        if best is not None and self.near:
            left = sum(self._number_of(node) for _, _, node in self._heap if node.bound < best.prediction.seconds)
        left = min(left, rest)
        return SearchCounts(
            self.candidates, rest - left, self.bounded_by_memory, self.too_large, self.timed, left, self.near
        )

    def _number_of(self, node: Node) -> int:
        """Candidates that a node stands for."""
        if node.kind != "micro":
            return len(node.row)
        assert node.cell is not None
        return len(self._savings(node.cell)) * self.space.num_cells(node.group, node.chunks, node.index)

    @property
    def best(self) -> Candidate | None:
        """The fastest found."""
        return min(self.found, key=lambda each: each.rank, default=None)

    def run(self, most_nodes: float = float("inf")) -> None:
        """Look at nodes until none can be faster than the best found, by more than is near; or at so many."""
        best, looked = float("inf"), 0
        while self._heap and looked < most_nodes:
            node = self._heap[0][2]
            if node.bound > best * (1 + SAME if not self.near else 1 - self.near):
                break
            heapq.heappop(self._heap)
            looked += 1
            before = len(self.found)
            for child in getattr(self, f"_{node.kind}")(node):
                self._push(child)
            best = min([best, *(each.prediction.seconds for each in self.found[before:])])

    def _push(self, node: Node) -> None:
        self._number += 1
        heapq.heappush(self._heap, (node.order, self._number, node))

    def _begin(self) -> None:
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
                self._streamed.add(group)  # weights and gradients of all experts are too large
                self.bounded_by_memory += number * sum(not saving.streams for saving in savings)
            for chunks in self.space.chunks_of(group):
                for node in self._micro_from(group, chunks, 0):
                    self._push(node)

    def _micro_from(self, group: LayoutGroup, chunks: int | None, index: int) -> Iterator[Node]:
        """Larger micro-batches have a larger floor: the pipeline waits longer."""
        micros = self.space.micros_of(group, chunks)
        if index < len(micros):
            cell = LayoutCell(group, chunks, self.space.first_heads, micros[index])
            rows = self._rows(cell)
            if rows:
                bound = self.floor.seconds(cell, [row[0] for row in rows], self.space.first_heads)
                yield Node("micro", bound, group, chunks, cell, index=index)

    def _rows(self, cell: LayoutCell) -> list[tuple[Saving, ...]]:
        """The savings that the rules allow, by degree."""
        savings = self.space.legal_savings(cell)
        key = id(savings), cell.group in self._streamed
        if key not in self._rows_of:
            self._rows_of[key] = _parts(self._savings(cell), lambda each: (each.degree, each.backward_degree))
        return self._rows_of[key]

    def _savings(self, cell: LayoutCell) -> list[Saving]:
        """What the rules and a bound of the group's memory allow."""
        savings = self.space.legal_savings(cell)
        return [each for each in savings if each.streams] if cell.group in self._streamed else savings

    def _micro(self, node: Node) -> Iterator[Node]:
        """The next micro-batch size, and the layouts with this one."""
        assert node.cell is not None
        savings = self._savings(node.cell)
        room = self.limits.device - self.sizer.staying_bytes(node.cell, _leaves(savings), _stream(savings))
        numbers = self.space.heads_of(node.group, node.chunks, node.cell.micro)
        if room < 0 or (numbers and self.sizer.has_no_room(replace(node.cell, heads=numbers[0]), savings, room)):
            self.bounded_by_memory += len(savings) * self.space.num_cells(node.group, node.chunks, node.index)
            return
        yield from self._micro_from(node.group, node.chunks, node.index + 1)
        for heads in numbers:
            cell = replace(node.cell, heads=heads)
            used = derived.context_heads(self.space.layout(cell, savings[0]))
            for row in self._rows(cell):
                bound = max(node.bound, self.floor.seconds(cell, [row[0]], used), self.floor.streamed(cell, row))
                yield replace(node, kind="row", cell=cell, row=row, bound=bound)

    def _row(self, node: Node) -> Iterator[Node]:
        """A closer bound, of this layout alone."""
        assert node.cell is not None
        config = self.space.layout(node.cell, node.row[0])
        if not is_legal(config, self.space.world_size):
            self.candidates -= len(node.row)
            return
        yield replace(node, kind="sized", bound=max(node.bound, self._least(node.cell, node.row[0])))

    def _least(self, cell: LayoutCell, saving: Saving) -> float:
        closer = self.floor.closer(cell, saving)
        return self.least(self.space.layout(cell, saving)) if closer is None else closer

    def _sized(self, node: Node) -> Iterator[Node]:
        """What keeps most, and what else may be faster: state in tiers is updated beside the passes, and waits for
        them. Where there is room for state on the device and for what tiers need there, what keeps less of the layers
        is no faster, and auto is the device."""
        assert node.cell is not None
        first = node.row[0]
        parts = _parts(node.row, _kept_alike)
        parts[0] = parts[0][1:]
        memory = None if self._keeps_too_much(node.cell, [first]) else self._fitting(node.cell, first)
        if memory is None:
            self.too_large += 1
        else:
            yield replace(node, kind="candidate", row=(first,), memory=memory)
            if first.state_device == "device" and self._has_room_beside(node, memory):
                others = [part for part in parts[1:] if not first.is_below(part[0])]
                parts = [tuple(each for each in part if each.state_device != "auto") for part in [parts[0], *others]]
        used = derived.context_heads(self.space.layout(node.cell, first))
        for part in parts:
            if part:  # what computes again is bounded by that before it is looked at
                bound = max(node.bound, self.floor.seconds(node.cell, [part[0]], used))
                bound = max(bound, self.floor.streamed(node.cell, part))
                yield replace(node, kind="saved", row=part, bound=bound)

    def _has_room_beside(self, node: Node, memory: LayoutMemory) -> bool:
        """Whether a device has room for slots and new weights of all state beside what it holds."""
        assert node.cell is not None
        if not _leaves(node.row):
            return True
        state = self.sizer.staying_bytes(node.cell, False) - self.sizer.staying_bytes(node.cell, True)
        return memory.device + state <= self.limits.device

    def _saved(self, node: Node) -> Iterator[Node]:
        """Layers that are kept alike, unless what they keep is more than the device has room for."""
        assert node.cell is not None
        if self._keeps_too_much(node.cell, node.row):
            self.bounded_by_memory += len(node.row)
        else:
            yield replace(node, kind="tiers", bound=max(node.bound, self._least(node.cell, node.row[0])))

    def _keeps_too_much(self, cell: LayoutCell, row: Sequence[Saving]) -> bool:
        least = self.sizer.staying_bytes(cell, _leaves(row), _stream(row)) + self.sizer.kept_floor(cell, row[0])
        return least > self.limits.device

    def _tiers(self, node: Node) -> Iterator[Node]:
        """The tiers and engines that fit."""
        assert node.cell is not None
        if self.sizer.beside_state(node.cell, node.row[0], _leaves(node.row)) > self.limits.device:
            self.bounded_by_memory += len(node.row)
            return
        for saving in node.row:
            memory = self._fitting(node.cell, saving)
            if memory is None:
                self.too_large += 1
            else:
                yield replace(node, kind="candidate", row=(saving,), memory=memory)

    def _fitting(self, cell: LayoutCell, saving: Saving) -> LayoutMemory | None:
        memory = self.sizer.memory(cell, saving)
        limits = self.limits
        fits = memory.device <= limits.device and memory.host <= limits.host and memory.disk <= limits.disk
        return memory if fits else None

    def _candidate(self, node: Node) -> Iterator[Node]:
        """The time of what fits."""
        assert node.cell is not None and node.memory is not None
        self.timed += 1
        prediction = self.time(node.cell, node.row[0])
        self.found.append(Candidate(node.cell, node.row[0], prediction, node.memory))
        yield from ()

    def time(self, cell: LayoutCell, saving: Saving) -> Prediction:
        """What the clock says of a candidate, with optimizer state where it lies then."""
        return self.predict(self.space.layout(cell, saving), self.sizer.arrangements(cell, saving))


def _leaves(savings: Sequence[Saving]) -> bool:
    """Whether optimizer state may leave the device."""
    return any(saving.state_device != "device" for saving in savings)


def _stream(savings: Sequence[Saving]) -> bool:
    """Whether experts' weights may lie off the device."""
    return any(saving.streams for saving in savings)


def _kept_alike(saving: Saving) -> tuple[Any, ...]:
    return saving.recompute, saving.offload, saving.strategy, saving.weights_device, saving.pass_order


def _parts(savings: Sequence[Saving], key: Callable[[Saving], Any]) -> list[tuple[Saving, ...]]:
    """Savings that are alike in something, in their order."""
    found: dict[Any, list[Saving]] = {}
    for saving in savings:
        found.setdefault(key(saving), []).append(saving)
    return [tuple(part) for part in found.values()]
