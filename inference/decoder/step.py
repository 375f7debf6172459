"""What a forward pass carries along: the cache of keys and values, and what all layers share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch


@dataclass
class Cache:
    """Keys `[b, g, L, d]` and values of each layer of this rank, and the number of tokens that each row holds."""

    length: int  # L
    keys: dict[int, torch.Tensor] = field(default_factory=dict)
    values: dict[int, torch.Tensor] = field(default_factory=dict)
    counts: list[int] = field(default_factory=list)
    prompts: Sequence[int] = ()  # their numbers, where it is recorded who chose which experts
    texts: list[list[int]] | None = None  # the tokens of each row, where they may have to be read again


@dataclass(frozen=True)
class Step:
    """What all layers share in one forward pass of T = rows * new tokens."""

    rows: int
    new: int
    # of each new token: [s, 1, 1, d], or [b, s, 1, 1, d] where rows differ, in their places or in their frequencies
    cos: torch.Tensor | None
    sin: torch.Tensor | None
    cache: Cache | None = None
    start: int | None = None  # where the one new token of every row goes; None: `positions` says it
    positions: torch.Tensor | None = None  # [b]
    end: int = 0  # cached tokens that attention reads
    mask: torch.Tensor | None = None  # bool [b, 1, 1, end], True = read; None: all
    # the same for layers with a sliding window; of a prefill [s, s]
    window_mask: torch.Tensor | None = None
    is_causal: bool = True  # a prefill's tokens attend to those before them alone
    texts: torch.Tensor | None = None  # which of the T tokens are of a text, int64; None: all, none fills a row up
    places: list[tuple[int, int]] | None = None  # of these: prompt and position, where routing is recorded

    @property
    def is_prefill(self) -> bool:
        return self.end == 0

    def remember(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write keys and values `[b, g, s, d]` into the cache; those that the new tokens attend to."""
        cache = self.cache
        if cache is None:
            return key, value
        if self.is_prefill:
            # Zeros, because a masked slot still enters a product: with weight 0, which leaves NaN what it is.
            for held, new in ((cache.keys, key), (cache.values, value)):
                held[layer] = new.new_zeros(*new.shape[:2], cache.length, new.size(3))
                held[layer][:, :, : self.new] = new
            return key, value
        keys, values = cache.keys[layer], cache.values[layer]
        if self.start is not None:
            keys.narrow(2, self.start, 1).copy_(key)
            values.narrow(2, self.start, 1).copy_(value)
        else:
            rows = torch.arange(self.rows, device=key.device)
            keys[rows, :, self.positions] = key.squeeze(2)
            values[rows, :, self.positions] = value.squeeze(2)
        return keys.narrow(2, 0, self.end), values.narrow(2, 0, self.end)
