"""Which rows of a tensor slices take, run by run or one by one, and how often.

Shapes: s sequence, b samples.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from memory.transfer import to_device


class RowRuns:
    """Where the rows of slices of equal length lie, for one side of them: first rows and samples, int64 `[m]`.

    `is_first`: no slice before them has any of these rows.
    """

    def __init__(self, first: np.ndarray, sample: np.ndarray, length: int, is_first: bool) -> None:
        self.first, self.sample, self.length, self.is_first = first, sample, length, is_first
        self._index: RowIndex | None = None

    def view(self, x: torch.Tensor) -> torch.Tensor | None:
        """The rows of `x` `[s, b, ...]` as `[m, length, ...]` without a copy, where they lie evenly."""
        m, first, sample = len(self.first), int(self.first[0]), int(self.sample[0])
        if m == 1:
            return x[first : first + self.length, sample].unsqueeze(0)
        if (self.first == first).all() and (np.diff(self.sample) == 1).all():
            return x[first : first + self.length, sample : sample + m].transpose(0, 1)
        if (self.sample == sample).all() and (np.diff(self.first) == self.length).all():
            return x[first : first + m * self.length, sample].unflatten(0, (m, self.length))
        return None

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """The rows of `x` `[s, b, ...]`: `[m, length, ...]`."""
        found = self.view(x)
        return self.index.take(x).unflatten(0, (-1, self.length)) if found is None else found

    def put(self, x: torch.Tensor, values: torch.Tensor) -> None:
        """Write `values` `[m, length, ...]` to the rows of `x` `[s, b, ...]`."""
        found = self.view(x)
        if found is not None:
            found.copy_(values)
        else:
            self.index.put(x, values.flatten(0, 1))

    @property
    def index(self) -> RowIndex:
        """The same rows one by one."""
        if self._index is None:
            lengths = np.full(len(self.first), self.length)
            self._index = RowIndex(*rows_of(self.first, lengths, self.sample), self.is_first)
        return self._index


class RowIndex:
    """Rows one by one: row and sample of each, int64 `[t]`. `is_all`: they are all that there are, in their order."""

    def __init__(self, rows: np.ndarray, samples: np.ndarray, is_first: bool, is_all: bool = False) -> None:
        self.is_first, self._is_all = is_first, is_all
        self._rows, self._samples = rows, samples
        self._on: dict[torch.device, Any] = {}

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """The rows of `x` `[s, b, ...]`: `[t, ...]`."""
        return x[self._index(x.device)]

    def put(self, x: torch.Tensor, values: torch.Tensor) -> None:
        """Write `values` `[t, ...]` to the rows of `x` `[s, b, ...]`."""
        x[self._index(x.device)] = values.to(x.dtype)

    def _index(self, device: torch.device) -> Any:
        if self._is_all:
            return slice(None), 0  # nothing is copied
        if device not in self._on:
            self._on[device] = tuple(to_device(torch.from_numpy(each), device) for each in (self._rows, self._samples))
        return self._on[device]


Rows = RowRuns | RowIndex


def rows_of(
    first: np.ndarray, lengths: np.ndarray, sample: np.ndarray, flips: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Row and sample of each row of runs, one run after the other; `flips`: each from its last row to its first."""
    within = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    if flips:
        within = np.repeat(lengths, lengths) - 1 - within
    return np.repeat(first, lengths) + within, np.repeat(sample, lengths)


class Cover:
    """How often each row of each sample is in slices, `[b, s]`."""

    def __init__(self, num_samples: int, length: int) -> None:
        self.counts = np.zeros((num_samples, length), np.int64)
        self.is_mixed = False  # some slices have both rows that were there before and others

    def add(self, sample: np.ndarray, first: np.ndarray, lengths: np.ndarray) -> bool:
        """Count the rows of slices that share none; whether all of them are new."""
        steps = np.zeros((self.counts.shape[0], self.counts.shape[1] + 1), np.int64)
        np.add.at(steps, (sample, first), 1)
        np.add.at(steps, (sample, first + lengths), -1)
        rows = steps.cumsum(1)[:, :-1] > 0
        before = self.counts[rows] > 0
        self.is_mixed |= bool(before.any()) and not bool(before.all())
        self.counts += rows
        return not before.any()

    @property
    def is_shared(self) -> bool:
        """Whether some row is in several."""
        return bool((self.counts > 1).any())

    @property
    def is_written(self) -> bool:
        """Whether each row is written before it is read."""
        return not self.is_mixed and bool((self.counts > 0).all())
