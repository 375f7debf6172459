"""What the backward pass needs of each chunk, and how it gets it back (MPipeMoE's restore strategies; see plan.STRATEGIES).

Two things: the dispatched input rows, and the hidden activation (what goes into the activation function, [pairs, G]). The
expert output is never kept, the sorted input neither: both follow from the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Protocol

import torch

from moe.blocks import SPARE_ROWS
from moe.route import Chunk
from moe.workspace import WORKSPACE


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


class Rows(Protocol):
    """The rows that a call's chunks received, from its forward to its backward pass. A buffer that `out` gave comes back with `written`."""

    has_all: bool  # all chunks have room at once

    def out(self, index: int) -> torch.Tensor:
        """Where chunk `index` is received."""

    def written(self, index: int, rows: torch.Tensor) -> None:
        """The experts have computed the chunk."""

    def fetch(self, index: int) -> None:
        """Backward chunk `index` comes next but one."""

    def get(self, index: int, chunk: Chunk, source_rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(a buffer, which rows of it the chunk's pairs read). `source_rows` [Q] counts in a buffer of all forward chunks."""

    def free(self) -> None:
        """The backward pass is over."""


class KeepRows:
    """One buffer for all chunks."""

    has_all = True

    def __init__(self, num_rows: Sequence[int], like: torch.Tensor) -> None:
        self._buffer = WORKSPACE.take((sum(num_rows), like.size(1)), like)
        self._parts = self._buffer.split(list(num_rows))

    def out(self, index: int) -> torch.Tensor:
        """See Rows."""
        return self._parts[index]

    def written(self, index: int, rows: torch.Tensor) -> None:
        """See Rows."""

    def fetch(self, index: int) -> None:
        """See Rows."""

    def get(self, index: int, chunk: Chunk, source_rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See Rows."""
        return self._buffer, source_rows.index_select(0, chunk.ids)

    def free(self) -> None:
        """See Rows."""
        WORKSPACE.give(self._buffer)


class DispatchRowsAgain:
    """Nothing is kept: the backward pass receives the rows once more."""

    has_all = False

    def __init__(self, num_rows: Sequence[int], like: torch.Tensor) -> None:
        self._num_rows, self._like = num_rows, like

    def out(self, index: int) -> torch.Tensor:
        """See Rows."""
        return WORKSPACE.take((self._num_rows[index], self._like.size(1)), self._like)

    def written(self, index: int, rows: torch.Tensor) -> None:
        """See Rows."""
        WORKSPACE.give(rows)

    def fetch(self, index: int) -> None:
        """See Rows."""

    def get(self, index: int, chunk: Chunk, source_rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See Rows."""
        raise AssertionError("rows that are dispatched again come from the exchange")

    def free(self) -> None:
        """See Rows."""


class OffloadRows(DispatchRowsAgain):
    """On the host in between. Both passes have the same chunks."""

    def __init__(self, num_rows: Sequence[int], like: torch.Tensor) -> None:
        super().__init__(num_rows, like)
        self._store = HostStore()

    def written(self, index: int, rows: torch.Tensor) -> None:
        """See Rows."""
        self._store.put(index, rows)
        WORKSPACE.give(rows)

    def fetch(self, index: int) -> None:
        """See Rows."""
        self._store.fetch(index, self._like.device)

    def get(self, index: int, chunk: Chunk, source_rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See Rows."""
        return self._store.get(index), chunk.rows


# ---------------------------------------------------------------------------------------------------------------------
# The hidden activations
# ---------------------------------------------------------------------------------------------------------------------


class Hidden(Protocol):
    """The hidden activations of one call of a layer, from its forward to its backward pass."""

    def out(self, index: int) -> torch.Tensor | None:
        """Where the forward pass writes those of chunk `index`, with SPARE_ROWS behind them; None: it need not."""

    def written(self, index: int) -> None:
        """It has written them."""

    def fetch(self, index: int) -> None:
        """Backward chunk `index` comes next but one."""

    def get(self, index: int, chunk: Chunk) -> torch.Tensor | None:
        """Those of backward chunk `index`, sorted like its pairs, at least as many rows; None: compute them again."""

    def done(self, hidden: torch.Tensor | None) -> None:
        """What `get` gave is not needed any more."""

    def free(self) -> None:
        """The backward pass is over."""


class Recompute:
    """Nothing is kept. `num_hidden` is G; `chunks` and `backward_chunks` are the same list where the degrees are."""

    def __init__(self, chunks: Sequence[Chunk], backward_chunks: Sequence[Chunk], num_hidden: int, like: torch.Tensor) -> None:
        self._chunks, self._same, self._num_hidden, self._like = chunks, chunks is backward_chunks, num_hidden, like

    def out(self, index: int) -> torch.Tensor | None:
        """See Hidden."""
        return None

    def written(self, index: int) -> None:
        """See Hidden."""

    def fetch(self, index: int) -> None:
        """See Hidden."""

    def get(self, index: int, chunk: Chunk) -> torch.Tensor | None:
        """See Hidden."""
        return None

    def done(self, hidden: torch.Tensor | None) -> None:
        """See Hidden."""

    def free(self) -> None:
        """See Hidden."""


class KeepHidden(Recompute):
    """One buffer for all chunks."""

    def __init__(self, chunks: Sequence[Chunk], backward_chunks: Sequence[Chunk], num_hidden: int, like: torch.Tensor) -> None:
        super().__init__(chunks, backward_chunks, num_hidden, like)
        ends = list(accumulate(len(chunk.ids) for chunk in chunks))
        self._buffer = WORKSPACE.take((ends[-1] + SPARE_ROWS, num_hidden), like)
        # What is written to a chunk's spare rows, the next chunk overwrites.
        self._views = [self._buffer[end - len(chunk.ids) : end + SPARE_ROWS] for end, chunk in zip(ends, chunks, strict=True)]

    def out(self, index: int) -> torch.Tensor:
        """See Hidden."""
        return self._views[index]

    def get(self, index: int, chunk: Chunk) -> torch.Tensor:
        """See Hidden. With another degree than the forward's, a sorted copy."""
        if self._same:
            return self._views[index]
        ids = torch.cat([chunk.ids for chunk in self._chunks])
        place = torch.empty_like(ids)
        place[ids] = torch.arange(len(ids), device=ids.device)
        return self._buffer.index_select(0, place[chunk.ids])

    def free(self) -> None:
        """See Hidden."""
        WORKSPACE.give(self._buffer)


class OffloadHidden(Recompute):
    """On the host in between. Both passes have the same chunks."""

    def __init__(self, chunks: Sequence[Chunk], backward_chunks: Sequence[Chunk], num_hidden: int, like: torch.Tensor) -> None:
        super().__init__(chunks, backward_chunks, num_hidden, like)
        self._store, self._buffers = HostStore(), dict[int, torch.Tensor]()

    def out(self, index: int) -> torch.Tensor:
        """See Hidden."""
        self._buffers[index] = WORKSPACE.take((len(self._chunks[index].ids) + SPARE_ROWS, self._num_hidden), self._like)
        return self._buffers[index]

    def written(self, index: int) -> None:
        """See Hidden."""
        buffer = self._buffers.pop(index)
        self._store.put(index, buffer)
        WORKSPACE.give(buffer)

    def fetch(self, index: int) -> None:
        """See Hidden."""
        self._store.fetch(index, self._like.device)

    def get(self, index: int, chunk: Chunk) -> torch.Tensor:
        """See Hidden."""
        return self._store.get(index)

    def done(self, hidden: torch.Tensor | None) -> None:
        """See Hidden."""
        WORKSPACE.give(hidden)


ROWS: dict[str, type[KeepRows] | type[DispatchRowsAgain]] = {
    "keep": KeepRows,
    "communicate": DispatchRowsAgain,
    "offload": OffloadRows,
}
HIDDEN: dict[str, type[Recompute]] = {"keep": KeepHidden, "recompute": Recompute, "offload": OffloadHidden}
