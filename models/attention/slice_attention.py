"""Attention over a list of slices (mask_slices.py). A kernel computes each slice; if a row is in several slices, their
outputs are merged by the log-sum-exp of their scores, in fp32. The backward pass computes each slice from the merged
results.

Keys may be received in rounds from the ranks that hold them, each round while the previous one computes; their
gradients are sent back while the next round computes. Latent attention exchanges compressed rows: each round's latents
are expanded to keys and values, and expanded again in the backward pass, so that expanded rows are never stored.

Shapes: s sequence, b samples, n query heads, g key/value heads, d channels of a key, v channels of a value. Latent
attention: l channels of a latent, p rotary channels of a key, d its other channels.
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
from models.attention.mask_slices import ANTI_CAUSAL, FULL, Slices, SliceShape
from models.attention.row_exchange import ArrivingGradients, ArrivingRows, HeadExchange, RowExchange
from parallel.megatron.grad_buffers import GradientSum

Inputs = kernels.Triple  # query `[s, b, n, d]`, key `[s, b, g, d]`, value `[s, b, g, v]`


# -- rows of slices ---------------------------------------------------------------------------------------------------


class RowRuns:
    """The query rows or the key rows of attention slices of equal length, as runs of rows: first row and sample of each
    run, int64 `[m]`. `is_first`: True if no earlier slice has any of these rows."""

    def __init__(self, first: np.ndarray, sample: np.ndarray, length: int, is_first: bool) -> None:
        self.first, self.sample, self.length, self.is_first = first, sample, length, is_first

    def view(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return these rows of `x` `[s, b, ...]` as a view `[m, length, ...]`, or None if the runs are not evenly
        spaced."""
        m, first, sample = len(self.first), int(self.first[0]), int(self.sample[0])
        if m == 1:
            return x[first : first + self.length, sample].unsqueeze(0)
        if (self.first == first).all() and (np.diff(self.sample) == 1).all():
            return x[first : first + self.length, sample : sample + m].transpose(0, 1)
        if (self.sample == sample).all() and (np.diff(self.first) == self.length).all():
            return x[first : first + m * self.length, sample].unflatten(0, (m, self.length))
        return None

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """Return these rows of `x` `[s, b, ...]` as `[m, length, ...]`; a view if possible."""
        found = self.view(x)
        return self.index.take(x).unflatten(0, (-1, self.length)) if found is None else found

    def put(self, x: torch.Tensor, values: torch.Tensor) -> None:
        """Write `values` `[m, length, ...]` into these rows of `x` `[s, b, ...]`."""
        found = self.view(x)
        if found is not None:
            found.copy_(values)
        else:
            self.index.put(x, values.flatten(0, 1))

    @functools.cached_property
    def index(self) -> RowIndex:
        """RowIndex of the runs, which lists their rows one by one."""
        lengths = np.full(len(self.first), self.length)
        return RowIndex(*row_numbers(self.first, lengths, self.sample), self.is_first)


class RowIndex:
    """Query or key rows of attention slices, listed one by one: row and sample of each, int64 `[t]`. `is_first`: True
    if no earlier slice has any of these rows. `is_all`: True if these are all rows, in order."""

    def __init__(self, row_numbers: np.ndarray, samples: np.ndarray, is_first: bool, is_all: bool = False) -> None:
        self.is_first, self._is_all = is_first, is_all
        self._row_numbers, self._samples = row_numbers, samples
        self._on: dict[torch.device, Any] = {}

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """Gather the listed rows of `x` `[s, b, ...]`: `[t, ...]`."""
        return x[self._index(x.device)]

    def put(self, x: torch.Tensor, values: torch.Tensor) -> None:
        """Write `values` `[t, ...]` into the listed rows of `x` `[s, b, ...]`."""
        x[self._index(x.device)] = values.to(x.dtype)

    def _index(self, device: torch.device) -> Any:
        if self._is_all:
            return slice(None), 0  # nothing is copied
        if device not in self._on:
            both = torch.from_numpy(self._row_numbers), torch.from_numpy(self._samples)
            self._on[device] = tuple(to_device(each, device) for each in both)
        return self._on[device]


SliceRows = RowRuns | RowIndex


