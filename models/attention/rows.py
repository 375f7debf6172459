"""What the layers of a model know of the rows of a micro-batch: which attend to which, and by which angles they turn.

It travels in the place of Megatron-core's packed_seq_params, so that a layer that is computed again finds it too.
Shapes: b samples, s tokens of a sample.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from typing import Any, TypeGuard

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig

from configs import derived
from configs.schema import Config
from memory.transfer import to_device
from models.attention import slices
from models.attention.dealing import deal, window_work
from models.attention.exchange import HeadExchange, RowExchange
from models.attention.rounds import Dealt, Pieces
from models.attention.sliced import SlicePlan
from models.attention.slices import FULL, Slices
from models.pointwise.frequencies import Rotary
from models.pointwise.rotary import tables
from parallel.context import cut_batch
from parallel.megatron.router_rows import RouterRows
from parallel.topology import Axis

SLICES = "slices"  # what a batch calls its own


class RowSlices(ABC):
    """A micro-batch's slices, made once on the host and used by all layers of all model chunks.

    `num_samples` samples of `length` tokens. `is_long`: which tokens lie in pieces beyond a length, bool of the host,
    where that counts.
    """

    def __init__(self, found: Slices, num_samples: int, length: int, is_long: torch.Tensor | None) -> None:
        self.num_samples, self.length, self.is_long = num_samples, length, is_long
        self._longest = int(found.queries.max())
        self._plans: dict[int | None, SlicePlan] = {}

    def plan(self, window: int | None) -> SlicePlan:
        """How they are computed where a row attends to the last `window` rows (None: to all) of its slice."""
        if window is not None and window >= self._longest:
            window = None
        if window not in self._plans:
            self._plans[window] = self._make(window)
        return self._plans[window]

    @abstractmethod
    def _make(self, window: int | None) -> SlicePlan:
        """The plan of a window that is not there yet."""


class BatchSlices(RowSlices):
    """All of a micro-batch's slices on one rank."""

    def __init__(self, found: Slices, num_samples: int, length: int, is_long: torch.Tensor | None = None) -> None:
        super().__init__(found, num_samples, length, is_long)
        self.found = found

    def _make(self, window: int | None) -> SlicePlan:
        found = self.found if window is None else slices.windowed(self.found, window)
        return SlicePlan(found, self.length, self.num_samples)


