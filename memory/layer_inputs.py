"""Inputs of transformer layers, saved for the backward pass and offloaded to the host until then (selective checkpoint
offload of arXiv 2609.14306, section 3.3).

With full recomputation, only a layer's input is saved. It is copied to the host while the next layer computes, and
copied back while the layer above recomputes. If no host buffer is free, the input stays on the device. All buffers are
allocated before the first step. The layer-wise schedule itself stores the tensors between two layers here and names the
ones it reads next: inputs are read twice, gradients once.
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
    memory: torch.Tensor  # uint8 on the host
    used: Completion = field(default_factory=Completion.already)  # the last copy into or out of the buffer


@dataclass(eq=False)
class _Input:
    """A saved layer input. `tensor`: the input, if it is on the device; `buffer`: its host buffer, if it has one."""

    chunk: int
    is_first: bool  # whether it is the input of the chunk's first layer
    tensor: torch.Tensor | None
    shape: torch.Size
    dtype: torch.dtype
    buffer: _Buffer | None = None
    next: _Input | None = None  # the one that the backward pass needs next
    is_read_again: bool = False  # by a later pass than the current one

    @property
    def num_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


@dataclass
class Counts:
    """Counters of one step: bytes of saved layer inputs on the device (now and peak), copies to the host and back."""

    device: int = 0
    device_peak: int = 0
    restored_peak: int = 0  # most inputs of one model chunk that were copied back and not consumed yet
    copies_out: int = 0
    copies_back: int = 0


class LayerInputs:
    """Storage of one rank's layer inputs until the backward pass, on the host where buffers are free.

    No call makes the host wait for the device.
    """

    def __init__(self, link: HostLink, buffers: Sequence[torch.Tensor]):
        """Create the storage for layer inputs. buffers: host memory from the link, each for one layer's input."""
        self.memory = buffers
        self.host_bytes = sum(buffer.numel() for buffer in buffers)
        self._link = link
        self._buffers = [_Buffer(memory) for memory in buffers]
        self.begin()

    def begin(self) -> None:
        """Begin a step: reset the counters, and drop inputs that a failed step left behind."""
        for buffer in self._buffers:
            buffer.used.order()  # a buffer must not be reused before its last copy is done
        self._free = self._buffers[::-1]
        self._last: dict[int, _Input] = {}  # by chunk, the input that the backward pass needs last so far
        self._leaving: _Input | None = None
        self._coming: set[_Input] = set()
        # Inputs of the layer that computes, with the tensor if others refer to it and its memory must be freed here.
        self._in_use: list[tuple[_Input, torch.Tensor | None]] = []
        self.counts = Counts()

    @contextmanager
    def kept(self, chunk: int, is_within: Callable[[], bool]) -> Iterator[None]:
        """Within this context, offload the layer inputs that autograd saves in a forward pass of model chunk `chunk`.

        `is_within` returns whether a layer is computing: the tensors that it saves are recomputed later, and stay.
        """
        inputs: list[_Input] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor | _Input:
            if is_within() or not tensor.requires_grad:  # masks and positions have no gradient
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
        if inputs:  # the backward pass of this micro-batch follows that of the one before
            if chunk in self._last:
                self._last[chunk].next = inputs[-1]
            self._last[chunk] = inputs[0]

    def put(self, tensor: torch.Tensor) -> _Input:
        """Store a pass's output for a later pass, on the host if a buffer is free. The caller must drop the tensor."""
        kept = _Input(0, False, tensor.detach(), tensor.shape, tensor.dtype)
        self._keep(kept)
        return kept

    def take(self, *wanted: _Input, again: bool = False, then: Sequence[_Input] = ()) -> list[torch.Tensor]:
        """Return the stored tensors that a pass reads. They are valid until the next call.

        again: whether a later pass reads them too, so that they must be kept. then: stored tensors that the next pass
        reads, which are prefetched to the device.
        """
        self._drop_used()
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
        # The layer before has computed: its input is not needed any more, and its copy to the host is done.
        self._drop_used()
        self._leave()
        self._count(kept.num_bytes)
        if self._free:
            buffer = kept.buffer = self._free.pop()
            assert kept.tensor is not None and kept.num_bytes == buffer.memory.numel()
            self._submit_copy(self._link.down, _view(buffer.memory, kept), kept.tensor, buffer)
            self._leaving = kept
            self.counts.copies_out += 1

    def _restore(self, kept: _Input) -> torch.Tensor:
        self._drop_used()
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
        """Start copying an input back to the device, unless it is there or the copy is in flight."""
        if kept.tensor is not None:
            return
        assert kept.buffer is not None
        kept.tensor = torch.empty(kept.shape, dtype=kept.dtype, device=self._link.device)
        self._count(kept.num_bytes)
        self._submit_copy(self._link.up, kept.tensor, _view(kept.buffer.memory, kept), kept.buffer)
        self._coming.add(kept)
        self.counts.copies_back += 1

    def _bring(self, kept: _Input) -> bool:
        """Make an input available on the device for the current pass. Returns whether it was on the host."""
        self._stay(kept)
        self._fetch(kept)
        was_away = kept in self._coming
        self._coming.discard(kept)
        if was_away:
            assert kept.buffer is not None
            kept.buffer.used.follow()
        return was_away

    def _stay(self, kept: _Input) -> None:
        """Keep an input on the device instead of freeing it there when its copy to the host is done."""
        if self._leaving is kept:
            self._leaving = None

    def _free_buffer(self, kept: _Input) -> None:
        """Make an input's host buffer free for other inputs, after the last read of this one."""
        kept.tensor = None
        if kept.buffer is not None:
            kept.buffer.used.follow()
            self._free.append(kept.buffer)

    def _drop_used(self) -> None:
        while self._in_use:
            used, tensor = self._in_use.pop()
            if used.is_read_again:
                if used.buffer is None:
                    continue
                used.buffer.used.follow()
                used.tensor = None
            self._drop(used, tensor)

    def _leave(self) -> None:
        leaving, self._leaving = self._leaving, None
        if leaving is None:
            return
        assert leaving.buffer is not None and leaving.tensor is not None
        leaving.buffer.used.follow()
        self._drop(leaving, leaving.tensor)
        leaving.tensor = None

    def _drop(self, kept: _Input, tensor: torch.Tensor | None) -> None:
        # Megatron-core's schedule and the callers of the layers refer to the first layer's input without reading it.
        if tensor is not None and kept.is_first:
            tensor.untyped_storage().resize_(0)
        self._count(-kept.num_bytes)

    def _submit_copy(self, stream: CopyStream, target: torch.Tensor, source: torch.Tensor, buffer: _Buffer) -> None:
        num_bytes = source.numel() * source.element_size()
        tensors = [(target, source)]  # popped, so that the copy stream has no reference once the copy is complete
        # Earlier copies of the buffer, and users of the device memory, are on the current stream or waited for there.
        after = (Completion.so_far(self._link.device),)
        work = lambda: torch.Tensor.copy_(*tensors.pop(), non_blocking=True)  # noqa: E731
        buffer.used = stream.submit(work, after, num_bytes, priority=PASSES)

    def _count(self, num_bytes: int) -> None:
        self.counts.device += num_bytes
        self.counts.device_peak = max(self.counts.device_peak, self.counts.device)


def _tensor(kept: _Input) -> torch.Tensor:
    assert kept.tensor is not None
    return kept.tensor


def _view(memory: torch.Tensor, kept: _Input) -> torch.Tensor:
    return memory[: kept.num_bytes].view(kept.dtype).view(kept.shape)