def row_numbers(
    first: np.ndarray, lengths: np.ndarray, sample: np.ndarray, flips: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Return the row and the sample of each row in several runs of rows, one run after the other. `flips`: list each
    run from its last row to its first."""
    within = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    if flips:
        within = np.repeat(lengths, lengths) - 1 - within
    return np.repeat(first, lengths) + within, np.repeat(sample, lengths)


class RowCoverage:
    """Table of how many attention slices contain each row of each sample, `[b, s]`. It determines whether outputs are
    merged in fp32, and whether buffers must start as zeros."""

    def __init__(self, num_samples: int, length: int) -> None:
        self.counts = np.zeros((num_samples, length), np.int64)
        self.is_mixed = False  # whether a slice has both rows that were covered before and new rows

    def add(self, sample: np.ndarray, first: np.ndarray, lengths: np.ndarray) -> bool:
        """Add 1 to the slice count of rows [first, first + length) of each sample. These slices share no rows. Returns
        whether no earlier slice has any of these rows."""
        steps = np.zeros((self.counts.shape[0], self.counts.shape[1] + 1), np.int64)
        np.add.at(steps, (sample, first), 1)
        np.add.at(steps, (sample, first + lengths), -1)
        is_covered = steps.cumsum(1)[:, :-1] > 0
        before = self.counts[is_covered] > 0
        self.is_mixed |= bool(before.any()) and not bool(before.all())
        self.counts += is_covered
        return not before.any()

    @property
    def is_shared(self) -> bool:
        """True if any row is in several slices."""
        return bool((self.counts > 1).any())

    @property
    def is_written(self) -> bool:
        """True if an output buffer may start uninitialized, because each of its rows is written before it is read."""
        return not self.is_mixed and bool((self.counts > 0).all())


# -- slices as kernels take them --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SliceBatch:
    """Attention slices of equal shape that share no rows, for kernels with a batch dimension."""

    shape: SliceShape
    queries: RowRuns
    keys: RowRuns

    def forward(self, inputs: Inputs, scale: float) -> kernels.Found:
        """Compute the attention of these slices. Returns output `[m, q, n, v]`, log-sum-exp `[m, q, n]`, and tensors
        for the backward pass."""
        output, sums, seeds = kernels.forward(*self._heads_first(inputs), self.shape.kind != FULL, scale)
        return self._rows_first(output), self._rows_first(sums), seeds

    def backward(self, grad: torch.Tensor, inputs: Inputs, result: kernels.Found, scale: float) -> kernels.Triple:
        """Return the gradients of these slices' query, key and value rows, `[m, rows, heads, channels]`. `grad`: the
        output gradient of all rows."""
        grad, output, sums = (self._side(self.queries, each) for each in (grad, *result[:2]))
        given, merged = self._heads_first(inputs), (output, sums, result[2])
        found = kernels.backward(grad, given, merged, self.shape.kind != FULL, scale)
        return tuple(self._rows_first(each) for each in found)  # type: ignore[return-value]

    def _heads_first(self, inputs: Inputs) -> kernels.Triple:
        query, key, value = inputs
        return self._side(self.queries, query), self._side(self.keys, key), self._side(self.keys, value)

    def _side(self, runs: RowRuns, x: torch.Tensor) -> torch.Tensor:
        """Return the slices' rows of `x` `[s, b, heads, ...]` as `[m, heads, rows, ...]`. Rows of anti-causal slices
        are reversed."""
        taken = runs.take(x).transpose(1, 2)
        return taken.flip(2) if self.shape.kind == ANTI_CAUSAL else taken

    def _rows_first(self, x: torch.Tensor) -> torch.Tensor:
        """Transpose `[m, heads, rows, ...]` to `[m, rows, heads, ...]`, and undo the reversal of rows in anti-causal
        slices."""
        return (x.flip(2) if self.shape.kind == ANTI_CAUSAL else x).transpose(1, 2)


class SliceLaunch:
    """Attention slices of one kind that share no rows, for a kernel that takes cumulative lengths."""

    def __init__(self, slices: Slices, queries: RowIndex, keys: RowIndex) -> None:
        self.queries, self.keys = queries, keys
        self._slices, self._causal = slices, int(slices.kind[0]) != FULL
        self._lengths: dict[torch.device, kernels.Lengths] = {}

    def forward(self, inputs: Inputs, scale: float) -> kernels.Found:
        """Compute the attention of these slices. Returns output `[t, n, v]`, log-sum-exp `[t, n]`, and tensors for the
        backward pass."""
        lengths = self._lengths_on(inputs[0].device)
        output, sums, seeds = kernels.launch_forward(*self._side_rows(inputs), lengths, self._causal, scale)
        return output, sums.t(), seeds

    def backward(self, grad: torch.Tensor, inputs: Inputs, result: kernels.Found, scale: float) -> kernels.Triple:
        """Return the gradients of these slices' query, key and value rows, `[t, heads, channels]`. `grad`: the output
        gradient of all rows."""
        grad, output, sums = (self.queries.take(each) for each in (grad, *result[:2]))
        lengths = self._lengths_on(grad.device)
        found = output, sums.t(), result[2]
        return kernels.launch_backward(grad, self._side_rows(inputs), found, lengths, self._causal, scale)

    def _side_rows(self, inputs: Inputs) -> kernels.Triple:
        query, key, value = inputs
        return self.queries.take(query), self.keys.take(key), self.keys.take(value)

    def _lengths_on(self, device: torch.device) -> kernels.Lengths:
        if device not in self._lengths:
            of = self._slices
            ends = [np.concatenate([[0], np.cumsum(each)]).astype(np.int32) for each in (of.queries, of.keys)]
            queries, keys = (to_device(torch.from_numpy(each), device) for each in ends)
            self._lengths[device] = kernels.Lengths(queries, keys, int(of.queries.max()), int(of.keys.max()))
        return self._lengths[device]


SliceCalls = Sequence[SliceLaunch | SliceBatch]


class KeyRound:
    """Attention slices over the keys of one round: this rank's own keys, or keys that it receives. `keys`: number of
    slices that contain each key row."""

    def __init__(
        self, slices: Slices, queries: RowCoverage, keys: RowCoverage, exchange: RowExchange | None = None
    ) -> None:
        self.keys, self.exchange = keys, exchange
        self._groups: list[tuple[Slices, bool, bool]] = []
        for group in slices.launches():
            of_queries = queries.add(group.sample, group.query, group.queries)
            self._groups.append((group, of_queries, keys.add(group.sample, group.key, group.keys)))
        num_samples, length = keys.counts.shape
        self._every = np.arange(length) if num_samples == 1 else None

    @functools.cached_property
    def launches(self) -> list[SliceLaunch]:
        """The slices, grouped for a kernel that takes cumulative lengths."""
        found = []
        for group, of_queries, of_keys in self._groups:
            queries = self._index(group, group.query, group.queries, of_queries)
            found.append(SliceLaunch(group, queries, self._index(group, group.key, group.keys, of_keys)))
        return found

    def _index(self, group: Slices, first: np.ndarray, lengths: np.ndarray, is_first: bool) -> RowIndex:
        numbers, samples = row_numbers(first, lengths, group.sample, flips=int(group.kind[0]) == ANTI_CAUSAL)
        return RowIndex(numbers, samples, is_first, self._every is not None and np.array_equal(numbers, self._every))

    @functools.cached_property
    def batches(self) -> list[SliceBatch]:
        """The slices, grouped by shape for kernels with a batch dimension."""
        found = []
        for group, of_queries, of_keys in self._groups:
            for shape, each in group.batches():
                queries = RowRuns(each.query, each.sample, shape.queries, of_queries)
                found.append(SliceBatch(shape, queries, RowRuns(each.key, each.sample, shape.keys, of_keys)))
        return found


class SlicePlan:
    """Plan for computing a micro-batch's attention slices round by round, made once on the host and used by all layers.
    `queries`: number of slices in all rounds that contain each query row."""

    def __init__(
        self,
        slices: Slices,
        length: int,
        num_samples: int,
        rounds: Sequence[tuple[Slices, RowExchange]] = (),
        heads: HeadExchange | None = None,
        ahead: int = 1,
    ) -> None:
        """Plan a micro-batch's attention on this rank, in rounds. `slices`: over this rank's own keys. `rounds`: slices
        over received keys, each with its exchange. `ahead`: number of later rounds whose keys are in flight during a
        round, the same on all ranks."""
        self.queries, self.heads, self.ahead = RowCoverage(num_samples, length), heads, ahead
        # Exchanges in flight, and the number of rows that this rank sends in each.
        self.leaving: deque[tuple[ArrivingRows, int]] = deque()
        halves = slices.halves() if rounds else [slices]
        own = [KeyRound(each, self.queries, RowCoverage(num_samples, length)) for each in halves]
        others = (KeyRound(each, self.queries, RowCoverage(1, sent.num_rows), sent) for each, sent in rounds)
        self.rounds = [*own, *others]
        # Keys arrive while own slices are computed; in the backward pass the last gradients also return meanwhile.
        self.order = range(len(self.rounds))
        self.backward_order = [0, *range(len(own), len(self.rounds)), *range(1, len(own))]

    @property
    def is_spread(self) -> bool:
        """True if other ranks hold some of the keys."""
        return self.rounds[-1].exchange is not None

    def calls(self, query: torch.Tensor, width: int) -> list[SliceCalls]:
        """Return the kernel calls of each round. `width`: channels of a value head."""
        takes_launches = kernels.takes_launches(query, width)
        return [each.launches if takes_launches else each.batches for each in self.rounds]


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: SlicePlan, scale: float) -> torch.Tensor:
    """Compute attention slice by slice for query `[s, b, n, d]`, key `[s, b, g, d]` and value `[s, b, g, v]`. Returns
    `[s, b, n, v]`; rows that are in no slice get 0."""
    if plan.heads is None:
        return _Sliced.apply(query, key, value, plan, scale)
    return plan.heads.to_rows(_Sliced.apply(*plan.heads.to_heads(query, key, value), plan, scale))


class _Sliced(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: SlicePlan, scale: float
    ) -> torch.Tensor:
        ctx.calls = plan.calls(query, value.size(-1))
        merged, ctx.seeds = MergedOutput(plan.queries, query, value.size(-1)), []
        for i, keys in keys_of_rounds(plan, plan.order, key, value, ends=not any(ctx.needs_input_grad)):
            ctx.seeds.append(merged.add_all(ctx.calls[i], (query, *keys), scale))
        output, sums = merged.output.to(query.dtype), merged.sums
        ctx.save_for_backward(query, key, value, output, sums)
        ctx.plan, ctx.scale = plan, scale
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        query, key, value, output, sums = ctx.saved_tensors
        plan: SlicePlan = ctx.plan
        of_query = AccumulatedGradient(query, plan.queries, in_order=not plan.is_spread)
        returning = ReturningGradients()
        for i, keys in keys_of_rounds(plan, plan.backward_order, key, value, ends=True):
            each = plan.rounds[i]
            found = [AccumulatedGradient(x, each.keys, in_fp32=each.exchange is None and plan.is_spread) for x in keys]
            inputs, sides = (query, *keys), (of_query, *found)
            add_gradients(ctx.calls[i], ctx.seeds[i], grad, inputs, (output, sums), ctx.scale, sides)
            returning.send(each, found[0].grad, found[1].grad, key.dtype)
        return of_query.grad.to(query.dtype), *(each.to(key.dtype) for each in returning.collect()), None, None


class ReturningGradients:
    """Key and value gradients that are being sent to the ranks that hold these rows, while later rounds compute. At
    most twice this rank's rows, plus one round, are in flight."""

    def __init__(self) -> None:
        self._own: list[torch.Tensor] = []
        self._coming: deque[tuple[ArrivingGradients, int]] = deque()

    def send(self, round_: KeyRound, key_grad: torch.Tensor, value_grad: torch.Tensor, dtype: torch.dtype) -> None:
        """Start sending a round's key and value gradients; call it in the plan's backward order. Gradients of this
        rank's own keys are kept. They must be given first, and in fp32 if gradients from other ranks will be added."""
        exchange = round_.exchange
        if exchange is not None:
            coming = exchange.return_gradients(key_grad.to(dtype), value_grad.to(dtype))
            self._coming.append((coming, exchange.num_rows + exchange.num_sent))
            while len(self._coming) > 1 and sum(num_rows for _, num_rows in self._coming) > 2 * len(self._own[0]):
                self._coming.popleft()[0].add_to(*self._own)
        elif self._own:
            for whole, gradient in zip(self._own, (key_grad, value_grad)):
                whole += gradient
        else:
            self._own = [key_grad, value_grad]

    def collect(self) -> list[torch.Tensor]:
        """Wait for the gradients from other ranks. Returns the complete gradients of this rank's keys and values."""
        while self._coming:
            self._coming.popleft()[0].add_to(*self._own)
        return self._own


def keys_of_rounds(
    plan: SlicePlan, order: Sequence[int], key: torch.Tensor, value: torch.Tensor, ends: bool
) -> Iterator[tuple[int, tuple[torch.Tensor, torch.Tensor]]]:
    """Yield the index of each round in `order`, with its keys and values, while the keys of later rounds are being
    received.

    All ranks start exchanges in the same order, because messages between two ranks have no tags. `ends`: wait for this
    rank's sends at the end. Otherwise a later pass waits for them, because other ranks may receive the messages only
    then.
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
        while len(leaving) > 1 and sum(num_rows for _, num_rows in leaving) > len(key):
            leaving.popleft()[0].wait_sent()
        yield i, keys
    while ends and leaving:
        leaving.popleft()[0].wait_sent()


class MergedOutput:
    """Merged attention output and log-sum-exp of the slices computed so far. The output is in fp32 if a row is in
    several slices."""

    def __init__(self, cover: RowCoverage, query: torch.Tensor, width: int) -> None:
        shape = *query.shape[:3], width
        make = torch.empty if cover.is_written else torch.zeros
        dtype = torch.float32 if cover.is_shared else query.dtype
        self.output = make(shape, dtype=dtype, device=query.device)
        self.sums = query.new_full(shape[:3], -torch.inf, dtype=torch.float32)

    def add_all(self, calls: SliceCalls, inputs: Inputs, scale: float) -> list[Any]:
        """Run kernel calls and merge their outputs. Returns the tensors that the backward passes need."""
        found = []
        for call in calls:
            output, sums, seeds = call.forward(inputs, scale)
            slice_rows: SliceRows = call.queries
            if not slice_rows.is_first:
                output, sums = _merge(slice_rows.take(self.output), slice_rows.take(self.sums), output, sums)
            slice_rows.put(self.output, output)
            slice_rows.put(self.sums, sums)
            del output, sums  # a merged output is in fp32, and is not needed while the next call computes
            found.append(seeds)
        return found


def _merge(
    output: torch.Tensor, sums: torch.Tensor, other: torch.Tensor, other_sums: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge two attention outputs of the same rows over different keys, in fp32. The second output has at least one key
    per row, so that infinity is never subtracted from infinity."""
    total = torch.logaddexp(sums, other_sums)
    kept, added = torch.exp(sums - total).unsqueeze(-1), torch.exp(other_sums - total).unsqueeze(-1)
    return output * kept + other.float() * added, total


class AccumulatedGradient:
    """Gradient of one attention input, summed over slices; in fp32 with `in_fp32` or if a row is in several slices.
    `in_order`: slices are added in the plan's order, so that the first gradient of a row overwrites the buffer."""

    def __init__(self, x: torch.Tensor, cover: RowCoverage, in_fp32: bool = False, in_order: bool = True) -> None:
        make = torch.empty if cover.is_written and in_order else torch.zeros
        dtype = torch.float32 if in_fp32 or cover.is_shared else x.dtype
        self.grad, self._in_order = make(x.shape, dtype=dtype, device=x.device), in_order

    def add(self, slice_rows: SliceRows, gradient: torch.Tensor) -> None:
        """Add `gradient` `[..., heads, channels]` to the gradient of the given rows."""
        is_new = slice_rows.is_first and self._in_order
        slice_rows.put(self.grad, gradient if is_new else slice_rows.take(self.grad) + gradient)


def add_gradients(
    calls: SliceCalls,
    seeds: Sequence[Any],
    grad: torch.Tensor,
    inputs: Inputs,
    merged: tuple[torch.Tensor, torch.Tensor],
    scale: float,
    sides: Sequence[AccumulatedGradient],
) -> None:
    """Run the backward passes of a round's kernel calls, and add the results to the gradients of query, key and value
    (`sides`). `merged`: the merged output and log-sum-exp. `seeds`: the tensors that each forward call returned for its
    backward pass."""
    for call, of_call in zip(calls, seeds):
        found = call.backward(grad, inputs, (*merged, of_call), scale)
        for side, slice_rows, of_rows in zip(sides, (call.queries, call.keys, call.keys), found):
            side.add(slice_rows, of_rows)


# -- latent attention -------------------------------------------------------------------------------------------------


def attend_latents(
    query: torch.Tensor, latents: torch.Tensor, weight: torch.Tensor, plan: SlicePlan, scale: float
) -> torch.Tensor:
    """Compute latent attention slice by slice for query `[s, 1, n, d + p]`, latents with rotated rotary keys
    `[s, 1, 1, l + p]` and the weight that expands latents `[n * (d + v), l]`. Returns `[s, 1, n, v]`."""
    if plan.heads is None:
        return _SlicedLatents.apply(query, latents, weight, plan, scale)  # type: ignore[no-any-return]
    query, latents, _ = plan.heads.to_heads(query, latents, latents[..., :0])
    return plan.heads.to_rows(_SlicedLatents.apply(query, latents, weight, plan, scale))


def _expanded(
    latents: torch.Tensor, weight: torch.Tensor, num_heads: int, plain: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Expand latents `[m, 1, 1, l + p]` to keys `[m, 1, n, d + p]` and values `[m, 1, n, v]`, with this rank's rows of
    the weight. `plain`: d."""
    latent, rotary = latents.split([weight.size(1), latents.size(-1) - weight.size(1)], dim=-1)
    both = torch.nn.functional.linear(latent.squeeze(2), weight).unflatten(-1, (num_heads, -1))
    key, value = both.split([plain, both.size(-1) - plain], dim=-1)
    return torch.cat([key, rotary.expand(-1, -1, num_heads, -1)], dim=-1), value


class _SlicedLatents(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, latents: torch.Tensor, weight: torch.Tensor, plan: SlicePlan, scale: float
    ) -> torch.Tensor:
        own = slice(None) if plan.heads is None else plan.heads.heads_of_ranks(len(weight))[plan.heads.rank]
        heads, own_weight = query.size(2), weight[own]
        plain = query.size(-1) - latents.size(-1) + weight.size(1)
        width = len(own_weight) // heads - plain
        ctx.calls = plan.calls(query, width)
        merged, ctx.seeds = MergedOutput(plan.queries, query, width), []
        ends, empty = not any(ctx.needs_input_grad), latents[..., :0]
        for i, (round_latents, _) in keys_of_rounds(plan, plan.order, latents, empty, ends):
            keys = round_latents, round_latents
            if ctx.calls[i]:
                keys = _expanded(round_latents, own_weight, heads, plain)
            ctx.seeds.append(merged.add_all(ctx.calls[i], (query, *keys), scale))
        output, sums = merged.output.to(query.dtype), merged.sums
        ctx.save_for_backward(query, latents, weight, output, sums)
        ctx.own, ctx.plain, ctx.plan, ctx.scale = own, plain, plan, scale
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        query, latents, weight, output, sums = ctx.saved_tensors
        plan: SlicePlan = ctx.plan
        of_query, of_weight = AccumulatedGradient(query, plan.queries, in_order=not plan.is_spread), GradientSum(weight)
        returning, own_weight = ReturningGradients(), weight[ctx.own].detach().requires_grad_()
        no_values = latents[..., :0]
        for i, (round_latents, empty) in keys_of_rounds(plan, plan.backward_order, latents, no_values, ends=True):
            each = plan.rounds[i]
            round_latents = round_latents.detach().requires_grad_()
            with torch.enable_grad():
                keys = _expanded(round_latents, own_weight, query.size(2), ctx.plain)
            inputs = query, *(key.detach() for key in keys)
            found = [AccumulatedGradient(key, each.keys) for key in inputs[1:]]
            add_gradients(ctx.calls[i], ctx.seeds[i], grad, inputs, (output, sums), ctx.scale, (of_query, *found))
            of_keys = [side.grad.to(query.dtype) for side in found]
            rows_grad, weight_grad = torch.autograd.grad(keys, [round_latents, own_weight], of_keys)
            of_weight.add(weight_grad, ctx.own)
            if each.exchange is None and plan.is_spread:
                rows_grad, empty = rows_grad.float(), empty.float()
            returning.send(each, rows_grad, empty, query.dtype)
        of_latents, _ = returning.collect()
        return of_query.grad.to(query.dtype), of_latents.to(latents.dtype), of_weight.for_autograd(), None, None
