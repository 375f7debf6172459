"""The rows of a micro-batch that a rank holds: which rows attend to which, and their rotary angles.

With context parallelism, the rows of all samples are sharded over ranks (sequence_sharding.py), and a rank's rows, in
order, form one sample. Layers receive a MicroBatchRows in place of Megatron-core's packed_seq_params, so that a
recomputed layer has it too. Shapes: b samples, s tokens of a sample, r rows of a rank.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from typing import Any, TypeGuard

import numpy as np
import torch
import torch.distributed as dist

from configs import derived
from configs.schema import Config
from memory.transfer import to_device
from models.attention import mask_slices
from models.attention.exchange_rounds import ExchangeSchedule, Segments
from models.attention.mask_slices import FULL, Slices
from models.attention.row_exchange import HeadExchange, RowExchange
from models.attention.sequence_sharding import shard_sequence, window_work
from models.attention.slice_attention import SlicePlan
from models.pointwise.rotary import Rotary, tables
from parallel.megatron.router import RouterRows
from parallel.topology import Axis

SLICES = "slices"  # key of a batch
# Tensors of a batch that are `[b, s]`.
ALONG_THE_SEQUENCE = ("tokens", "labels", "loss_mask", "types", "padding_mask", "positions", "segment_lengths")


class RowSlices(ABC):
    """Attention slices of a micro-batch on this rank (which of its rows attend to which), made once on the host and
    used by all layers of all model chunks.

    `is_long`: bool `[num_samples, length]` on the host (under context parallelism `[1, r]`), True for tokens of
    segments longer than the length at which rotary frequencies change; None if the model has no such length.
    """

    def __init__(self, found: Slices, num_samples: int, length: int, is_long: torch.Tensor | None) -> None:
        self.num_samples, self.length, self.is_long = num_samples, length, is_long
        self._longest = int(found.queries.max())
        self._plans: dict[int | None, SlicePlan] = {}

    def plan(self, window: int | None) -> SlicePlan:
        """Return the plan (kernel calls and key exchanges) for attention in layers with this sliding window (None: no
        window). The first call makes it."""
        if window is not None and window >= self._longest:
            window = None
        if window not in self._plans:
            self._plans[window] = self._make(window)
        return self._plans[window]

    @abstractmethod
    def _make(self, window: int | None) -> SlicePlan:
        """Make the plan that `plan` returns."""


class BatchSlices(RowSlices):
    """All attention slices of a micro-batch, for a rank that holds all its rows."""

    def __init__(self, found: Slices, num_samples: int, length: int, is_long: torch.Tensor | None = None) -> None:
        super().__init__(found, num_samples, length, is_long)
        self.found = found

    def _make(self, window: int | None) -> SlicePlan:
        found = self.found if window is None else mask_slices.windowed(self.found, window)
        return SlicePlan(found, self.length, self.num_samples)


class ShardedSlices(RowSlices):
    """A rank's share of a micro-batch's attention slices under context parallelism. `sequence_rows`: indices of the
    rank's rows in the micro-batch, int64 `[r]`."""

    def __init__(self, whole: BatchSlices, context: Axis, heads: int, work: np.ndarray | None = None) -> None:
        """Shard the rows of the micro-batch `whole` over the context-parallel ranks. `heads`: number of ranks that
        exchange heads with each other. `work`: attention work of the first i rows of a segment (None: i(i + 1) / 2)."""
        found = whole.found
        keys = found.keys if found.kind[0] == FULL else None
        self._segments, self._context, self._heads = Segments(found.queries, keys), context, heads
        self._cp_rank, head = divmod(context.rank, heads)
        self._sharding = shard_sequence(found.queries, context.size // heads, work=work, keys=keys)
        here = self._sharding.sequence_rows(self._cp_rank)
        size = len(here) // heads
        self._num_rows, self.sequence_rows = len(here), torch.from_numpy(here[head * size : (head + 1) * size])
        is_long = None if whole.is_long is None else whole.is_long.flatten()[self.sequence_rows].unsqueeze(0)
        super().__init__(found, whole.num_samples, whole.length, is_long)

    def _make(self, window: int | None) -> SlicePlan:
        schedule = ExchangeSchedule(self._segments, self._sharding, window)
        own, rounds = schedule.rounds(self._cp_rank)
        exchanges = [(each.slices, RowExchange(each, self._context, self._heads)) for each in rounds]
        heads = HeadExchange(self._context, self._heads) if self._heads > 1 else None
        return SlicePlan(own, self._num_rows, 1, exchanges, heads, schedule.ahead)


def document_slices(positions: torch.Tensor, switches_at: int | None = None) -> BatchSlices:
    """Return the attention slices of a micro-batch whose documents do not attend to each other. `positions`: int64 `[b,
    s]` on the host, the position of each token in its segment. `switches_at`: the segment length at which rotary
    frequencies change (None: they never change)."""
    b, s = positions.shape
    found = mask_slices.of_documents(positions.numpy())
    is_long = None
    if switches_at is not None:
        is_long = torch.from_numpy(np.repeat(found.queries > switches_at, found.queries).reshape(b, s))
    return BatchSlices(found, b, s, is_long)


def padding_slices(padding_mask: torch.Tensor, switches_at: int | None = None) -> BatchSlices:
    """Return the attention slices of padded samples: all tokens of a sample attend to its real tokens, which are its
    first ones. `padding_mask`: bool `[b, s]` on the host, True = real. `switches_at`: the sample length at which rotary
    frequencies change (None: they never change)."""
    num_samples, length = padding_mask.shape
    num_keys = padding_mask.sum(1).clamp(min=1).numpy()
    is_long = None if switches_at is None else torch.full((num_samples, length), length > switches_at)
    sample, zeros = np.arange(num_samples), np.zeros(num_samples, np.int64)
    found = Slices(np.full(num_samples, FULL), sample, zeros, np.full(num_samples, length), zeros, num_keys)
    return BatchSlices(found, num_samples, length, is_long)


def is_sharded(context: Axis | None) -> TypeGuard[Axis]:
    """Return whether context parallelism shards the rows of a micro-batch over several ranks."""
    return context is not None and context.size > 1


def cut_batch(batch: dict[str, Any], sequence_rows: torch.Tensor) -> dict[str, Any]:
    """Select rows of a micro-batch by their indices, int64 `[r]`: tensors `[b, s]` become `[1, r]`."""
    return {
        name: value.flatten()[sequence_rows].unsqueeze(0) if name in ALONG_THE_SEQUENCE else value
        for name, value in batch.items()
    }


def gather_rows(own_values: torch.Tensor, sequence_rows: torch.Tensor, context: Axis, num_samples: int) -> torch.Tensor:
    """Gather the values `[r, ...]` of every context rank's rows on every rank, in the order of the micro-batch:
    `[b, s, ...]`. Every rank must call this. `sequence_rows`: indices of this rank's rows in the micro-batch, int64
    `[r]`."""
    values = [torch.empty_like(own_values) for _ in range(context.size)]
    sequence_rows = sequence_rows.to(own_values.device)
    numbers = [torch.empty_like(sequence_rows) for _ in range(context.size)]
    dist.all_gather(values, own_values.contiguous(), group=context.group)
    dist.all_gather(numbers, sequence_rows, group=context.group)
    flat = torch.cat(values)
    whole = torch.empty_like(flat)
    whole[torch.cat(numbers)] = flat
    return whole.unflatten(0, (num_samples, -1))


def position_ids(tokens: torch.Tensor) -> torch.Tensor:
    """Return the position of each token in its sample, int64 `[b, s]`, for tokens `[b, s]`."""
    return torch.arange(tokens.size(1), device=tokens.device).unsqueeze(0).expand_as(tokens)


def with_slices(config: Config, batch: dict[str, Any], whole: BatchSlices, context: Axis | None) -> dict[str, Any]:
    """Add the attention slices `whole` to a micro-batch, and plan the attention of all layers. With context
    parallelism, the returned batch has only this rank's rows and slices."""
    found: RowSlices = whole
    if is_sharded(context):
        pattern, longest = derived.window_pattern(config), int(whole.found.queries.max())
        work = window_work(pattern, config.model.sliding_window, longest)
        sharded = ShardedSlices(whole, context, derived.context_heads(config), work)
        found, batch = sharded, cut_batch(batch, sharded.sequence_rows)
    for window in {config.model.sliding_window if slides else None for slides in derived.window_pattern(config)}:
        found.plan(window)
    return {**batch, SLICES: found}


@functools.lru_cache(maxsize=8)
def joined_slices(num_samples: int, length: int) -> BatchSlices:
    """Return the attention slices of plain causal attention: each token attends to itself and to all tokens before it
    in its sample."""
    positions = np.broadcast_to(np.arange(length), (num_samples, length))
    return BatchSlices(mask_slices.of_documents(positions), num_samples, length)


class MicroBatchRows:
    """The rows of a micro-batch on this rank, with the attention slices and rotary angles that its layers need. Without
    `slices`, attention is causal over whole samples."""

    qkv_format = "rows"  # anything but "thd", for which Megatron-core has a branch of its own

    def __init__(
        self,
        tokens: torch.Tensor,
        rotary: Rotary | None = None,
        slices: RowSlices | None = None,
        positions: torch.Tensor | None = None,
        tensor_group: dist.ProcessGroup | None = None,
    ) -> None:
        """Store a micro-batch's tokens, positions and slices; rotary angles are computed on demand. `tokens`: int64
        `[b, s]` on the device. `positions`: int64 `[b, s]`, in the segment (None: in the sample). `tensor_group`: the
        tensor-parallel group if sequence parallelism splits the rows over it, else None."""
        self.slices, self._tensor_group = slices, tensor_group
        self._rotary, self._positions = rotary, positions
        self._shape, self._device = tokens.shape, tokens.device
        self._length = tokens.size(1) if slices is None else slices.length
        self._tables: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}

    def plan(self, window: int | None) -> SlicePlan:
        """Return the plan for attention in layers with this sliding window, as `RowSlices.plan` does."""
        return (joined_slices(*self._shape) if self.slices is None else self.slices).plan(window)

    @functools.cached_property
    def routed(self) -> RouterRows | None:
        """Rows that this rank's MoE routers receive; None if they receive all rows of the micro-batch."""
        if not isinstance(self.slices, ShardedSlices):
            return None
        ids = to_device(self.slices.sequence_rows, self._device)
        if self._tensor_group is not None:
            ids = ids.chunk(self._tensor_group.size())[self._tensor_group.rank()]
        return RouterRows(ids, self.slices.num_samples, self.slices.length)

    @property
    def factor(self) -> float:
        """Factor that multiplies the cosines and sines of the rotary angles."""
        return 1.0 if self._rotary is None else self._rotary.factor

    @functools.cached_property
    def angles(self) -> torch.Tensor | None:
        """Rotary angle of each row, fp32 `[s, 1 or b, 1, rotating channels]`; None without rotary positions."""
        if self._rotary is None:
            return None
        angles = self._all_angles(self._rotary)
        return angles if self._positions is None else angles[self._index].squeeze(2)

    def tables(self, dtype: torch.dtype, factor: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the cosines of each row's rotary angles, and their sines with the first half negated,
        `[s, 1 or b, 1, 1, rotating channels]` each. Both are in `dtype` and multiplied by `factor`."""
        assert self._rotary is not None
        if (dtype, factor) not in self._tables:
            both = tables(self._all_angles(self._rotary), dtype, factor)
            if self._positions is not None:
                both = both[0][self._index].squeeze(2), both[1][self._index].squeeze(2)
            self._tables[dtype, factor] = both
        return self._tables[dtype, factor]

    def _all_angles(self, rotary: Rotary) -> torch.Tensor:
        make = rotary.of_length if self._positions is None else rotary.of_segments
        return make(self._length, self._device)

    @functools.cached_property
    def _index(self) -> torch.Tensor:
        """Index of each row in the table of rotary angles, int64 `[s, b]`."""
        assert self._positions is not None
        index = self._positions
        if self.slices is not None and self.slices.is_long is not None:
            index = index + to_device(self.slices.is_long, self._device) * self._length
        return index.t()
