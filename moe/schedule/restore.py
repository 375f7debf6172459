"""Strategies that keep or restore a chunk's activations for its backward pass (MPipeMoE; chunk_plan.STRATEGIES).

Two activations have a strategy each: the dispatched input rows, and the preactivations (the inputs of the activation
function). The expert output and the sorted input are never kept: both are computed from the rows.

Shapes: N rows of a buffer, n assignments of a chunk, Q all assignments that this rank computes, H hidden size, G
columns of the preactivations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from memory.host_link import HostLink, OffloadedTensor
from memory.pool import WORKSPACE
from moe.chunk_plan import LayerLoad, Strategy
from moe.experts.blocks import SPARE_ROWS
from moe.route import Chunk, Chunks


def host_bytes(strategy: Strategy, load: LayerLoad) -> int:
    """Return the bytes of activations that a call with this load stores on the host between its passes."""
    numbers = load.token_rows * load.hidden_size if strategy.token_rows == "offload" else 0
    numbers += load.assignments * load.hidden_columns if strategy.preactivations == "offload" else 0
    return numbers * load.element_size


class DispatchedRows:
    """A call's dispatched rows between its passes. This base class keeps none: the backward pass dispatches again.

    `link` copies offloaded rows between device and host.
    """

    has_all = False  # whether one buffer holds the rows of all chunks

    def __init__(self, num_rows: Sequence[int], like: torch.Tensor, link: HostLink | None) -> None:
        self._num_rows, self._like, self._link = num_rows, like, link

    def out(self, index: int) -> torch.Tensor:
        """Return the receive buffer of chunk `index`, for use until `written` is called for this chunk."""
        return WORKSPACE.take((self._num_rows[index], self._like.size(1)), self._like)

    def offload(self, index: int, rows_NH: torch.Tensor) -> None:
        """Start copying a chunk's rows to the host; called after the chunk's experts are computed."""

    def written(self, index: int, rows_NH: torch.Tensor) -> None:
        """Free a chunk's receive buffer, which the forward pass no longer needs."""
        WORKSPACE.give(rows_NH)

    def fetch(self, index: int) -> None:
        """Start copying the rows of backward chunk `index` to the device; called one chunk before they are needed."""

    def regroup(self, chunks: Chunks, backward_chunks: Chunks) -> None:
        """Prepare rows that were received in `chunks` to be read in `backward_chunks`."""

    def get(self, index: int, chunk: Chunk) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a buffer [N, H] with the rows of a backward chunk, and each assignment's row in the buffer [n]."""
        raise AssertionError("rows that are dispatched again must be received, but `get` was called to restore them")

    def free(self) -> None:
        """Free all memory; called after the backward pass."""


class KeepRows(DispatchedRows):
    """A call's dispatched rows, kept on the device: the rows of all chunks in one buffer."""

    has_all = True

    def __init__(self, num_rows: Sequence[int], like: torch.Tensor, link: HostLink | None) -> None:
        super().__init__(num_rows, like, link)
        self._buffer = WORKSPACE.take((sum(num_rows), like.size(1)), like)
        self._of_chunks = self._buffer.split(list(num_rows))

    def out(self, index: int) -> torch.Tensor:
        return self._of_chunks[index]

    def written(self, index: int, rows_NH: torch.Tensor) -> None:
        pass

    def regroup(self, chunks: Chunks, backward_chunks: Chunks) -> None:
        self._rows_Q: torch.Tensor | None = None
        if chunks is not backward_chunks:
            self._rows_Q = torch.empty_like(chunks.ids_Q)
            for chunk in chunks:
                self._rows_Q[chunk.ids] = chunk.token_rows + chunk.first_row if chunk.first_row else chunk.token_rows

    def get(self, index: int, chunk: Chunk) -> tuple[torch.Tensor, torch.Tensor]:
        if self._rows_Q is None:
            return self._of_chunks[index], chunk.token_rows
        return self._buffer, self._rows_Q.index_select(0, chunk.ids)

    def free(self) -> None:
        WORKSPACE.give(self._buffer)


class OffloadRows(DispatchedRows):
    """A call's dispatched rows, kept on the host. Both passes must have the same chunks."""

    def __init__(self, num_rows: Sequence[int], like: torch.Tensor, link: HostLink | None) -> None:
        super().__init__(num_rows, like, link)
        self._away: dict[int, OffloadedTensor] = {}

    def offload(self, index: int, rows_NH: torch.Tensor) -> None:
        self._away[index] = OffloadedTensor(rows_NH, self._link)

    def fetch(self, index: int) -> None:
        self._away[index].fetch()

    def get(self, index: int, chunk: Chunk) -> tuple[torch.Tensor, torch.Tensor]:
        return self._away.pop(index).get(), chunk.token_rows


