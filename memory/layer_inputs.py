"""Layer inputs that a training keeps for its backward pass, on the host in between (selective checkpoint offload of
arXiv 2609.14306, section 3.3).

With full recomputation a layer keeps its input alone. It leaves while the next layer computes, and is back before the
backward pass gets to its layer: while one recomputes, the one below comes. What finds no buffer free stays on the
device. The buffers are there from the start, so a step can run out of nothing.

Where all micro-batches go through a layer before the next, who runs them puts what lies between two layers here, and
says what is next: inputs are read twice, gradients once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from memory.completion import Completion
from memory.copy_stream import PASSES, CopyStream
from memory.host_link import HostLink


@dataclass
class _Buffer:
    memory: torch.Tensor  # uint8 of the host
    used: Completion = field(default_factory=Completion.already)  # the last copy to it or from it


@dataclass(eq=False)
class _Input:
    """A layer's input between its passes. `tensor`: on the device; `buffer`: on the host, where it left or leaves."""

    chunk: int
    is_first: bool  # of the chunk's layers
    tensor: torch.Tensor | None
    shape: torch.Size
    dtype: torch.dtype
    buffer: _Buffer | None = None
    next: _Input | None = None  # whose turn in the backward pass is next
    is_read_again: bool = False  # by a pass after the one that reads it now

    @property
    def num_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


@dataclass
class Counts:
    """Bytes of layer inputs on the device, now and at most since the last `begin`, and copies since then."""

    device: int = 0
    device_peak: int = 0
    restored_peak: int = 0  # layer inputs that were copied back and not yet consumed, of one model chunk
    copies_out: int = 0
    copies_back: int = 0


