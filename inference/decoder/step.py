"""The state of a forward pass: the key-value cache, and the tensors that all layers share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch


@dataclass
class Cache:
    """A key-value cache: keys and values `[b, g, L, d]` per layer of this rank, and the cached tokens per text."""

    length: int  # L
    keys: dict[int, torch.Tensor] = field(default_factory=dict)
    values: dict[int, torch.Tensor] = field(default_factory=dict)
    counts: list[int] = field(default_factory=list)
    prompts: Sequence[int] = ()  # indices of the prompts, where routing is recorded
    texts: list[list[int]] | None = None  # the tokens of each text, if they may have to be read again


@dataclass(frozen=True)
class Step:
    """Tensors that all layers share in a pass over T = batch_size * new tokens: rotary angles, masks, positions."""

    batch_size: int
    new: int
    # of each new token: [s, 1, 1, d], or [b, s, 1, 1, d] where texts differ in positions or frequencies
    cos: torch.Tensor | None
    sin: torch.Tensor | None
    cache: Cache | None = None
    start: int | None = None  # cache index of the one new token of every text; None: `positions` has it
    positions: torch.Tensor | None = None  # [b]
    end: int = 0  # cached tokens that attention reads
    mask: torch.Tensor | None = None  # bool [b, 1, 1, end], True = read; None: all
    # the same for layers with a sliding window; [s, s] for a prefill
    window_mask: torch.Tensor | None = None
    is_causal: bool = True  # a prefill's tokens attend to earlier tokens only
    texts: torch.Tensor | None = None  # int64 indices of the T tokens that are not padding; None: all
    recorded_tokens: list[tuple[int, int]] | None = None  # their prompts and positions, where routing is recorded

    @property
    def is_prefill(self) -> bool:
        return self.end == 0

    def remember(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cache new keys and values `[b, g, s, d]`; return the keys and values that the new tokens attend to."""
        cache = self.cache
        if cache is None:
            return key, value
        if self.is_prefill:
            # Masked positions must be finite: attention multiplies them by 0, and 0 * NaN is NaN.
            for held, new in ((cache.keys, key), (cache.values, value)):
                held[layer] = new.new_zeros(*new.shape[:2], cache.length, new.size(3))
                held[layer][:, :, : self.new] = new
            return key, value
        keys, values = cache.keys[layer], cache.values[layer]
        if self.start is not None:
            keys.narrow(2, self.start, 1).copy_(key)
            values.narrow(2, self.start, 1).copy_(value)
        else:
            texts = torch.arange(self.batch_size, device=key.device)
            keys[texts, :, self.positions] = key.squeeze(2)
            values[texts, :, self.positions] = value.squeeze(2)
        return keys.narrow(2, 0, self.end), values.narrow(2, 0, self.end)
