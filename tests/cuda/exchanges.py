"""Exchanges between ranks as NCCL may run them at the latest: when somebody waits.

Until then receive buffers hold NaN, and what is sent is not read. The operations of a communicator run in the order of
their issue. Other collectives go over gloo at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from tests.cuda.device import host_of
from tests.cuda.observed import OBSERVED
from tests.cuda.streams import AT_SYNCHRONIZE, poison

_TAG = 7  # messages of two ranks match in their order
_queues: dict[dist.ProcessGroup, deque[_Exchange]] = {}


class _Exchange:
    """The sends and receives of one operation: tensors and the other end's rank in the group."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        sends: Iterable[tuple[torch.Tensor, int]],
        receives: Iterable[tuple[torch.Tensor, int]],
    ) -> None:
        self._group = group
        self._sends, self._receives = (
            [(host_of(t), rank) for t, rank in ends if t.numel()] for ends in (sends, receives)
        )
        for buffer, _ in self._receives:
            poison(buffer)
        self._is_done = False
        if OBSERVED.early:
            self.run()
        else:
            _queues.setdefault(group, deque()).append(self)

    def wait(self, *_: Any) -> bool:
        """The operations of the communicator up to this one."""
        if not OBSERVED.leaves_out("wait"):
            while not self._is_done:
                _queues[self._group].popleft().run()
        return True

    def run(self) -> None:
        self._is_done = True
        group = self._group
        mine = [tensor for tensor, rank in self._sends if rank == group.rank()]
        own = [tensor for tensor, rank in self._receives if rank == group.rank()]
        for target, source in zip(own, mine, strict=True):
            target.copy_(source)
        works = [
            dist.irecv(t, group=group, group_src=rank, tag=_TAG) for t, rank in self._receives if rank != group.rank()
        ]
        works += [
            dist.isend(t, group=group, group_dst=rank, tag=_TAG) for t, rank in self._sends if rank != group.rank()
        ]
        for work in works:
            work.wait()


def run_all() -> int:
    """Run what is left; how many operations nobody had waited for."""
    left = 0
    for queue in _queues.values():
        while queue:
            left += 1
            queue.popleft().run()
    return left


def forget() -> None:
    """Leave undone what is left: its process groups go."""
    _queues.clear()


def _all_to_all(
    outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], group: Any = None, async_op: bool = False
) -> Any:
    exchange = _Exchange(group or dist.group.WORLD, zip(inputs, range(len(inputs))), zip(outputs, range(len(outputs))))
    if async_op:
        return exchange
    exchange.wait()
    return None


def _batch(operations: Sequence[Any]) -> list[_Exchange]:
    group = operations[0].group or dist.group.WORLD
    sends = [(operation.tensor, operation.group_peer) for operation in operations if operation.op is dist.isend]
    receives = [(operation.tensor, operation.group_peer) for operation in operations if operation.op is dist.irecv]
    return [_Exchange(group, sends, receives)]


def install() -> None:
    """Put these in the place of torch's for the rest of the process; process groups say that they are NCCL's."""
    dist.all_to_all = _all_to_all
    dist.batch_isend_irecv = _batch
    dist.ProcessGroupNCCL = SimpleNamespace(Options=lambda **_: None)  # which gloo's groups do not read
    dist.get_backend = dist.distributed_c10d.get_backend = lambda group=None: "nccl"
    AT_SYNCHRONIZE.append(run_all)
