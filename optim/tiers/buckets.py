"""A bucket's state as one record of bytes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

WEIGHT = "weight"  # beside the kinds of a record, of a bucket whose weights lie off the device


@dataclass(frozen=True)
class RecordLayout:
    """A bucket's state in bytes: [master][exp_avg_sq][exp_avg]. A parameter in fp32 is its own master."""

    has_master: bool
    moment_dtype: torch.dtype  # of exp_avg

    @property
    def kinds(self) -> dict[str, torch.dtype]:
        """What is in a record, in order. The wide ones first: each is aligned to its own size."""
        masters = {"master": torch.float32} if self.has_master else {}
        return {**masters, "exp_avg_sq": torch.float32, "exp_avg": self.moment_dtype}

    @property
    def bytes_per_element(self) -> int:
        return sum(dtype.itemsize for dtype in self.kinds.values())

    def split(self, record: torch.Tensor, numel: int) -> dict[str, torch.Tensor]:
        """The kinds of a record of `numel` elements, as flat views into its bytes."""
        views, start = {}, 0
        for kind, dtype in self.kinds.items():
            end = start + numel * dtype.itemsize
            views[kind] = record[start:end].view(dtype)
            start = end
        return views
