"""Attention over a list of slices: each slice is computed by a kernel, and where a row has several they are merged by
the logs of their sums of exponentials, in fp32. The backward pass computes each slice from the merged ones.

Shapes: s sequence, b samples, n query heads, g key/value heads, d channels of a key, v channels of a value.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from memory.transfer import to_device
from models.attention import kernels
from models.attention.slices import ANTI_CAUSAL, FULL, Slices, SliceShape


class RowRuns:
    """Where the rows of slices of equal length lie, for one side of them: first rows and samples, int64 `[m]`."""

    def __init__(self, first: np.ndarray, sample: np.ndarray, length: int) -> None:
        self.first, self.sample, self.length = first, sample, length
        self._index: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

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
        if found is not None:
            return found
        rows, samples = self._indices(x.device)
        return x[rows, samples].unflatten(0, (-1, self.length))

    def put(self, x: torch.Tensor, values: torch.Tensor) -> None:
        """Write `values` `[m, length, ...]` to the rows of `x` `[s, b, ...]`."""
        found = self.view(x)
        if found is not None:
            found.copy_(values)
        else:
            x[self._indices(x.device)] = values.flatten(0, 1).to(x.dtype)

    def _indices(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        if device not in self._index:
            rows = (self.first[:, None] + np.arange(self.length)).reshape(-1)
            both = torch.from_numpy(np.stack([rows, np.repeat(self.sample, self.length)]))
            both = to_device(both, device)
            self._index[device] = both[0], both[1]
        return self._index[device]


@dataclass(frozen=True)
class SliceBatch:
    """Slices of equal shape whose rows are in no two of them."""

    shape: SliceShape
    queries: RowRuns
    keys: RowRuns


class LaunchSlices:
    """Slices of one kind whose rows are in no two of them, as a kernel with cumulative lengths takes them."""

    def __init__(self, slices: Slices, length: int, num_samples: int) -> None:
        self.kind = int(slices.kind[0])
        self._slices, self._all = slices, length if num_samples == 1 else None
        self._on: dict[torch.device, tuple[Any, Any, kernels.Lengths]] = {}

    def batches(self) -> Iterator[SliceBatch]:
        """The slices by their shapes."""
        for shape, each in self._slices.batches():
            queries = RowRuns(each.query, each.sample, shape.queries)
            yield SliceBatch(shape, queries, RowRuns(each.key, each.sample, shape.keys))

    def on(self, device: torch.device) -> tuple[Any, Any, kernels.Lengths]:
        """Index of the query rows, index of the key rows, and lengths."""
        if device not in self._on:
            of = self._slices
            ends = [np.concatenate([[0], np.cumsum(each)]).astype(np.int32) for each in (of.queries, of.keys)]
            queries, keys = (to_device(torch.from_numpy(each), device) for each in ends)
            lengths = kernels.Lengths(queries, keys, int(of.queries.max()), int(of.keys.max()))
            self._on[device] = self._index(of.query, of.queries, device), self._index(of.key, of.keys, device), lengths
        return self._on[device]

    def _index(self, first: np.ndarray, lengths: np.ndarray, device: torch.device) -> Any:
        rows, samples = _rows(first, lengths, self._slices.sample, flips=self.kind == ANTI_CAUSAL)
        if len(rows) == self._all and (rows == np.arange(len(rows))).all():
            return slice(None), 0  # all of them as they are: nothing is copied
        return tuple(to_device(torch.from_numpy(each), device) for each in (rows, samples))


def _rows(first: np.ndarray, lengths: np.ndarray, sample: np.ndarray, flips: bool) -> tuple[np.ndarray, np.ndarray]:
    """Row and sample of each row of runs, one run after the other; `flips`: each from its last row to its first."""
    within = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    if flips:
        within = np.repeat(lengths, lengths) - 1 - within
    return np.repeat(first, lengths) + within, np.repeat(sample, lengths)


class SlicePlan:
    """How a micro-batch's slices are computed: made once on the host, and used by all layers.

    `merges`: some query row is in more than one slice; `adds`: some key row is. `covers_queries`, `covers_keys`: each
    row is in one.
    """

    def __init__(self, slices: Slices, length: int, num_samples: int) -> None:
        self.slices = slices
        of_queries = _cover(slices.sample, slices.query, slices.queries, length, num_samples)
        of_keys = _cover(slices.sample, slices.key, slices.keys, length, num_samples)
        self.merges, self.adds = bool((of_queries > 1).any()), bool((of_keys > 1).any())
        self.covers_queries, self.covers_keys = bool((of_queries > 0).all()), bool((of_keys > 0).all())
        self.launches = [LaunchSlices(each, length, num_samples) for each in slices.launches()]
        self.batches = [batch for launch in self.launches for batch in launch.batches()]


def _cover(sample: np.ndarray, first: np.ndarray, lengths: np.ndarray, length: int, num_samples: int) -> np.ndarray:
    """How many runs each row of each sample is in, `[b, s]`."""
    steps = np.zeros((num_samples, length + 1), np.int64)
    np.add.at(steps, (sample, first), 1)
    np.add.at(steps, (sample, first + lengths), -1)
    return steps.cumsum(1)[:, :length]


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: SlicePlan, scale: float) -> torch.Tensor:
    """query `[s, b, n, d]`, key `[s, b, g, d]`, value `[s, b, g, v]` -> `[s, b, n, v]`; zeros where a row has no
    slice."""
    return _Sliced.apply(query, key, value, plan, scale)


class _Sliced(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: SlicePlan, scale: float
    ) -> torch.Tensor:
        s, b, n, _ = query.shape
        output = _Merged(plan, query.new_empty(s, b, n, value.size(-1)))
        ctx.seeds = []  # of each launch or batch
        if kernels.takes_launches(query, value):
            for launch in plan.launches:
                of_query, of_key, lengths = launch.on(query.device)
                found, sums, seeds = kernels.launch_forward(
                    query[of_query], key[of_key], value[of_key], lengths, launch.kind != FULL, scale
                )
                output.add_rows(of_query, found, sums.t())
                ctx.seeds.append(seeds)
        else:
            for batch in plan.batches:
                found, sums, seeds = kernels.forward(
                    *_heads_first(batch, query, key, value), batch.shape.kind != FULL, scale
                )
                output.add(batch, _rows_first(batch, found), _rows_first(batch, sums))
                ctx.seeds.append(seeds)
        result, sums = output.done()
        ctx.save_for_backward(query, key, value, result, sums)
        ctx.plan, ctx.scale = plan, scale
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        query, key, value, output, sums = ctx.saved_tensors
        plan: SlicePlan = ctx.plan
        grads = (
            _Grads(query, plan.merges, plan.covers_queries),
            _Grads(key, plan.adds, plan.covers_keys),
            _Grads(value, plan.adds, plan.covers_keys),
        )
        if kernels.takes_launches(query, value):
            for launch, seeds in zip(plan.launches, ctx.seeds, strict=True):
                of_query, of_key, lengths = launch.on(query.device)
                found = kernels.launch_backward(
                    grad[of_query],
                    (query[of_query], key[of_key], value[of_key]),
                    (output[of_query], sums[of_query].t(), seeds),
                    lengths,
                    launch.kind != FULL,
                    ctx.scale,
                )
                for each, rows, part in zip(grads, (of_query, of_key, of_key), found):
                    each.add_rows(rows, part)
        else:
            for batch, seeds in zip(plan.batches, ctx.seeds, strict=True):
                given = _heads_first(batch, query, key, value)
                result = _side(batch, batch.queries, output), _side(batch, batch.queries, sums), seeds
                found = kernels.backward(
                    _side(batch, batch.queries, grad), given, result, batch.shape.kind != FULL, ctx.scale
                )
                for each, runs, part in zip(grads, (batch.queries, batch.keys, batch.keys), found):
                    each.add(runs, _rows_first(batch, part))
        return *(each.done() for each in grads), None, None


class _Merged:
    """The output and the sums of all slices so far."""

    def __init__(self, plan: SlicePlan, output: torch.Tensor) -> None:
        self._merges, self._dtype = plan.merges, output.dtype
        s, b, n, _ = output.shape
        self.sums = output.new_full((s, b, n), -torch.inf, dtype=torch.float32)
        self.output = output.float() if plan.merges else output
        if plan.merges or not plan.covers_queries:
            self.output.zero_()

    def add(self, batch: SliceBatch, output: torch.Tensor, sums: torch.Tensor) -> None:
        """output `[m, q, n, v]`, sums `[m, q, n]`."""
        if self._merges:
            output, sums = _merge(batch.queries.take(self.output), batch.queries.take(self.sums), output, sums)
        batch.queries.put(self.output, output)
        batch.queries.put(self.sums, sums)

    def add_rows(self, rows: Any, output: torch.Tensor, sums: torch.Tensor) -> None:
        """output `[t, n, v]`, sums `[t, n]`."""
        if self._merges:
            output, sums = _merge(self.output[rows], self.sums[rows], output, sums)
        self.output[rows] = output
        self.sums[rows] = sums

    def done(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.output.to(self._dtype), self.sums


def _merge(
    output: torch.Tensor, sums: torch.Tensor, other: torch.Tensor, other_sums: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two outputs over different keys of the same rows, fp32. The other one has a key in each row, so that no row is
    the difference of two infinities."""
    total = torch.logaddexp(sums, other_sums)
    kept, added = torch.exp(sums - total).unsqueeze(-1), torch.exp(other_sums - total).unsqueeze(-1)
    return output * kept + other.float() * added, total


