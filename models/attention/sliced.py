"""Attention over a list of slices: each slice is computed by a kernel, and where a row has several they are merged by
the logs of their sums of exponentials, in fp32. The backward pass computes each slice from the merged ones.

Keys may come in rounds from the ranks that hold them, each while the one before it computes; their gradients go home
while the next round computes.

Shapes: s sequence, b samples, n query heads, g key/value heads, d channels of a key, v channels of a value.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from memory.transfer import to_device
from models.attention import kernels
from models.attention.exchange import ArrivingRows, ComingGradients, HeadExchange, RowExchange
from models.attention.slices import ANTI_CAUSAL, FULL, Slices, SliceShape


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
Inputs = kernels.Triple  # query `[s, b, n, d]`, key `[s, b, g, d]`, value `[s, b, g, v]`


def rows_of(
    first: np.ndarray, lengths: np.ndarray, sample: np.ndarray, flips: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Row and sample of each row of runs, one run after the other; `flips`: each from its last row to its first."""
    within = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    if flips:
        within = np.repeat(lengths, lengths) - 1 - within
    return np.repeat(first, lengths) + within, np.repeat(sample, lengths)


@dataclass(frozen=True)
class SliceBatch:
    """Slices of equal shape whose rows are in no two of them, for kernels that take a batch."""

    shape: SliceShape
    queries: RowRuns
    keys: RowRuns

    def forward(self, inputs: Inputs, scale: float) -> kernels.Found:
        """Output `[m, q, n, v]` and sums `[m, q, n]`."""
        output, sums, seeds = kernels.forward(*self._heads_first(inputs), self.shape.kind != FULL, scale)
        return self._rows_first(output), self._rows_first(sums), seeds

    def backward(self, grad: torch.Tensor, inputs: Inputs, result: kernels.Found, scale: float) -> kernels.Triple:
        """Gradients of the inputs' rows, `[m, rows, heads, channels]`; `grad`, output and sums are of all rows."""
        grad, output, sums = (self._side(self.queries, each) for each in (grad, *result[:2]))
        found = kernels.backward(
            grad, self._heads_first(inputs), (output, sums, result[2]), self.shape.kind != FULL, scale
        )
        return tuple(self._rows_first(each) for each in found)  # type: ignore[return-value]

    def _heads_first(self, inputs: Inputs) -> kernels.Triple:
        query, key, value = inputs
        return self._side(self.queries, query), self._side(self.keys, key), self._side(self.keys, value)

    def _side(self, runs: RowRuns, x: torch.Tensor) -> torch.Tensor:
        """Rows of `x` `[s, b, heads, ...]` as kernels take them: `[m, heads, rows, ...]`."""
        rows = runs.take(x).transpose(1, 2)
        return rows.flip(2) if self.shape.kind == ANTI_CAUSAL else rows

    def _rows_first(self, x: torch.Tensor) -> torch.Tensor:
        """`[m, heads, rows, ...]` -> `[m, rows, heads, ...]`, the rows in their own order."""
        return (x.flip(2) if self.shape.kind == ANTI_CAUSAL else x).transpose(1, 2)


class SliceLaunch:
    """Slices of one kind whose rows are in no two of them, for a kernel that takes cumulative lengths."""

    def __init__(self, slices: Slices, queries: RowIndex, keys: RowIndex) -> None:
        self.queries, self.keys = queries, keys
        self._slices, self._causal = slices, int(slices.kind[0]) != FULL
        self._lengths: dict[torch.device, kernels.Lengths] = {}

    def forward(self, inputs: Inputs, scale: float) -> kernels.Found:
        """Output `[t, n, v]` and sums `[t, n]`."""
        lengths = self._lengths_on(inputs[0].device)
        output, sums, seeds = kernels.launch_forward(*self._of_rows(inputs), lengths, self._causal, scale)
        return output, sums.t(), seeds

    def backward(self, grad: torch.Tensor, inputs: Inputs, result: kernels.Found, scale: float) -> kernels.Triple:
        """Gradients of the inputs' rows, `[t, heads, channels]`; `grad`, output and sums are of all rows."""
        grad, output, sums = (self.queries.take(each) for each in (grad, *result[:2]))
        lengths = self._lengths_on(grad.device)
        found = output, sums.t(), result[2]
        return kernels.launch_backward(grad, self._of_rows(inputs), found, lengths, self._causal, scale)

    def _of_rows(self, inputs: Inputs) -> kernels.Triple:
        query, key, value = inputs
        return self.queries.take(query), self.keys.take(key), self.keys.take(value)

    def _lengths_on(self, device: torch.device) -> kernels.Lengths:
        if device not in self._lengths:
            of = self._slices
            ends = [np.concatenate([[0], np.cumsum(each)]).astype(np.int32) for each in (of.queries, of.keys)]
            queries, keys = (to_device(torch.from_numpy(each), device) for each in ends)
            self._lengths[device] = kernels.Lengths(queries, keys, int(of.queries.max()), int(of.keys.max()))
        return self._lengths[device]


