"""What the backward pass needs of each chunk, and how it gets it back (MPipeMoE's restore strategies; see
chunk_plan.STRATEGIES).

Two things: the dispatched input rows, and the preactivations (what goes into the activation function). The expert
output is never kept, the sorted input neither: both follow from the rows.

Shapes: N rows of a buffer, n assignments of a chunk, Q all assignments that this rank computes, H hidden size, G what
goes into the activation function.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from memory.pool import WORKSPACE
from moe.experts.blocks import SPARE_ROWS
from moe.route import Chunk


class HostStore:
    """Chunks of one tensor on the host. On a GPU the copies run on a stream of their own, beside the computation."""

    def __init__(self) -> None:
        self._stored: dict[int, torch.Tensor] = {}
        self._fetched: dict[int, tuple[torch.Tensor, Any]] = {}

    def put(self, index: int, tensor: torch.Tensor) -> None:
        """Copy out; the caller may hand the tensor back at once."""
        if tensor.device.type == "cpu":
            self._stored[index] = WORKSPACE.take(tensor.shape, tensor).copy_(tensor)
            return
        stored = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        stream = _copy_stream(tensor.device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            stored.copy_(tensor, non_blocking=True)
        tensor.record_stream(stream)  # its memory is not used again before the copy is over
        self._stored[index] = stored

    def fetch(self, index: int, device: torch.device) -> None:
        """Start copying back what `get` will ask for."""
        if device.type == "cpu" or index not in self._stored:
            return
        stored = self._stored.pop(index)
        tensor = torch.empty(stored.shape, dtype=stored.dtype, device=device)
        stream = _copy_stream(device)
        stream.wait_stream(torch.cuda.current_stream())  # the memory may just have been somebody else's
        with torch.cuda.stream(stream):
            tensor.copy_(stored, non_blocking=True)
            event = stream.record_event()
        self._fetched[index] = tensor, (event, stored)

    def get(self, index: int) -> torch.Tensor:
        """The chunk, on the device again; it is the caller's then."""
        if index in self._stored:
            return self._stored.pop(index)
        tensor, (event, _) = self._fetched.pop(index)
        torch.cuda.current_stream().wait_event(event)
        return tensor


_copy_streams: dict[torch.device, Any] = {}


def _copy_stream(device: torch.device) -> Any:
    if device not in _copy_streams:
        _copy_streams[device] = torch.cuda.Stream(device)
    return _copy_streams[device]


# ---------------------------------------------------------------------------------------------------------------------
# The dispatched rows
# ---------------------------------------------------------------------------------------------------------------------


