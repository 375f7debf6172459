"""Attention over a list of slices: each slice is computed by a kernel, and where a row has several they are merged by
the logs of their sums of exponentials, in fp32. The backward pass computes each slice from the merged ones.

Keys may come in rounds from the ranks that hold them, each while the one before it computes; their gradients go home
while the next round computes.

Shapes: s sequence, b samples, n query heads, g key/value heads, d channels of a key, v channels of a value.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from memory.transfer import to_device
from models.attention import kernels
from models.attention.exchange import ArrivingRows, ComingGradients, HeadExchange, RowExchange
from models.attention.row_runs import Cover, RowIndex, RowRuns, Rows, rows_of
from models.attention.slices import ANTI_CAUSAL, FULL, Slices, SliceShape

Inputs = kernels.Triple  # query `[s, b, n, d]`, key `[s, b, g, d]`, value `[s, b, g, v]`


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


Parts = Sequence[SliceLaunch | SliceBatch]


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
        ahead: int = 1,
    ) -> None:
        """`ahead`: of how many rounds after the one that computes keys are on their way, alike on all ranks."""
        self.queries, self.heads, self.ahead = Cover(num_samples, length), heads, ahead
        self.leaving: deque[tuple[ArrivingRows, int]] = deque()  # exchanges, and rows that this rank sends
        halves = slices.halves() if rounds else [slices]
        own = [KeyRows(each, self.queries, Cover(num_samples, length)) for each in halves]
        others = [KeyRows(each, self.queries, Cover(1, exchange.num_rows), exchange) for each, exchange in rounds]
        self.rounds = [*own, *others]
        # Keys come while own ones compute; in the backward pass the last gradients also go home meanwhile.
        self.order = range(len(self.rounds))
        self.backward_order = [0, *range(len(own), len(self.rounds)), *range(1, len(own))]

    @property
    def is_spread(self) -> bool:
        """Whether some keys are on other ranks."""
        return self.rounds[-1].exchange is not None

    def parts(self, query: torch.Tensor, width: int) -> list[Parts]:
        """What kernels compute, by round. width: channels of a value."""
        takes_launches = kernels.takes_launches(query, width)
        return [each.launches if takes_launches else each.batches for each in self.rounds]


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
        ctx.parts = plan.parts(query, value.size(-1))
        merged, ctx.seeds = Merged(plan.queries, query, value.size(-1)), []
        for i, keys in keys_of_rounds(plan, plan.order, key, value, ends=not any(ctx.needs_input_grad)):
            ctx.seeds.append(merged.add_all(ctx.parts[i], (query, *keys), scale))
        output, sums = merged.output.to(query.dtype), merged.sums
        ctx.save_for_backward(query, key, value, output, sums)
        ctx.plan, ctx.scale = plan, scale
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        query, key, value, output, sums = ctx.saved_tensors
        plan: SlicePlan = ctx.plan
        of_query, home = AddedUp(query, plan.queries, in_order=not plan.is_spread), HomeGradients()
        for i, keys in keys_of_rounds(plan, plan.backward_order, key, value, ends=True):
            each = plan.rounds[i]
            found = [AddedUp(x, each.keys, in_fp32=each.exchange is None and plan.is_spread) for x in keys]
            inputs, sides = (query, *keys), (of_query, *found)
            add_gradients(ctx.parts[i], ctx.seeds[i], grad, inputs, (output, sums), ctx.scale, sides)
            home.send(each, found[0].grad, found[1].grad, key.dtype)
        return of_query.grad.to(query.dtype), *(each.to(key.dtype) for each in home.collect()), None, None


class HomeGradients:
    """Gradients of keys and values on their way to where these lie, while later rounds compute: of as many rows as
    this rank has twice, and of a round."""

    def __init__(self) -> None:
        self._own: list[torch.Tensor] = []
        self._coming: deque[tuple[ComingGradients, int]] = deque()

    def send(self, round_: KeyRows, key_grad: torch.Tensor, value_grad: torch.Tensor, dtype: torch.dtype) -> None:
        """A round's, in the plan's order backward; this rank's own, of which some come first, in fp32 where others' are
        added."""
        exchange = round_.exchange
        if exchange is not None:
            coming = exchange.bring_home(key_grad.to(dtype), value_grad.to(dtype))
            self._coming.append((coming, exchange.num_rows + exchange.num_sent))
            while len(self._coming) > 1 and sum(rows for _, rows in self._coming) > 2 * len(self._own[0]):
                self._add_first()
        elif self._own:
            for whole, part in zip(self._own, (key_grad, value_grad)):
                whole += part
        else:
            self._own = [key_grad, value_grad]

    def collect(self) -> list[torch.Tensor]:
        """The gradients of this rank's keys and values."""
        while self._coming:
            self._add_first()
        return self._own

    def _add_first(self) -> None:
        self._coming.popleft()[0].add_to(*self._own)