class LayerInputs:
    """The store of one rank. All calls are those of the thread that computes, and none waits for the device."""

    def __init__(self, link: HostLink, buffers: Sequence[torch.Tensor]):
        """buffers: memory of the host from the link, for a layer's input each."""
        self.counts = Counts()
        self.memory = buffers
        self.host_bytes = sum(buffer.numel() for buffer in buffers)
        self._link = link
        self._buffers = [_Buffer(memory) for memory in buffers]
        self.begin()

    def begin(self) -> None:
        """A step starts: whatever an error has left is given up."""
        for buffer in self._buffers:
            buffer.used.order()  # no memory is somebody else's before a copy to it or from it is over
        self._free = self._buffers[::-1]
        self._last: dict[int, _Input] = {}  # of each chunk, the last of the backward pass that is known so far
        self._leaving: _Input | None = None
        self._coming: set[_Input] = set()
        # By the layer that computes, at most one; with its tensor where others hold that.
        self._in_use: list[tuple[_Input, torch.Tensor | None]] = []
        self.counts = Counts()

    @contextmanager
    def kept(self, chunk: int, is_within: Callable[[], bool]) -> Iterator[None]:
        """What autograd saves of a pass through the layers of model chunk `chunk`: each one's input, and what is small
        or the same for all of them. `is_within`: whether a layer computes, whose own are let go of."""
        inputs: list[_Input] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor | _Input:
            if is_within() or not tensor.requires_grad:  # masks and positions get no gradient
                return tensor
            kept = _Input(chunk, not inputs, tensor.detach(), tensor.shape, tensor.dtype)
            if inputs:
                kept.next = inputs[-1]
            inputs.append(kept)
            self._keep(kept)
            return kept

        def unpack(kept: torch.Tensor | _Input) -> torch.Tensor:
            return self._restore(kept) if isinstance(kept, _Input) else kept

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
        if inputs:  # micro-batches come back in their order: this one's last layer after the first of the one before
            if chunk in self._last:
                self._last[chunk].next = inputs[-1]
            self._last[chunk] = inputs[0]

    def put(self, tensor: torch.Tensor) -> _Input:
        """Keep what a pass has made for another. The tensor is the store's now: the caller lets go of it."""
        kept = _Input(0, False, tensor.detach(), tensor.shape, tensor.dtype)
        self._keep(kept)
        return kept

    def take(self, *wanted: _Input, again: bool = False, then: Sequence[_Input] = ()) -> list[torch.Tensor]:
        """What a pass reads, until the next call; `again`: a later pass reads it too. `then`: what the pass after this
        one will read, as far as it is there."""
        self._let_go()
        was_away = sum(self._bring(kept) for kept in wanted)
        found = [_tensor(kept) for kept in wanted]
        for kept in wanted:
            if not again:
                self._free_buffer(kept)
            kept.is_read_again = again
        self._in_use = [(kept, None) for kept in wanted]
        for kept in then:
            self._stay(kept)
            self._fetch(kept)
        self.counts.restored_peak = max(self.counts.restored_peak, len(self._coming) + was_away)
        return found

    def _keep(self, kept: _Input) -> None:
        self._settle()
        self._count(kept.num_bytes)
        if self._free:
            buffer = kept.buffer = self._free.pop()
            assert kept.tensor is not None and kept.num_bytes == buffer.memory.numel()
            self._copy(self._link.down, _view(buffer.memory, kept), kept.tensor, buffer)
            self._leaving = kept
            self.counts.copies_out += 1

    def _restore(self, kept: _Input) -> torch.Tensor:
        self._let_go()
        self._stay(kept)
        self._leave()
        was_away = self._bring(kept)
        tensor = _tensor(kept)
        self._free_buffer(kept)
        self._in_use = [(kept, tensor if kept.is_first and not was_away else None)]
        if kept.next is not None:
            self._fetch(kept.next)
        restored = sum(each.chunk == kept.chunk for each in self._coming) + was_away
        self.counts.restored_peak = max(self.counts.restored_peak, restored)
        return tensor

    def _fetch(self, kept: _Input) -> None:
        """Have it come back, unless it is here or comes already."""
        if kept.tensor is not None:
            return
        assert kept.buffer is not None
        kept.tensor = torch.empty(kept.shape, dtype=kept.dtype, device=self._link.device)
        self._count(kept.num_bytes)
        self._copy(self._link.up, kept.tensor, _view(kept.buffer.memory, kept), kept.buffer)
        self._coming.add(kept)
        self.counts.copies_back += 1

    def _bring(self, kept: _Input) -> bool:
        """Have it here for what computes now; whether it was away."""
        self._stay(kept)
        self._fetch(kept)
        was_away = kept in self._coming
        self._coming.discard(kept)
        if was_away:
            assert kept.buffer is not None
            _follow(kept.buffer.used)
        return was_away

    def _stay(self, kept: _Input) -> None:
        """It is wanted before it has left, and stays beside its copy."""
        if self._leaving is kept:
            self._leaving = None

    def _free_buffer(self, kept: _Input) -> None:
        """It is read for the last time."""
        kept.tensor = None
        if kept.buffer is not None:
            _follow(kept.buffer.used)
            self._free.append(kept.buffer)

    def _settle(self) -> None:
        """The layer before has computed: its input is consumed, and what was leaving all the while has left."""
        self._let_go()
        self._leave()

    def _let_go(self) -> None:
        while self._in_use:
            used, tensor = self._in_use.pop()
            if used.is_read_again:
                if used.buffer is None:
                    continue
                _follow(used.buffer.used)
                used.tensor = None
            self._drop(used, tensor)

    def _leave(self) -> None:
        leaving, self._leaving = self._leaving, None
        if leaving is None:
            return
        assert leaving.buffer is not None and leaving.tensor is not None
        _follow(leaving.buffer.used)
        self._drop(leaving, leaving.tensor)
        leaving.tensor = None

    def _drop(self, kept: _Input, tensor: torch.Tensor | None) -> None:
        # Megatron-core's schedule and the callers of the layers hold the first one's, and do not read it again.
        if tensor is not None and kept.is_first:
            tensor.untyped_storage().resize_(0)
        self._count(-kept.num_bytes)

    def _copy(self, stream: CopyStream, target: torch.Tensor, source: torch.Tensor, buffer: _Buffer) -> None:
        num_bytes = source.numel() * source.element_size()
        tensors = [(target, source)]  # the copy stream lets go of them before it says that the copy is over
        # The stream has followed the buffer's last copy, and whatever was in the device's memory before.
        after = (Completion.so_far(self._link.device),)
        buffer.used = stream.submit(lambda: _copy(*tensors.pop()), after, num_bytes, priority=PASSES)

    def _count(self, num_bytes: int) -> None:
        self.counts.device += num_bytes
        self.counts.device_peak = max(self.counts.device_peak, self.counts.device)


def _tensor(kept: _Input) -> torch.Tensor:
    assert kept.tensor is not None
    return kept.tensor


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)


def _view(memory: torch.Tensor, kept: _Input) -> torch.Tensor:
    return memory[: kept.num_bytes].view(kept.dtype).view(kept.shape)


def _follow(done: Completion) -> None:
    """What is computed from now on comes after it. Raises what it raised."""
    done.order()
    if done.error is not None:
        raise done.error
