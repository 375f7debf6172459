"""Copies of other ranks' experts: the memory that they lie in, and how weights come to it and gradients go home.

A copy is a cache of the home's weights for one step: the optimizer never sees it. Its gradients add up beside it in
fp32, and go home once: when another expert gets the slot, or in the layer's last backward pass of the step. Where
gradients are added block by block (`Slab.block_rows`), each call sends those of its blocks instead.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from moe.alltoall.messages import Messages
from moe.experts.bitwise import BlockGrads
from moe.experts.weights import Slab, WeightGrads, Weights, wide
from parallel.megatron.grad_buffers import add_with_next
from parallel.trace import named

ByRank = defaultdict[int, list[torch.Tensor]]  # what goes to each rank, or comes from it


class HeldCopy(NamedTuple):
    """An expert's home and where a copy of it lies."""

    home: int  # rank
    home_slot: int
    rank: int
    slot: int


class ExpertBlocks(NamedTuple):
    """One expert's blocks in a call."""

    expert: int  # its number here: a slot at home or, behind those, of a copy
    home: int  # its home's rank
    ranks: list[int]  # which rank computes each block, in the order of adding


class CopySlots:
    """A layer's slots for copies on this rank. A slot is one contiguous record of an expert's matrices."""

    def __init__(self, group: dist.ProcessGroup, num_slots: int, like: Slab) -> None:
        """like: the experts at home here."""
        self.group, self.rank = group, group.rank()
        self._shapes = [each.shape[1:] for each in like.tensors]
        self._sizes = [math.prod(shape) for shape in self._shapes]
        # What lies at `like` may be on its way.
        self.weights = torch.zeros(num_slots, sum(self._sizes), dtype=like.fc1.dtype, device=like.fc1.device)
        self._grads: torch.Tensor | None = None  # once there are any
        self._written: set[int] = set()  # slots whose gradients are of this step
        # Gradients that came home, to be added to the home's own: (slot there, record).
        self.arrived: list[tuple[int, torch.Tensor]] = []
        # The host's kernels take matrices that follow one another; a grouped product takes them with a stride.
        records = self.weights.split(1) if like.fc1.device.type == "cpu" else (self.weights,)
        self.slabs = [like.like(*self._views(each)) for each in records]

    def _views(self, records: torch.Tensor) -> list[torch.Tensor]:
        """The matrices of records [n, size], by kind: [n, ...]."""
        parts = records.split(self._sizes, dim=1)
        return [part.unflatten(1, shape) for part, shape in zip(parts, self._shapes, strict=True)]

    @property
    def grads(self) -> torch.Tensor:
        """[slots, record], fp32 or wider."""
        if self._grads is None:
            self._grads = torch.empty_like(self.weights, dtype=wide(self.weights.dtype))
        return self._grads

    @property
    def nbytes(self) -> int:
        """What the slots take: weights and, once there were any, gradients."""
        return self.weights.nbytes + (0 if self._grads is None else self._grads.nbytes)

    def begin_passes(self) -> None:
        """Forget all gradients."""
        self._written.clear()
        self.arrived.clear()

    def empty_grads(self) -> torch.Tensor:
        """Room for one copy's."""
        return self.weights.new_empty(sum(self._sizes), dtype=wide(self.weights.dtype))

    def add(self, grads: WeightGrads, used: Sequence[int]) -> None:
        """Add a call's gradients of the copies in these slots to those of earlier calls."""
        made = {index: of_slab.finish() for index, of_slab in grads.take_others().items()}
        for slot in used:
            index, place = (1 + slot, 0) if len(self.slabs) > 1 else (1, slot)
            parts = [each[place] for each in made[index] if each is not None]
            for (total,), part in zip(self._views(self.grads[slot : slot + 1]), parts, strict=True):
                total.add_(part) if slot in self._written else total.copy_(part)
            self._written.add(slot)

    def leave(self, slot: int) -> torch.Tensor:
        """The gradients of a copy that go home now."""
        assert slot in self._written, f"the copy in slot {slot} has no gradients"
        self._written.remove(slot)
        return self.grads[slot]

    def add_arrived(self, home: Slab, grads: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
        """The gradients of the experts at home, as autograd gets them, with what their copies' add: where the parameter
        has a buffer, in the buffer and after them."""
        for slot, record in self.arrived:
            parts = iter(self._views(record[None]))
            for parameter, grad in zip(home.parameters, grads, strict=True):
                if grad is None or parameter is None:
                    continue
                part = next(parts)[0]
                if not add_with_next(parameter, slot, part):
                    grad[slot] += part
        self.arrived = []
        return tuple(grads)


class CallCopies:
    """The copies of one call: what travels before its experts compute, and after."""

    def __init__(
        self,
        slots: CopySlots,
        used: Sequence[int],
        fetched: Sequence[HeldCopy],
        leaving: Sequence[HeldCopy],
        blocks: Sequence[ExpertBlocks] = (),
    ) -> None:
        """used: slots of the copies here that take part; fetched: copies whose weights come; leaving: those whose slots
        they take, and whose gradients go home; both of all ranks in an order that all have. blocks: where weight
        gradients are added block by block, of each expert that has copies, and is at home or copied here."""
        self._slots, self._used, self._blocks = slots, used, blocks
        self._fetched, self._leaving = fetched, leaving
        self._messages: Messages | None = None
        self.on_sent: Callable[[int], None] = lambda num_bytes: None
        # Called in the backward pass: the copies whose gradients go home in it.
        self.on_backward: Callable[[], Sequence[HeldCopy]] = tuple

    def weights(self, home: Slab) -> Weights:
        """The experts at home here, and after them the slots for copies."""
        return Weights((home, *self._slots.slabs))

    @property
    def apart(self) -> list[int]:
        """Numbers of the experts here whose gradients are kept block by block."""
        return [each.expert for each in self._blocks]

    @named("copies")
    def fetch(self, home: Slab) -> None:
        """Start what travels before the experts compute."""
        sends: ByRank = defaultdict(list)
        receives: ByRank = defaultdict(list)
        for copy in self._fetched:
            if copy.home == self._slots.rank:
                sends[copy.rank] += [each[copy.home_slot] for each in home.tensors]
            elif copy.rank == self._slots.rank:
                receives[copy.home].append(self._slots.weights[copy.slot])
        self._start(sends, receives, self._leaving)

    @named("copies")
    def return_grads(self, grads: WeightGrads | None) -> None:
        """Add the call's gradients of copies here to those of earlier calls, and start sending home those that are
        complete; block by block all are, and the experts' at home have them then."""
        complete = self.on_backward()
        if isinstance(grads, BlockGrads):
            self._return_blocks(grads)
        elif grads is not None:
            self._slots.add(grads, self._used)
            self._start(defaultdict(list), defaultdict(list), complete)

    def _start(self, sends: ByRank, receives: ByRank, copies: Sequence[HeldCopy]) -> None:
        slots = self._slots
        for copy in copies:
            if copy.rank == slots.rank:
                sends[copy.home].append(slots.leave(copy.slot))
            elif copy.home == slots.rank:
                slots.arrived.append((copy.home_slot, slots.empty_grads()))
                receives[copy.rank].append(slots.arrived[-1][1])
        self._messages = Messages(slots.group, sends, receives)
        self.on_sent(self._messages.sent_bytes)

    @named("copies wait")
    def wait(self) -> None:
        """Until what was started is there."""
        if self._messages is not None:
            self._messages.wait()
            self._messages = None

    def take_arrived(self) -> list[tuple[int, torch.Tensor]]:
        """Hand out the gradients that came home: the slot of each, and its record."""
        arrived, self._slots.arrived = self._slots.arrived, []
        return arrived

    def add_arrived(self, home: Slab, grads: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
        """The gradients of the experts at home here, with what came of their copies: see `CopySlots`."""
        return self._slots.add_arrived(home, grads)

    def _return_blocks(self, grads: BlockGrads) -> None:
        # One expert after the other, as all ranks do; those at home here are added in the blocks' order.
        group, rank = self._slots.group, self._slots.rank
        for expert, home, ranks in self._blocks:
            own = grads.apart.pop(expert)
            sends: dict[int, list[torch.Tensor]] = {}
            receives: ByRank = defaultdict(list)
            in_order = []
            if home != rank:
                sends[home] = [part for partial in own for part in partial]
            else:
                partials = iter(own)
                in_order = [next(partials) if by == rank else grads.empty_partial() for by in ranks]
                for by, partial in zip(ranks, in_order, strict=True):
                    receives[by] += () if by == rank else partial
            messages = Messages(group, sends, receives)
            messages.wait()
            self.on_sent(messages.sent_bytes)
            for partial in in_order:
                grads.add_partial(expert, partial)