def keys_of_rounds(
    plan: SlicePlan, order: Sequence[int], key: torch.Tensor, value: torch.Tensor, ends: bool
) -> Iterator[tuple[int, tuple[torch.Tensor, torch.Tensor]]]:
    """Each round's number in this order, with its keys and values; those of the rounds after it are on their way while
    it computes. All ranks start exchanges in the same order, as each pair's messages have no names.

    `ends`: what was sent is waited for in the end; else other passes do, for others may take it only later.
    """
    left = deque(each for i in order if (each := plan.rounds[i].exchange) is not None)
    coming: deque[tuple[ArrivingRows, int]] = deque()
    leaving = plan.leaving
    for i in order:
        keys = key, value
        if plan.rounds[i].exchange is not None:
            leaving.append(coming.popleft())
            keys = leaving[-1][0].wait()
        while left and len(coming) < plan.ahead:
            coming.append((left[0].fetch(key, value), left.popleft().num_sent))
        while len(leaving) > 1 and sum(rows for _, rows in leaving) > len(key):
            leaving.popleft()[0].wait_sent()
        yield i, keys
    while ends and leaving:
        leaving.popleft()[0].wait_sent()


class Merged:
    """The output and the sums of all slices so far: in fp32 where a row has several."""

    def __init__(self, cover: Cover, query: torch.Tensor, width: int) -> None:
        shape = *query.shape[:3], width
        make = torch.empty if cover.is_written else torch.zeros
        dtype = torch.float32 if cover.is_shared else query.dtype
        self.output = make(shape, dtype=dtype, device=query.device)
        self.sums = query.new_full(shape[:3], -torch.inf, dtype=torch.float32)

    def add_all(self, parts: Parts, inputs: Inputs, scale: float) -> list[Any]:
        """Compute parts of a plan and put them in; what their backward passes ask for."""
        found = []
        for part in parts:
            output, sums, seeds = part.forward(inputs, scale)
            self.add(part.queries, output, sums)
            found.append(seeds)
        return found

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


class AddedUp:
    """The gradient of one input: in fp32 where a row gets several. `in_order`: slices come in their plan's order."""

    def __init__(self, x: torch.Tensor, cover: Cover, in_fp32: bool = False, in_order: bool = True) -> None:
        make = torch.empty if cover.is_written and in_order else torch.zeros
        dtype = torch.float32 if in_fp32 or cover.is_shared else x.dtype
        self.grad, self._in_order = make(x.shape, dtype=dtype, device=x.device), in_order

    def add(self, rows: Rows, part: torch.Tensor) -> None:
        """Add that of some rows, `[..., heads, channels]`."""
        is_new = rows.is_first and self._in_order
        rows.put(self.grad, part if is_new else rows.take(self.grad) + part)


def add_gradients(
    parts: Parts,
    seeds: Sequence[Any],
    grad: torch.Tensor,
    inputs: Inputs,
    merged: tuple[torch.Tensor, torch.Tensor],
    scale: float,
    sides: Sequence[AddedUp],
) -> None:
    """Compute a round's parts backward from the merged output and sums, and add what they give to the gradients of
    query, key and value. `seeds`: by part, what its forward pass gave for this."""
    for part, of_part in zip(parts, seeds):
        found = part.backward(grad, inputs, (*merged, of_part), scale)
        for side, rows, of_rows in zip(sides, (part.queries, part.keys, part.keys), found):
            side.add(rows, of_rows)
