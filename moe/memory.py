"""What the backward pass needs of each chunk, and how a strategy brings it back.

keep: the hidden activation (what goes into the activation function, [pairs, G]) of all chunks stays in memory.
recompute: it is computed again from the chunk's input rows, at the price of the first matrix product.
The expert output is never kept, the sorted input neither: both follow from the rows of the layer's input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Protocol

import torch

from moe.experts import SPARE_ROWS
from moe.route import Chunk
from moe.workspace import WORKSPACE


class Saved(Protocol):
    """The hidden activations of one call of a layer, from its forward to its backward pass."""

    def hidden_out(self, index: int) -> torch.Tensor | None:
        """Where the forward pass writes those of chunk `index`, with SPARE_ROWS behind them; None: it need not."""

    def hidden(self, index: int, chunk: Chunk) -> torch.Tensor | None:
        """Those of backward chunk `index`, sorted like its pairs, at least as many rows; None: compute them again."""

    def free(self) -> None:
        """The backward pass is over."""


class Keep:
    """One buffer for all chunks. `num_hidden` is G; `chunks` and `backward_chunks` are the same list where the degrees are."""

    def __init__(self, chunks: Sequence[Chunk], backward_chunks: Sequence[Chunk], num_hidden: int, like: torch.Tensor) -> None:
        self._chunks, self._same = chunks, chunks is backward_chunks
        ends = list(accumulate(len(chunk.ids) for chunk in chunks))
        self._buffer = WORKSPACE.take((ends[-1] + SPARE_ROWS, num_hidden), like)
        # What is written to a chunk's spare rows, the next chunk overwrites.
        self._views = [self._buffer[end - len(chunk.ids) : end + SPARE_ROWS] for end, chunk in zip(ends, chunks, strict=True)]

    def hidden_out(self, index: int) -> torch.Tensor:
        """See Saved."""
        return self._views[index]

    def hidden(self, index: int, chunk: Chunk) -> torch.Tensor:
        """See Saved. With another degree than the forward's, a sorted copy."""
        if self._same:
            return self._views[index]
        ids = torch.cat([chunk.ids for chunk in self._chunks])
        place = torch.empty_like(ids)
        place[ids] = torch.arange(len(ids), device=ids.device)
        return self._buffer.index_select(0, place[chunk.ids])

    def free(self) -> None:
        """See Saved."""
        WORKSPACE.give(self._buffer)


class Recompute:
    """Nothing is kept."""

    def __init__(self, chunks: Sequence[Chunk], backward_chunks: Sequence[Chunk], num_hidden: int, like: torch.Tensor) -> None:
        pass

    def hidden_out(self, index: int) -> None:
        """See Saved."""

    def hidden(self, index: int, chunk: Chunk) -> None:
        """See Saved."""

    def free(self) -> None:
        """See Saved."""


STRATEGIES: dict[str, Callable[[Sequence[Chunk], Sequence[Chunk], int, torch.Tensor], Saved]] = {"keep": Keep, "recompute": Recompute}