class DealtSlices(RowSlices):
    """The part of a micro-batch's slices that this rank has of those that context ranks share: `rows` int64 `[r]`, the
    rows that it holds, counted through the micro-batch."""

    def __init__(self, whole: BatchSlices, context: Axis, heads: int, work: np.ndarray | None = None) -> None:
        """`heads`: ranks of a place; `work`: as models/attention/dealing.py takes it."""
        found = whole.found
        keys = found.keys if found.kind[0] == FULL else None
        self._pieces, self._context, self._heads = Pieces(found.queries, keys), context, heads
        self._place, head = divmod(context.rank, heads)
        self._deal = deal(found.queries, context.size // heads, work=work, keys=keys)
        here = self._deal.rows(self._place)
        size = len(here) // heads
        self._num_rows, self.rows = len(here), torch.from_numpy(here[head * size : (head + 1) * size])
        is_long = None if whole.is_long is None else whole.is_long.flatten()[self.rows].unsqueeze(0)
        super().__init__(found, whole.num_samples, whole.length, is_long)

    def _make(self, window: int | None) -> SlicePlan:
        dealt = Dealt(self._pieces, self._deal, window)
        own, rounds = dealt.rounds(self._place)
        exchanges = [(each.slices, RowExchange(each, self._context, self._heads)) for each in rounds]
        heads = HeadExchange(self._context, self._heads) if self._heads > 1 else None
        return SlicePlan(own, self._num_rows, 1, exchanges, heads, dealt.ahead)


def of_documents(positions: torch.Tensor, switches_at: int | None = None) -> BatchSlices:
    """Slices of a micro-batch whose documents stay apart. positions: int64 `[b, s]` of the host, of each token in its
    piece of a document."""
    b, s = positions.shape
    found = slices.of_documents(positions.numpy())
    is_long = None
    if switches_at is not None:
        is_long = torch.from_numpy(np.repeat(found.queries > switches_at, found.queries).reshape(b, s))
    return BatchSlices(found, b, s, is_long)


def of_padding(padding_mask: torch.Tensor, switches_at: int | None = None) -> BatchSlices:
    """Slices of samples whose first tokens are real: bool `[b, s]` of the host, True = real."""
    num_samples, length = padding_mask.shape
    num_keys = padding_mask.sum(1).clamp(min=1).numpy()
    is_long = None if switches_at is None else torch.full((num_samples, length), length > switches_at)
    return BatchSlices(slices.of_real_keys(num_keys, length), num_samples, length, is_long)


def is_shared(context: Axis | None) -> TypeGuard[Axis]:
    """Whether other ranks have a part of the micro-batch."""
    return context is not None and context.size > 1


def on_rank(config: Config, batch: dict[str, Any], apart: BatchSlices, context: Axis | None) -> dict[str, Any]:
    """A micro-batch with its slices, and what the layers will ask of them; where context ranks share it, the rows of
    this one."""
    found: RowSlices = apart
    if is_shared(context):
        pattern, longest = derived.window_pattern(config), int(apart.found.queries.max())
        work = window_work(pattern, config.model.sliding_window, longest)
        dealt = DealtSlices(apart, context, derived.context_heads(config), work)
        found, batch = dealt, cut_batch(batch, dealt.rows)
    for window in {config.model.sliding_window if slides else None for slides in derived.window_pattern(config)}:
        found.plan(window)
    return {**batch, SLICES: found}


@functools.lru_cache(maxsize=8)
def of_joined(num_samples: int, length: int) -> BatchSlices:
    """Slices of samples in which each token attends to all before it."""
    return BatchSlices(slices.joined(num_samples, length), num_samples, length)


class MicroBatchRows:
    """A micro-batch's rows on this rank's device. `apart`: which attend to which, None where all of a sample do, each
    to those before it."""

    qkv_format = "rows"  # Megatron-core branches where this is "thd"

    def __init__(
        self,
        tokens: torch.Tensor,
        rotary: Rotary | None = None,
        apart: RowSlices | None = None,
        positions: torch.Tensor | None = None,
        spread_over: dist.ProcessGroup | None = None,
    ) -> None:
        """tokens: int64 `[b, s]` of the device; positions: the same, of each token in its piece; None: in its
        sample. spread_over: the tensor ranks between whose layers each has a part of the rows; None: all have all."""
        self.apart, self._spread_over = apart, spread_over
        self._rotary, self._positions = rotary, positions
        self._shape, self._device = tokens.shape, tokens.device
        self._length = tokens.size(1) if apart is None else apart.length
        self._tables: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}
        self._angles: torch.Tensor | None = None

    def plan(self, window: int | None) -> SlicePlan:
        """The slices of layers with this sliding window; None: without."""
        apart = of_joined(*self._shape) if self.apart is None else self.apart
        return apart.plan(window)

    @functools.cached_property
    def routed(self) -> RouterRows | None:
        """Which rows the routers of experts get; None: all of the micro-batch."""
        if not isinstance(self.apart, DealtSlices):
            return None
        ids = to_device(self.apart.rows, self._device)
        if self._spread_over is not None:
            ids = ids.chunk(self._spread_over.size())[self._spread_over.rank()]
        return RouterRows(ids, self.apart.num_samples, self.apart.length)

    @property
    def factor(self) -> float:
        """What cosines and sines are multiplied by."""
        return 1.0 if self._rotary is None else self._rotary.factor

    @property
    def angles(self) -> torch.Tensor | None:
        """By which each row turns: fp32 `[s, 1 or b, 1, rotating channels]`; None without rotary positions."""
        if self._angles is None and self._rotary is not None:
            self._angles = self._all_angles(self._rotary)
            if self._positions is not None:
                self._angles = self._angles[self._index].squeeze(2)
        return self._angles

    def tables(self, dtype: torch.dtype, factor: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and signed sines of each row, `[s, 1 or b, 1, 1, rotating channels]`: of models.pointwise.rotary."""
        assert self._rotary is not None
        if (dtype, factor) not in self._tables:
            both = tables(self._all_angles(self._rotary), dtype, factor)
            if self._positions is not None:
                both = both[0][self._index].squeeze(2), both[1][self._index].squeeze(2)
            self._tables[dtype, factor] = both
        return self._tables[dtype, factor]

    def _all_angles(self, rotary: Rotary) -> torch.Tensor:
        make = rotary.of_length if self._positions is None else rotary.of_pieces
        return make(self._length, self._device)

    @functools.cached_property
    def _index(self) -> torch.Tensor:
        """Which angle each row has, int64 `[s, b]`."""
        assert self._positions is not None
        index = self._positions
        if self.apart is not None and self.apart.is_long is not None:
            index = index + to_device(self.apart.is_long, self._device) * self._length
        return index.t()


def spread_over(config: TransformerConfig, groups: ProcessGroupCollection) -> dist.ProcessGroup | None:
    """The tensor ranks that each have a part of the rows between the layers' products; None: all have all."""
    return groups.tp if config.sequence_parallel else None
