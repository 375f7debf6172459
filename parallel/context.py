"""Context parallelism: which part of each sequence a rank holds.

Rank r of n holds chunks r and 2n - 1 - r of 2n. Under a causal mask all ranks then have as much attention to compute
(Megatron-core's convention, which its rotary embeddings follow). Attention across ranks is not there yet:
`parallel.context` is 1 today.
"""

from __future__ import annotations

import torch

from parallel.topology import Axis

# [b, s]; masks of keys stay whole, as every rank attends to all
ALONG_THE_SEQUENCE = ("tokens", "labels", "loss_mask", "types")


def positions(length: int, context: Axis, device: torch.device | None = None) -> torch.Tensor:
    """Positions of a sequence of `length` tokens that this rank holds, in its order: int64 `[length /
    context.size]`."""
    every = torch.arange(length, device=device)
    if context.size == 1:
        return every
    chunks = every.chunk(2 * context.size)
    return torch.cat([chunks[context.rank], chunks[-1 - context.rank]])


def cut_batch(batch: dict[str, torch.Tensor], context: Axis) -> dict[str, torch.Tensor]:
    """This rank's part of a batch of whole sequences `[b, s]`; what has no sequence, or is needed in full, stays."""
    if context.size == 1:
        return batch
    here = positions(batch["tokens"].size(1), context, batch["tokens"].device)
    return {name: value[:, here] if name in ALONG_THE_SEQUENCE else value for name, value in batch.items()}


def position_ids(tokens: torch.Tensor, context: Axis) -> torch.Tensor:
    """Position of each of this rank's tokens int64 `[b, s / context.size]` in its sequence: int64 of the same shape."""
    return positions(tokens.size(1) * context.size, context, tokens.device).unsqueeze(0).expand_as(tokens)