class KeyRows:
    """Slices over the keys of one round: this rank's own, or those that an exchange brings. `keys`: how often they are
    in slices."""

    def __init__(self, slices: Slices, queries: Cover, keys: Cover, exchange: RowExchange | None = None) -> None:
        self.keys, self.exchange = keys, exchange
        self._groups = [
            (
                group,
                queries.add(group.sample, group.query, group.queries),
                keys.add(group.sample, group.key, group.keys),
            )
            for group in slices.launches()
        ]
        num_samples, length = keys.counts.shape
        self._every = np.arange(length) if num_samples == 1 else None

    @functools.cached_property
    def launches(self) -> list[SliceLaunch]:
        """For a kernel that takes cumulative lengths."""
        return [
            SliceLaunch(
                group,
                self._index(group, group.query, group.queries, of_queries),
                self._index(group, group.key, group.keys, of_keys),
            )
            for group, of_queries, of_keys in self._groups
        ]

    def _index(self, group: Slices, first: np.ndarray, lengths: np.ndarray, is_first: bool) -> RowIndex:
        rows, samples = rows_of(first, lengths, group.sample, flips=int(group.kind[0]) == ANTI_CAUSAL)
        return RowIndex(rows, samples, is_first, self._every is not None and np.array_equal(rows, self._every))

    @functools.cached_property
    def batches(self) -> list[SliceBatch]:
        """For kernels that take slices of one shape."""
        return [
            SliceBatch(
                shape,
                RowRuns(each.query, each.sample, shape.queries, of_queries),
                RowRuns(each.key, each.sample, shape.keys, of_keys),
            )
            for group, of_queries, of_keys in self._groups
            for shape, each in group.batches()
        ]

    @property
    def gets_more(self) -> bool:
        """Whether gradients of keys come back from other ranks."""
        return self.exchange is not None and self.exchange.takes_part


class SlicePlan:
    """How a micro-batch's slices are computed: made once on the host, and used by all layers. `queries`: how often
    query rows are in slices of all rounds."""

    def __init__(
        self,
        slices: Slices,
        length: int,
        num_samples: int,
        rounds: Sequence[tuple[Slices, RowExchange]] = (),
        heads: HeadExchange | None = None,
    ) -> None:
        self.queries, self.heads = Cover(num_samples, length), heads
        own = KeyRows(slices, self.queries, Cover(num_samples, length))
        others = [KeyRows(each, self.queries, Cover(1, exchange.num_rows), exchange) for each, exchange in rounds]
        self.rounds = [own, *others]


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


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: SlicePlan, scale: float) -> torch.Tensor:
    """query `[s, b, n, d]`, key `[s, b, g, d]`, value `[s, b, g, v]` -> `[s, b, n, v]`; zeros where a row has no
    slice."""
    if plan.heads is None:
        return _Sliced.apply(query, key, value, plan, scale)
    output = _Sliced.apply(*plan.heads.to_heads(query, key, value), plan, scale)
    return plan.heads.to_rows(output)