class Rows:
    """The rows that a call's chunks received, from its forward to its backward pass."""

    has_all = False  # all chunks have room at once

    def __init__(self, num_rows: Sequence[int], like: torch.Tensor) -> None:
        self._num_rows, self._like = num_rows, like

    def out(self, index: int) -> torch.Tensor:
        """Where chunk `index` is received; the buffer comes back with `written`."""
        return WORKSPACE.take((self._num_rows[index], self._like.size(1)), self._like)

    def offload(self, index: int, rows_NH: torch.Tensor) -> None:
        """The experts have computed the chunk."""

    def written(self, index: int, rows_NH: torch.Tensor) -> None:
        """The buffer is not needed any more in the forward pass."""
        WORKSPACE.give(rows_NH)

    def fetch(self, index: int) -> None:
        """Backward chunk `index` comes next but one."""

    def get(self, index: int, chunk: Chunk, rows_Q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(a buffer [N, H], which rows of it the chunk's assignments read [n]). `rows_Q` count in a buffer of all
        forward chunks."""
        raise AssertionError("rows that are dispatched again come from the exchange")

    def free(self) -> None:
        """The backward pass is over."""


class DispatchRowsAgain(Rows):
    """Nothing is kept: the backward pass receives the rows once more."""


class KeepRows(Rows):
    """One buffer for all chunks."""

    has_all = True

    def __init__(self, num_rows: Sequence[int], like: torch.Tensor) -> None:
        super().__init__(num_rows, like)
        self._buffer = WORKSPACE.take((sum(num_rows), like.size(1)), like)
        self._parts = self._buffer.split(list(num_rows))

    def out(self, index: int) -> torch.Tensor:
        return self._parts[index]

    def written(self, index: int, rows_NH: torch.Tensor) -> None:
        pass

    def get(self, index: int, chunk: Chunk, rows_Q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._buffer, rows_Q.index_select(0, chunk.ids)

    def free(self) -> None:
        WORKSPACE.give(self._buffer)


class OffloadRows(Rows):
    """On the host in between. Both passes have the same chunks."""

    def __init__(self, num_rows: Sequence[int], like: torch.Tensor) -> None:
        super().__init__(num_rows, like)
        self._store = HostStore()

    def offload(self, index: int, rows_NH: torch.Tensor) -> None:
        self._store.put(index, rows_NH)

    def fetch(self, index: int) -> None:
        self._store.fetch(index, self._like.device)

    def get(self, index: int, chunk: Chunk, rows_Q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._store.get(index), chunk.rows


# ---------------------------------------------------------------------------------------------------------------------
# The preactivations
# ---------------------------------------------------------------------------------------------------------------------


class Preactivations:
    """The preactivations of one call of a layer, from its forward to its backward pass.

    `num_columns` is G; `chunks` and `backward_chunks` are the same list where the degrees are.
    """

    def __init__(
        self, chunks: Sequence[Chunk], backward_chunks: Sequence[Chunk], num_columns: int, like: torch.Tensor
    ) -> None:
        self._chunks, self._same, self._num_columns, self._like = chunks, chunks is backward_chunks, num_columns, like

    def out(self, index: int) -> torch.Tensor | None:
        """Where the forward pass writes those of chunk `index` [n + SPARE_ROWS, G]; None: it need not."""
        return None

    def offload(self, index: int) -> None:
        """It has written them."""

    def written(self, index: int) -> None:
        """The buffer is not needed any more in the forward pass."""

    def fetch(self, index: int) -> None:
        """Backward chunk `index` comes next but one."""

    def get(self, index: int, chunk: Chunk) -> torch.Tensor | None:
        """Those of backward chunk `index` [at least n, G], sorted like its assignments; None: compute them again."""
        return None

    def done(self, preactivation: torch.Tensor | None) -> None:
        """What `get` gave is not needed any more."""

    def free(self) -> None:
        """The backward pass is over."""


class RecomputePreactivations(Preactivations):
    """Nothing is kept."""


class KeepPreactivations(Preactivations):
    """One buffer for all chunks."""

    def __init__(
        self, chunks: Sequence[Chunk], backward_chunks: Sequence[Chunk], num_columns: int, like: torch.Tensor
    ) -> None:
        super().__init__(chunks, backward_chunks, num_columns, like)
        ends = list(accumulate(len(chunk.ids) for chunk in chunks))
        self._buffer = WORKSPACE.take((ends[-1] + SPARE_ROWS, num_columns), like)
        # What is written to a chunk's spare rows, the next chunk overwrites.
        self._views = [
            self._buffer[end - len(chunk.ids) : end + SPARE_ROWS] for end, chunk in zip(ends, chunks, strict=True)
        ]

    def out(self, index: int) -> torch.Tensor:
        return self._views[index]

    def get(self, index: int, chunk: Chunk) -> torch.Tensor:
        """With another degree than the forward's, a sorted copy."""
        if self._same:
            return self._views[index]
        ids = torch.cat([chunk.ids for chunk in self._chunks])
        place = torch.empty_like(ids)
        place[ids] = torch.arange(len(ids), device=ids.device)
        return self._buffer.index_select(0, place[chunk.ids])

    def free(self) -> None:
        WORKSPACE.give(self._buffer)


class OffloadPreactivations(Preactivations):
    """On the host in between. Both passes have the same chunks."""

    def __init__(
        self, chunks: Sequence[Chunk], backward_chunks: Sequence[Chunk], num_columns: int, like: torch.Tensor
    ) -> None:
        super().__init__(chunks, backward_chunks, num_columns, like)
        self._store, self._buffers = HostStore(), dict[int, torch.Tensor]()

    def out(self, index: int) -> torch.Tensor:
        self._buffers[index] = WORKSPACE.take(
            (len(self._chunks[index].ids) + SPARE_ROWS, self._num_columns), self._like
        )
        return self._buffers[index]

    def offload(self, index: int) -> None:
        self._store.put(index, self._buffers[index])

    def written(self, index: int) -> None:
        WORKSPACE.give(self._buffers.pop(index))

    def fetch(self, index: int) -> None:
        self._store.fetch(index, self._like.device)

    def get(self, index: int, chunk: Chunk) -> torch.Tensor:
        return self._store.get(index)

    def done(self, preactivation: torch.Tensor | None) -> None:
        WORKSPACE.give(preactivation)


ROWS: dict[str, type[Rows]] = {"keep": KeepRows, "communicate": DispatchRowsAgain, "offload": OffloadRows}
PREACTIVATIONS: dict[str, type[Preactivations]] = {
    "keep": KeepPreactivations,
    "recompute": RecomputePreactivations,
    "offload": OffloadPreactivations,
}
