"""Copies of other ranks' experts: the memory that they lie in, and how weights come to it and gradients go home.

A copy is a cache of the home's weights for one step: the optimizer never sees it. Its gradients are added to the home's
in the layer's backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from moe.experts.weights import Weights

Move = tuple[int, int]  # an expert's place on its home rank, as a slot, and the other rank


def _of(weights: Weights) -> list[torch.Tensor]:
    """Its tensors, by expert."""
    tensors = (weights.fc1, weights.fc2, weights.fc1_bias, weights.fc2_bias)
    return [tensor.detach() for tensor in tensors if tensor is not None]


class CopySlots:
    """A layer's slots for copies on this rank."""

    def __init__(self, group: dist.ProcessGroup, num_slots: int, like: Weights) -> None:
        """like: the weights of the experts at home here."""
        self.group = group
        self.tensors = [own.new_zeros(num_slots, *own.shape[1:]) for own in _of(like)]

    def fetch(self, home: Weights, sends: Sequence[Move], receives: Sequence[Move]) -> list[Any]:
        """Start sending experts (slot here, rank) and receiving copies (slot of theirs, rank), in an order that all
        ranks have; what is to be waited for."""
        operations = []
        for own, copied in zip(_of(home), self.tensors, strict=True):
            operations += [self.operation(dist.isend, own[slot], rank) for slot, rank in sends]
            operations += [self.operation(dist.irecv, copied[slot], rank) for slot, rank in receives]
        return dist.batch_isend_irecv(operations) if operations else []

    def operation(self, function: Any, tensor: torch.Tensor, rank: int) -> dist.P2POp:
        """A transfer with a rank of the group."""
        return dist.P2POp(function, tensor, group=self.group, group_peer=rank)


class CallCopies:
    """The copies that take part in one call."""

    def __init__(
        self, slots: CopySlots, here: Sequence[int], homes: Sequence[int], away: Sequence[Move], arriving: Sequence[Any]
    ) -> None:
        """here: the slots of this rank's copies, and `homes` the rank of each one's home, by expert; away: copies of
        experts at home here (home slot, rank), by rank and expert; arriving: what their weights are waited for with."""
        self._slots, self._here, self._homes, self._away = slots, list(here), list(homes), list(away)
        self._arriving = list(arriving)
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
        fc1, fc2, *biases = (
            torch.cat([own, copied[self._here]]) for own, copied in zip(_of(home), self._slots.tensors, strict=True)
        )
        fc1_bias, fc2_bias = biases or (None, None)
        return Weights(fc1, fc2, fc1_bias, fc2_bias, home.activation)

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
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()
        for own, arrival in arrivals:
            own += arrival
        if self.on_return is not None:
            self.on_return()
        return tuple(own_grads)