class _Sliced(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: SlicePlan, scale: float
    ) -> torch.Tensor:
        takes_launches = kernels.takes_launches(query, value)
        ctx.parts = [each.launches if takes_launches else each.batches for each in plan.rounds]
        merged, ctx.seeds = _Merged(plan.queries, query, value.size(-1)), []
        for parts, keys in zip(ctx.parts, _keys_of_rounds(plan, key, value)):
            for part in parts:
                output, sums, seeds = part.forward((query, *keys), scale)
                merged.add(part.queries, output, sums)
                ctx.seeds.append(seeds)
        output, sums = merged.output.to(query.dtype), merged.sums
        ctx.save_for_backward(query, key, value, output, sums)
        ctx.plan, ctx.scale = plan, scale
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        query, key, value, output, sums = ctx.saved_tensors
        plan: SlicePlan = ctx.plan
        of_query, seeds = _AddedUp(query, plan.queries), iter(ctx.seeds)
        gets_more = any(each.gets_more for each in plan.rounds)
        own: list[_AddedUp] = []
        coming: ComingGradients | None = None
        for each, parts, keys in zip(plan.rounds, ctx.parts, _keys_of_rounds(plan, key, value)):
            found = [_AddedUp(x, each.keys, in_fp32=gets_more and not own) for x in keys]
            for part in parts:
                grads = part.backward(grad, (query, *keys), (output, sums, next(seeds)), ctx.scale)
                for side, rows, of_rows in zip((of_query, *found), (part.queries, part.keys, part.keys), grads):
                    side.add(rows, of_rows)
            if each.exchange is None:
                own = found
                continue
            if coming is not None:
                coming.add_to(*(side.grad for side in own))
            coming = each.exchange.bring_home(*(side.grad.to(x.dtype) for side, x in zip(found, keys)))
        if coming is not None:
            coming.add_to(*(side.grad for side in own))
        return *(side.grad.to(x.dtype) for side, x in zip((of_query, *own), (query, key, value))), None, None


def _keys_of_rounds(
    plan: SlicePlan, key: torch.Tensor, value: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of each round; those of the next one are on their way while a round computes."""
    arriving: ArrivingRows | None = None
    for i in range(len(plan.rounds)):
        keys = (key, value) if arriving is None else arriving.wait()
        following = plan.rounds[i + 1].exchange if i + 1 < len(plan.rounds) else None
        arriving = None if following is None else following.fetch(key, value)
        yield keys


class _Merged:
    """The output and the sums of all slices so far: in fp32 where a row has several."""

    def __init__(self, cover: Cover, query: torch.Tensor, width: int) -> None:
        shape = *query.shape[:3], width
        make = torch.empty if cover.is_written else torch.zeros
        dtype = torch.float32 if cover.is_shared else query.dtype
        self.output = make(shape, dtype=dtype, device=query.device)
        self.sums = query.new_full(shape[:3], -torch.inf, dtype=torch.float32)

    def add(self, rows: Rows, output: torch.Tensor, sums: torch.Tensor) -> None:
        """Put in output `[..., n, v]` and sums `[..., n]` of some rows."""
        if not rows.is_first:
            output, sums = _merge(rows.take(self.output), rows.take(self.sums), output, sums)
        rows.put(self.output, output)
        rows.put(self.sums, sums)


def _merge(
    output: torch.Tensor, sums: torch.Tensor, other: torch.Tensor, other_sums: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two outputs over different keys of the same rows, fp32. The other one has a key in each row, so that no row is
    the difference of two infinities."""
    total = torch.logaddexp(sums, other_sums)
    kept, added = torch.exp(sums - total).unsqueeze(-1), torch.exp(other_sums - total).unsqueeze(-1)
    return output * kept + other.float() * added, total


class _AddedUp:
    """The gradient of one input: in fp32 where a row gets several."""

    def __init__(self, x: torch.Tensor, cover: Cover, in_fp32: bool = False) -> None:
        make = torch.empty if cover.is_written else torch.zeros
        dtype = torch.float32 if in_fp32 or cover.is_shared else x.dtype
        self.grad = make(x.shape, dtype=dtype, device=x.device)

    def add(self, rows: Rows, part: torch.Tensor) -> None:
        """Add that of some rows, `[..., heads, channels]`."""
        rows.put(self.grad, part if rows.is_first else rows.take(self.grad) + part)
