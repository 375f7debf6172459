"""Exchange of tensors between ranks of a group: one message for each pair of ranks and direction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

# Rank of the group -> contiguous tensors, in an order that both ranks know.
RankTensors = Mapping[int, Sequence[torch.Tensor]]


class Messages:
    """A batch of point-to-point messages in flight between ranks. Each message packs all tensors for one rank."""

    def __init__(self, group: dist.ProcessGroup, sends: RankTensors, receives: RankTensors) -> None:
        """Start sending and receiving. Sent tensors must not change until `wait`.

        Sender and receiver of a message must list tensors of the same sizes in the same order. Two ranks must create
        their batches of messages in the same order.
        """
        self._arriving: list[tuple[torch.Tensor, Sequence[torch.Tensor]]] = []
        self._sent = [
            (_flat(tensors[0]) if len(tensors) == 1 else torch.cat([_flat(each) for each in tensors]), rank)
            for rank, tensors in sorted(sends.items())
            if tensors
        ]
        self.sent_bytes = sum(each.nbytes for each, _ in self._sent)
        operations: list[dist.P2POp] = []  # receives first, so that gloo has posted them before the sends
        for rank, tensors in sorted(receives.items()):
            if not tensors:
                continue
            if len(tensors) == 1:
                message = _flat(tensors[0])
            else:
                message = tensors[0].new_empty(sum(each.nbytes for each in tensors), dtype=torch.uint8)
                self._arriving.append((message, tensors))
            operations.append(dist.P2POp(dist.irecv, message, group=group, group_peer=rank))
        operations += [dist.P2POp(dist.isend, each, group=group, group_peer=rank) for each, rank in self._sent]
        self._works: list[Any] = dist.batch_isend_irecv(operations) if operations else []
        self._num_received = len(operations) - len(self._sent)

    def wait(self) -> None:
        """Wait until all messages are sent and received; on a GPU only the current stream waits."""
        self.wait_received()
        for work in self._works:
            work.wait()
        self._works, self._sent = [], []

    def wait_received(self) -> None:
        """Wait until all messages are received. Sent tensors still must not change until `wait`."""
        each_has_one = len(self._works) == self._num_received + len(self._sent)  # NCCL has one work for all
        number = self._num_received if each_has_one else len(self._works)
        for work in self._works[:number]:
            work.wait()
        self._works, self._num_received = self._works[number:], 0
        for message, tensors in self._arriving:
            for tensor, received in zip(tensors, message.split([each.nbytes for each in tensors]), strict=True):
                _flat(tensor).copy_(received)
        self._arriving = []


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)
