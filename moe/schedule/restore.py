"""What the backward pass needs of each chunk, and how it gets it back (MPipeMoE's restore strategies; see
chunk_plan.STRATEGIES).

Two things: the dispatched input rows, and the preactivations (what goes into the activation function). The expert
output is never kept, the sorted input neither: both follow from the rows.

Shapes: N rows of a buffer, n assignments of a chunk, Q all assignments that this rank computes, H hidden size, G what
goes into the activation function.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from memory.host_link import HostLink
from memory.offload import OffloadedTensor
from memory.pool import WORKSPACE
from moe.chunk_plan import LayerLoad, Strategy
from moe.experts.blocks import SPARE_ROWS
from moe.route import Chunk, Chunks


def host_bytes(strategy: Strategy, load: LayerLoad) -> int:
    """Bytes on the host between the passes of a call with this load."""
    numbers = load.rows * load.hidden_size if strategy.rows == "offload" else 0
    numbers += load.assignments * load.hidden_columns if strategy.preactivations == "offload" else 0
    return numbers * load.element_size


# ---------------------------------------------------------------------------------------------------------------------
# The dispatched rows
# ---------------------------------------------------------------------------------------------------------------------


class Rows:
    """The rows that a call's chunks received, from its forward to its backward pass. `link`: what they leave the device
    by, if they do."""

    has_all = False  # all chunks have room at once

    def __init__(self, num_rows: Sequence[int], like: torch.Tensor, link: HostLink | None = None) -> None:
        self._num_rows, self._like, self._link = num_rows, like, link

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

    def regroup(self, chunks: Chunks, backward_chunks: Chunks) -> None:
        """What the forward pass received in these chunks, the backward pass will ask for in those."""

    def get(self, index: int, chunk: Chunk) -> tuple[torch.Tensor, torch.Tensor]:
        """(a buffer [N, H], which rows of it the chunk's assignments read [n])."""
        raise AssertionError("rows that are dispatched again come from the exchange")

    def free(self) -> None:
        """The backward pass is over."""


class DispatchRowsAgain(Rows):
    """Nothing is kept: the backward pass receives the rows once more."""


class KeepRows(Rows):
    """One buffer for all chunks."""

    has_all = True

    def __init__(self, num_rows: Sequence[int], like: torch.Tensor, link: HostLink | None = None) -> None:
        super().__init__(num_rows, like, link)
        self._buffer = WORKSPACE.take((sum(num_rows), like.size(1)), like)
        self._parts = self._buffer.split(list(num_rows))

    def out(self, index: int) -> torch.Tensor:
        return self._parts[index]

    def written(self, index: int, rows_NH: torch.Tensor) -> None:
        pass

    def regroup(self, chunks: Chunks, backward_chunks: Chunks) -> None:
        self._rows_Q: torch.Tensor | None = None
        if chunks is not backward_chunks:
            self._rows_Q = torch.empty_like(chunks.ids_Q)
            for chunk in chunks:
                self._rows_Q[chunk.ids] = chunk.rows + chunk.first_row if chunk.first_row else chunk.rows

    def get(self, index: int, chunk: Chunk) -> tuple[torch.Tensor, torch.Tensor]:
        if self._rows_Q is None:
            return self._parts[index], chunk.rows
        return self._buffer, self._rows_Q.index_select(0, chunk.ids)

    def free(self) -> None:
        WORKSPACE.give(self._buffer)


class OffloadRows(Rows):
    """On the host in between. Both passes have the same chunks."""

    def __init__(self, num_rows: Sequence[int], like: torch.Tensor, link: HostLink | None = None) -> None:
        super().__init__(num_rows, like, link)
        self._away: dict[int, OffloadedTensor] = {}

    def offload(self, index: int, rows_NH: torch.Tensor) -> None:
        self._away[index] = OffloadedTensor(rows_NH, self._link)

    def fetch(self, index: int) -> None:
        self._away[index].fetch()

    def get(self, index: int, chunk: Chunk) -> tuple[torch.Tensor, torch.Tensor]:
        return self._away.pop(index).get(), chunk.rows


# ---------------------------------------------------------------------------------------------------------------------
# The preactivations
# ---------------------------------------------------------------------------------------------------------------------


class Preactivations:
    """The preactivations of one call of a layer, from its forward to its backward pass.

    `num_columns` is G; `chunks` and `backward_chunks` are the same list where the degrees are. `link`: what they leave
    the device by, if they do.
    """

    def __init__(
        self,
        chunks: Chunks,
        backward_chunks: Chunks,
        num_columns: int,
        like: torch.Tensor,
        link: HostLink | None = None,
    ) -> None:
        self._numbers = [len(chunk.ids) for chunk in chunks]
        self._ids_Q, self._same = chunks.ids_Q, chunks is backward_chunks
        self._num_columns, self._like, self._link = num_columns, like, link
        self._begin(chunks)

    def _begin(self, chunks: Chunks) -> None:
        """Have what the kind keeps of the forward pass's chunks."""

    is_kept = False  # somebody asks for them again

    def out(self, index: int) -> torch.Tensor | None:
        """Where the forward pass writes those of chunk `index` [n + SPARE_ROWS, G]; None: it need not."""
        return None

    def put(self, index: int, preactivation: torch.Tensor | None) -> None:
        """It has written them: to `out`, or on a GPU to a tensor of its own."""

    def offload(self, index: int) -> None:
        """The chunk's are there."""

    def written(self, index: int) -> None:
        """The buffer is not needed any more in the forward pass."""

    def fetch(self, index: int) -> None:
        """Backward chunk `index` comes next but one."""

    def get(self, index: int, chunk: Chunk) -> torch.Tensor | None:
        """The preactivations of backward chunk `index` [at least n, G], sorted like its assignments. None:
        compute them again."""
        return None

    def done(self, preactivation: torch.Tensor | None) -> None:
        """What `get` gave is not needed any more."""

    def free(self) -> None:
        """The backward pass is over."""


class RecomputePreactivations(Preactivations):
    """Nothing is kept."""


class KeepPreactivations(Preactivations):
    """On the host in one buffer for all chunks; on a GPU as the products made them."""

    is_kept = True

    def _begin(self, chunks: Chunks) -> None:
        self._place_Q: torch.Tensor | None = None  # where each assignment's stand in the buffer
        self._buffer: torch.Tensor | None = None
        self._kept: list[torch.Tensor] = []
        if self._like.device.type == "cpu":
            total = chunks[-1].part.stop
            self._buffer = WORKSPACE.take((total + SPARE_ROWS, self._num_columns), self._like)
            # What is written to a chunk's spare rows, the next chunk overwrites.
            self._kept = [self._buffer[chunk.part.start : chunk.part.stop + SPARE_ROWS] for chunk in chunks]

    def out(self, index: int) -> torch.Tensor | None:
        return None if self._buffer is None else self._kept[index]

    def put(self, index: int, preactivation: torch.Tensor | None) -> None:
        if self._buffer is None and preactivation is not None:
            self._kept.append(preactivation)

    def get(self, index: int, chunk: Chunk) -> torch.Tensor:
        """With another degree than the forward's, a sorted copy."""
        if self._same:
            return self._kept[index]
        if self._place_Q is None:
            if self._buffer is None:
                self._buffer = torch.cat(self._kept)
                self._kept = []
            self._place_Q = torch.empty_like(self._ids_Q)
            self._place_Q[self._ids_Q] = torch.arange(len(self._ids_Q), device=self._ids_Q.device)
        assert self._buffer is not None
        return self._buffer.index_select(0, self._place_Q.index_select(0, chunk.ids))

    def free(self) -> None:
        WORKSPACE.give(self._buffer)


class OffloadPreactivations(Preactivations):
    """On the host in between. Both passes have the same chunks."""

    is_kept = True

    def _begin(self, chunks: Chunks) -> None:
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


ROWS: dict[str, type[Rows]] = {"keep": KeepRows, "communicate": DispatchRowsAgain, "offload": OffloadRows}
PREACTIVATIONS: dict[str, type[Preactivations]] = {
    "keep": KeepPreactivations,
    "recompute": RecomputePreactivations,
    "offload": OffloadPreactivations,
}
