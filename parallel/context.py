"""Context parallelism: the rows of a micro-batch that a rank holds.

Rows of all samples are dealt over the context ranks (models/attention/dealing.py): what a rank holds is one sample of
its rows, in their order.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from parallel.topology import Axis

# all `[b, s]`
ALONG_THE_SEQUENCE = ("tokens", "labels", "loss_mask", "types", "padding_mask", "positions", "piece_lengths")


def cut_batch(batch: dict[str, Any], rows: torch.Tensor) -> dict[str, Any]:
    """A micro-batch's rows int64 `[r]`, counted through its samples: what is `[b, s]` becomes `[1, r]`; else it
    stays."""
    return {
        name: value.flatten()[rows].unsqueeze(0) if name in ALONG_THE_SEQUENCE else value
        for name, value in batch.items()
    }


def all_rows(part: torch.Tensor, rows: torch.Tensor, context: Axis, num_samples: int) -> torch.Tensor:
    """What the context ranks have of a micro-batch's rows, in its order, on all of them: `[b, s, ...]`. A collective
    call. part: `[r, ...]`; rows: int64 `[r]`, of this rank."""
    parts = [torch.empty_like(part) for _ in range(context.size)]
    rows = rows.to(part.device)
    numbers = [torch.empty_like(rows) for _ in range(context.size)]
    dist.all_gather(parts, part.contiguous(), group=context.group)
    dist.all_gather(numbers, rows, group=context.group)
    flat = torch.cat(parts)
    whole = torch.empty_like(flat)
    whole[torch.cat(numbers)] = flat
    return whole.unflatten(0, (num_samples, -1))


def position_ids(tokens: torch.Tensor) -> torch.Tensor:
    """Position of each token of whole samples int64 `[b, s]`: int64 of the same shape."""
    return torch.arange(tokens.size(1), device=tokens.device).unsqueeze(0).expand_as(tokens)