class Preactivations:
    """A call's preactivations between its passes. This base class keeps none: the backward pass recomputes them.

    `num_columns` is G. `chunks` and `backward_chunks` are the same object if both passes have the same number of
    chunks. `link` copies offloaded preactivations between device and host.
    """

    def __init__(
        self, chunks: Chunks, backward_chunks: Chunks, num_columns: int, like: torch.Tensor, link: HostLink | None
    ) -> None:
        self._numbers = [len(chunk.ids) for chunk in chunks]
        self._ids_Q, self._same = chunks.ids_Q, chunks is backward_chunks
        self._num_columns, self._like, self._link = num_columns, like, link

    def out(self, index: int) -> torch.Tensor | None:
        """Return the memory [n + SPARE_ROWS, G] for the preactivations of chunk `index`; None if none is needed."""
        return None

    def put(self, index: int, preactivation: torch.Tensor | None) -> None:
        """Store a chunk's preactivations, which are in the memory from `out` or, on a GPU, in a new tensor."""

    def offload(self, index: int) -> None:
        """Start copying a chunk's preactivations to the host."""

    def written(self, index: int) -> None:
        """Free the memory of a chunk's preactivations, which the forward pass no longer needs."""

    def fetch(self, index: int) -> None:
        """Start copying the preactivations of backward chunk `index` to the device, one chunk before their use."""

    def get(self, index: int, chunk: Chunk) -> torch.Tensor | None:
        """Return the preactivations of backward chunk `index` [at least n, G], sorted like its assignments.

        Returns None if they must be recomputed.
        """
        return None

    def done(self, preactivation: torch.Tensor | None) -> None:
        """Free preactivations that `get` returned."""

    def free(self) -> None:
        """Free all memory; called after the backward pass."""


class KeepPreactivations(Preactivations):
    """A call's preactivations, kept: on the host in one buffer, on a GPU in the tensors that the experts returned."""

    def __init__(self, chunks: Chunks, *rest: Any) -> None:
        super().__init__(chunks, *rest)
        self._index_Q: torch.Tensor | None = None  # each assignment's row of the buffer
        self._buffer: torch.Tensor | None = None
        self._kept: list[torch.Tensor] = []
        if self._like.device.type == "cpu":
            self._buffer = WORKSPACE.take((chunks[-1].span.stop + SPARE_ROWS, self._num_columns), self._like)
            # A chunk overwrites the spare rows of the chunk before it.
            self._kept = [self._buffer[chunk.span.start : chunk.span.stop + SPARE_ROWS] for chunk in chunks]

    def out(self, index: int) -> torch.Tensor | None:
        return None if self._buffer is None else self._kept[index]

    def put(self, index: int, preactivation: torch.Tensor | None) -> None:
        if self._buffer is None and preactivation is not None:
            self._kept.append(preactivation)

    def get(self, index: int, chunk: Chunk) -> torch.Tensor:
        """Return the kept preactivations, as a sorted copy if the passes have different numbers of chunks."""
        if self._same:
            return self._kept[index]
        if self._index_Q is None:
            if self._buffer is None:
                self._buffer = torch.cat(self._kept)
                self._kept = []
            self._index_Q = torch.empty_like(self._ids_Q)
            self._index_Q[self._ids_Q] = torch.arange(len(self._ids_Q), device=self._ids_Q.device)
        assert self._buffer is not None
        return self._buffer.index_select(0, self._index_Q.index_select(0, chunk.ids))

    def free(self) -> None:
        WORKSPACE.give(self._buffer)


class OffloadPreactivations(Preactivations):
    """A call's preactivations, kept on the host. Both passes must have the same chunks."""

    def __init__(self, chunks: Chunks, *rest: Any) -> None:
        super().__init__(chunks, *rest)
        self._away, self._buffers = dict[int, OffloadedTensor](), dict[int, torch.Tensor]()

    def out(self, index: int) -> torch.Tensor | None:
        if self._like.device.type != "cpu":
            return None
        self._buffers[index] = WORKSPACE.take((self._numbers[index] + SPARE_ROWS, self._num_columns), self._like)
        return self._buffers[index]

    def put(self, index: int, preactivation: torch.Tensor | None) -> None:
        if preactivation is not None:
            self._buffers[index] = preactivation

    def offload(self, index: int) -> None:
        self._away[index] = OffloadedTensor(self._buffers[index], self._link)

    def written(self, index: int) -> None:
        WORKSPACE.give(self._buffers.pop(index))

    def fetch(self, index: int) -> None:
        self._away[index].fetch()

    def get(self, index: int, chunk: Chunk) -> torch.Tensor:
        return self._away.pop(index).get()

    def done(self, preactivation: torch.Tensor | None) -> None:
        WORKSPACE.give(preactivation)


ROW_STRATEGIES: dict[str, type[DispatchedRows]] = {
    "keep": KeepRows,
    "communicate": DispatchedRows,
    "offload": OffloadRows,
}
PREACTIVATION_STRATEGIES: dict[str, type[Preactivations]] = {
    "keep": KeepPreactivations,
    "recompute": Preactivations,
    "offload": OffloadPreactivations,
}
