"""Copies of other ranks' experts: the memory that they lie in, and how weights come to it and gradients go home.

A copy is a cache of the home's weights for one step: the optimizer never sees it. Its gradients are added to the home's
in the layer's backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from moe.experts.bitwise import BlockGrads
from moe.experts.weights import Weights

Move = tuple[int, int]  # an expert's place on its home rank, as a slot, and the other rank


class CopySlots:
    """A layer's slots for copies on this rank."""

    def __init__(self, group: dist.ProcessGroup, num_slots: int, like: Weights) -> None:
        """like: the weights of the experts at home here."""
        self.group = group
        self.tensors = [own.new_zeros(num_slots, *own.shape[1:]) for own in like.tensors]

    def fetch(self, home: Weights, sends: Sequence[Move], receives: Sequence[Move]) -> list[Any]:
        """Start sending experts (slot here, rank) and receiving copies (slot of theirs, rank), in an order that all
        ranks have; what is to be waited for."""
        operations = []
        for own, copied in zip(home.tensors, self.tensors, strict=True):
            operations += [self.operation(dist.isend, own[slot], rank) for slot, rank in sends]
            operations += [self.operation(dist.irecv, copied[slot], rank) for slot, rank in receives]
        return dist.batch_isend_irecv(operations) if operations else []

    def operation(self, function: Any, tensor: torch.Tensor, rank: int) -> dist.P2POp:
        """A transfer with a rank of the group."""
        return dist.P2POp(function, tensor, group=self.group, group_peer=rank)


class ExpertBlocks(NamedTuple):
    """One expert's blocks in a call."""

    place: int  # its place here: a slot at home or, behind those, of a copy
    home: int  # its home's rank
    ranks: list[int]  # which rank computes each block, in the order of adding


class CallCopies:
    """The copies that take part in one call."""

    def __init__(
        self,
        slots: CopySlots,
        here: Sequence[int],
        homes: Sequence[int],
        away: Sequence[Move],
        arriving: Sequence[Any],
        blocks: Sequence[ExpertBlocks] = (),
    ) -> None:
        """here: the slots of this rank's copies, and `homes` the rank of each one's home, by expert; away: copies of
        experts at home here (home slot, rank), by rank and expert; arriving: what their weights are waited for with.
        blocks: where weight gradients are added block by block, of each expert that has copies, and is at home or
        copied here."""
        self._slots, self._here, self._homes, self._away = slots, list(here), list(homes), list(away)
        self._arriving, self._blocks = list(arriving), blocks
        self.on_return: Callable[[], None] | None = None  # called once the gradients are home

    @property
    def num_here(self) -> int:
        """Copies on this rank."""
        return len(self._here)

    def beside(self, home: Weights) -> Weights:
        """The experts at home here, and after them the copies."""
        for work in self._arriving:
            work.wait()
        self._arriving = []
        if not self._here:
            return home
        pairs = zip(home.tensors, self._slots.tensors, strict=True)
        return home.like(*(torch.cat([own, copied[self._here]]) for own, copied in pairs))

    @property
    def apart(self) -> list[int]:
        """Places of the experts here whose gradients are kept block by block."""
        return [each.place for each in self._blocks]

    def bring_blocks_home(self, grads: BlockGrads) -> None:
        """Add the gradients of all blocks of experts at home here, in their order; those of copies here go home. One
        expert after the other, as all ranks do."""
        group, rank = self._slots, self._slots.group.rank()
        for place, home, ranks in self._blocks:
            own = grads.apart.pop(place)
            if home != rank:
                sends = [group.operation(dist.isend, part, home) for partial in own for part in partial]
                _wait_for(sends)
                continue
            partials = iter(own)
            in_order = [next(partials) if by == rank else grads.empty_partial() for by in ranks]
            _wait_for(
                [
                    group.operation(dist.irecv, part, by)
                    for by, partial in zip(ranks, in_order, strict=True)
                    for part in (() if by == rank else partial)
                ]
            )
            for partial in in_order:
                grads.add_partial(place, partial)
        self._return()

    def bring_home(self, grads: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
        """The gradients of the experts at home here, with what their copies add, in the order of ranks; those of copies
        here go home."""
        operations: list[dist.P2POp] = []
        arrivals: list[tuple[torch.Tensor, torch.Tensor]] = []
        own_grads: list[torch.Tensor | None] = []
        for grad in grads:
            if grad is None:
                own_grads.append(None)
                continue
            own, copied = grad.split([len(grad) - len(self._here), len(self._here)])
            own_grads.append(own)
            operations += [
                self._slots.operation(dist.isend, part, rank) for part, rank in zip(copied, self._homes, strict=True)
            ]
            for slot, rank in self._away:
                arrivals.append((own[slot], torch.empty_like(own[slot])))
                operations.append(self._slots.operation(dist.irecv, arrivals[-1][1], rank))
        _wait_for(operations)
        for own, arrival in arrivals:
            own += arrival
        self._return()
        return tuple(own_grads)

    def _return(self) -> None:
        if self.on_return is not None:
            self.on_return()


def _wait_for(operations: list[dist.P2POp]) -> None:
    for work in dist.batch_isend_irecv(operations) if operations else []:
        work.wait()
