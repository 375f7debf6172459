"""Which rows of a micro-batch a router gets where they are dealt over context ranks, each as many and in any order."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class RouterRows:
    """The rows of this rank's routers.

    Attributes:
        ids: int64 `[T]` on the routers' device, in the order of the hidden states: sample * length + position.
        num_samples: of the micro-batch, on all ranks together.
        length: tokens of a sample.
    """

    ids: torch.Tensor
    num_samples: int
    length: int

    @functools.cached_property
    def members(self) -> torch.Tensor:
        """Which rows each sample has, fp32 `[num_samples, T]` of 0 and 1."""
        numbers = torch.arange(self.num_samples, device=self.ids.device)
        return ((self.ids // self.length)[None] == numbers[:, None]).float()

    @functools.cached_property
    def turns(self) -> torch.Tensor:
        """Where each row would stand in one process, int64 `[T]`: by position, then sample."""
        samples = self.ids // self.length
        return (self.ids - samples * self.length) * self.num_samples + samples