class _Grads:
    """The gradient of one input: in fp32 where a row gets several."""

    def __init__(self, x: torch.Tensor, adds: bool, covers: bool) -> None:
        self._adds, self._dtype = adds, x.dtype
        make = torch.zeros if adds or not covers else torch.empty
        self.grad = make(x.shape, dtype=torch.float32 if adds else x.dtype, device=x.device)

    def add(self, runs: RowRuns, part: torch.Tensor) -> None:
        """part `[m, rows, heads, channels]`."""
        runs.put(self.grad, runs.take(self.grad) + part if self._adds else part)

    def add_rows(self, rows: Any, part: torch.Tensor) -> None:
        """part `[t, heads, channels]`."""
        self.grad[rows] = self.grad[rows] + part if self._adds else part

    def done(self) -> torch.Tensor:
        return self.grad.to(self._dtype)


def _heads_first(batch: SliceBatch, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> kernels.Triple:
    return (
        _side(batch, batch.queries, query),
        _side(batch, batch.keys, key),
        _side(batch, batch.keys, value),
    )


def _side(batch: SliceBatch, runs: RowRuns, x: torch.Tensor) -> torch.Tensor:
    """Rows of `x` `[s, b, heads, ...]` as kernels take them: `[m, heads, rows, ...]`."""
    rows = runs.take(x).transpose(1, 2)
    return rows.flip(2) if batch.shape.kind == ANTI_CAUSAL else rows


def _rows_first(batch: SliceBatch, x: torch.Tensor) -> torch.Tensor:
    """`[m, heads, rows, ...]` -> `[m, rows, heads, ...]`, the rows in their own order."""
    return (x.flip(2) if batch.shape.kind == ANTI_CAUSAL else x).transpose(1, 2)
