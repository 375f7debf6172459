"""Collectives over gloo that use a link both ways at once, as NCCL's do: in place of torch's, in a benchmark's ranks.

gloo's own post each send before its receive. The notice that a late rank is ready then waits behind its own payload,
and the two directions run one after the other: now and then, so that a step's time differs by a fifth from run to run.
Here all receives are posted first, and collectives are rings: each rank sends to the next one alone, 2 (n - 1) / n of
an all-reduce's bytes, (n - 1) / n for a gather or a scatter.

Each group has a thread for what does not wait, which runs one collective after the other. Whatever is not here (object
collectives, broadcasts, barriers) stays gloo's.
"""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

WHOLE = 16 * 1024  # bytes of an all-reduce up to which each rank sends all of them at once, for one wait instead of two
FIRST_TAG, NUM_TAGS = 2**20, 2**20  # of messages, beside those of the program


class Pending:
    """A collective that a group's thread does."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work, self._done = work, threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        """What the thread calls."""
        try:
            self._work()
        except BaseException as error:  # whoever waits must hear of it
            self._error = error
        self._done.set()

    def wait(self, timeout: Any = None) -> bool:
        """Until it is over."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Whether it is over."""
        return self._done.is_set()


class _Block(list[Pending]):
    """What a coalescing block has begun."""

    def wait(self) -> None:
        while self:
            self.pop(0).wait()


class _Channel:
    """A group's collectives, one after the other."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.size = group, group.rank(), group.size()
        self.others = [(self.rank + step) % self.size for step in range(1, self.size)]
        self._queue: queue.SimpleQueue[Pending | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: Pending | None = None
        self._count = 0

    def tag(self) -> int:
        """Of the next exchange's first message; all ranks count alike."""
        self._count += self.size
        return FIRST_TAG + self._count % NUM_TAGS

    def do(self, work: Callable[[], None], is_async: bool) -> Pending | None:
        """Do it after all that was given before; wait for it, or not."""
        if not is_async:
            if self._last is not None:
                self._last.wait()
                self._last = None
            work()
            return None
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="collectives", daemon=True)
            self._thread.start()
        self._last = Pending(work)
        self._queue.put(self._last)
        return self._last

    def exchange(self, outputs: list[torch.Tensor], source: torch.Tensor, tag: int) -> None:
        """`source` to all other ranks, `outputs[i]` from rank i; its own stays with the caller."""
        works = [dist.irecv(outputs[other], group=self.group, group_src=other, tag=tag) for other in self.others]
        works += [dist.isend(source, group=self.group, group_dst=other, tag=tag) for other in self.others]
        _wait(works)

    def gather(self, chunks: list[torch.Tensor], tag: int) -> None:
        """Each rank's piece to all, around the ring; its own is there."""
        self._around(chunks, chunks, 0, tag, lambda number: None)

    def scatter(self, chunks: list[torch.Tensor], operation: Any, tag: int) -> torch.Tensor:
        """The reduction of all ranks' pieces of this rank's number."""
        sums = [torch.empty_like(chunk) for chunk in chunks]

        def add(number: int) -> None:
            _reduce(sums[number], chunks[number], operation)

        # The first piece that leaves is this rank's own, later ones are sums of what came.
        first = (self.rank - 1) % self.size
        sums[first] = chunks[first]
        self._around(sums, sums, -1, tag, add)
        if _is(operation, ReduceOp.AVG):
            sums[self.rank] /= self.size
        return sums[self.rank]

    def _around(
        self,
        outputs: list[torch.Tensor],
        sources: list[torch.Tensor],
        first: int,
        tag: int,
        arrived: Callable[[int], None],
    ) -> None:
        before, after = (self.rank - 1) % self.size, (self.rank + 1) % self.size
        numbers = [(self.rank + first - step) % self.size for step in range(self.size)]
        receives = [
            dist.irecv(outputs[number], group=self.group, group_src=before, tag=tag + step)
            for step, number in enumerate(numbers[1:])
        ]
        sends = []
        for step, receive in enumerate(receives):
            sends.append(dist.isend(sources[numbers[step]], group=self.group, group_dst=after, tag=tag + step))
            _wait([receive])
            arrived(numbers[step + 1])
        _wait(sends)

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()

    @torch.no_grad()
    def _run(self) -> None:
        while (pending := self._queue.get()) is not None:
            pending.run()


_channels: dict[dist.ProcessGroup, _Channel] = {}
_originals: dict[str, Any] = {}
_open_blocks: list[_Block] = []


def _channel(group: dist.ProcessGroup | None) -> _Channel:
    group = group or dist.group.WORLD
    assert group is not None
    if group not in _channels:
        _channels[group] = _Channel(group)
    return _channels[group]


def forget(keep: set[Any]) -> None:
    """End the threads of all groups but these."""
    for group in [group for group in _channels if group not in keep]:
        _channels.pop(group).close()


def _is(operation: Any, wanted: Any) -> bool:
    return bool(operation == wanted)


