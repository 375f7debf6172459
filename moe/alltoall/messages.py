"""Tensors to and from ranks of a group: one message for each pair of ranks and direction, whatever it holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

Parts = Mapping[int, Sequence[torch.Tensor]]  # by rank of the group: contiguous tensors, in an order that both know


class Messages:
    """An exchange that is on its way."""

    def __init__(self, group: dist.ProcessGroup, sends: Parts, receives: Parts) -> None:
        """Start sending and receiving. Both sides list the same sizes in the same order; all ranks that take part in a
        message call this in the same order. What is sent must stay as it is until `wait`."""
        self._arriving: list[tuple[torch.Tensor, Sequence[torch.Tensor]]] = []
        self._sent = [(_packed(parts), rank) for rank, parts in sorted(sends.items()) if parts]
        self.sent_bytes = sum(each.nbytes for each, _ in self._sent)
        operations: list[dist.P2POp] = []  # receives first, which gloo has ready then
        for rank, parts in sorted(receives.items()):
            if not parts:
                continue
            if len(parts) == 1:
                message = _flat(parts[0])
            else:
                message = parts[0].new_empty(sum(each.nbytes for each in parts), dtype=torch.uint8)
                self._arriving.append((message, parts))
            operations.append(dist.P2POp(dist.irecv, message, group=group, group_peer=rank))
        operations += [dist.P2POp(dist.isend, each, group=group, group_peer=rank) for each, rank in self._sent]
        self._works: list[Any] = dist.batch_isend_irecv(operations) if operations else []
        self._num_received = len(operations) - len(self._sent)

    def wait(self) -> None:
        """Until everything is where it is to be; on a GPU, once the current stream gets there."""
        self.wait_received()
        for work in self._works:
            work.wait()
        self._works, self._sent = [], []

    def wait_received(self) -> None:
        """Until what comes is there; what is sent must stay as it is until `wait`."""
        each_has_one = len(self._works) == self._num_received + len(self._sent)  # NCCL has one for all
        number = self._num_received if each_has_one else len(self._works)
        for work in self._works[:number]:
            work.wait()
        self._works, self._num_received = self._works[number:], 0
        for message, parts in self._arriving:
            for part, piece in zip(parts, message.split([each.nbytes for each in parts]), strict=True):
                _flat(part).copy_(piece)
        self._arriving = []


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def _packed(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return _flat(parts[0]) if len(parts) == 1 else torch.cat([_flat(each) for each in parts])