def _reduce(total: torch.Tensor, chunk: torch.Tensor, operation: Any) -> None:
    if _is(operation, ReduceOp.MAX):
        torch.maximum(total, chunk, out=total)
    elif _is(operation, ReduceOp.MIN):
        torch.minimum(total, chunk, out=total)
    else:
        total += chunk


def _wait(works: list[Any]) -> None:
    for work in works:
        if work is not None:
            work.wait()


def all_reduce(tensor: torch.Tensor, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
    """See torch.distributed.all_reduce."""
    channel = _channel(group)
    known = any(_is(op, each) for each in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX, ReduceOp.MIN))
    if channel.size > 1 and (not known or not tensor.is_contiguous() or tensor.dtype is torch.bool):
        return _originals["all_reduce"](tensor, op, group, async_op)
    tags = channel.tag(), channel.tag()

    def work() -> None:
        flat = tensor.view(-1)
        if channel.size == 1:
            return
        if tensor.nbytes <= WHOLE:
            chunks = [torch.empty_like(flat) for _ in range(channel.size)]
            chunks[channel.rank] = flat.clone()
            channel.exchange(chunks, chunks[channel.rank], tags[0])
            for chunk in chunks[1:]:  # in the order of ranks, so that all get the same
                _reduce(chunks[0], chunk, op)
            flat.copy_(chunks[0] / channel.size if _is(op, ReduceOp.AVG) else chunks[0])
            return
        chunks = list(flat.tensor_split(channel.size))
        chunks[channel.rank].copy_(channel.scatter(chunks, op, tags[0]))
        channel.gather(chunks, tags[1])

    return _given(channel, work, async_op)


def all_gather_into_tensor(
    output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any = None, async_op: bool = False
) -> Any:
    """See torch.distributed.all_gather_into_tensor."""
    channel = _channel(group)
    tag = channel.tag()

    def work() -> None:
        chunks = list(output_tensor.view(-1).chunk(channel.size))
        own = input_tensor.contiguous().view(-1)
        if chunks[channel.rank].data_ptr() != own.data_ptr():
            chunks[channel.rank].copy_(own)
        channel.gather(chunks, tag)

    return _given(channel, work, async_op)


def reduce_scatter_tensor(
    output: torch.Tensor, input: torch.Tensor, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Any:
    """See torch.distributed.reduce_scatter_tensor."""
    channel = _channel(group)
    tag = channel.tag()

    def work() -> None:
        chunks = list(input.contiguous().view(-1).chunk(channel.size))
        output.view(-1).copy_(channel.scatter(chunks, op, tag))

    return _given(channel, work, async_op)


def _given(channel: _Channel, work: Callable[[], None], is_async: bool) -> Any:
    pending = channel.do(work, is_async)
    if pending is not None and _open_blocks:
        _open_blocks[-1].append(pending)
        return None
    return pending


def batch_isend_irecv(operations: list[Any]) -> list[Any]:
    """See torch.distributed.batch_isend_irecv: receives are posted first, works come in the order of operations."""
    order = sorted(range(len(operations)), key=lambda i: operations[i].op is dist.isend)
    works = _originals["batch_isend_irecv"]([operations[i] for i in order])
    return [works[order.index(i)] for i in range(len(operations))] if len(works) == len(operations) else works


@contextlib.contextmanager
def _coalescing(group: Any = None, device: Any = None, async_ops: bool = False) -> Iterator[_Block]:
    block = _Block()
    _open_blocks.append(block)
    try:
        yield block
    finally:
        _open_blocks.pop()
    if not async_ops:
        block.wait()


def install() -> None:
    """Replace torch's collectives in this process, wherever a module has them under a name of its own. Called after
    Megatron-core is imported and patched; once is enough."""
    if _originals:
        return
    own = {
        "all_reduce": all_reduce,
        "all_gather_into_tensor": all_gather_into_tensor,
        "reduce_scatter_tensor": reduce_scatter_tensor,
        "_all_gather_base": all_gather_into_tensor,
        "_reduce_scatter_base": reduce_scatter_tensor,
        "batch_isend_irecv": batch_isend_irecv,
    }
    for name in own:
        _originals[name] = getattr(dist, name)
    replaced = {id(_originals[name]): function for name, function in own.items()}
    for module in list(sys.modules.values()):
        name = getattr(module, "__name__", "")
        if name == __name__ or not isinstance(getattr(module, "__dict__", None), dict):
            continue
        if name.startswith("torch.") and name != "torch.distributed":
            continue
        for key, value in list(vars(module).items()):
            if id(value) in replaced:
                setattr(module, key, replaced[id(value)])
    from megatron.core.distributed import param_and_grad_buffer as buffers

    # parallel/megatron/cpu.py has put gloo's in their places already.
    buffers._coalescing_manager = _coalescing
    buffers.dist_all_gather_func = all_gather_into_tensor
    buffers.dist_reduce_scatter_func = reduce_scatter_tensor
