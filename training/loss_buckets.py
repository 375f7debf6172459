"""Evaluation losses grouped by a token's position in its document segment, and by that segment's length. A bucket is a
range of positions or lengths; the widths double: 0, 1, 2-3, 4-7, ... The sums are computed on the device without a host
wait and share the evaluation's one all-reduce. Shapes: b samples, s tokens per sample, n buckets."""

from __future__ import annotations

from typing import Any

import torch

from data.document_lengths import SEGMENT_LENGTHS, bucket_name, segment_lengths
from models.attention.sequence_rows import position_ids

BY = ("position", "length")


def bucket_sums(losses: torch.Tensor, mask: torch.Tensor, values: torch.Tensor, num_buckets: int) -> torch.Tensor:
    """Return float64 [2, n]: for each bucket, the sum of the losses of its predicted tokens and the number of these
    tokens. `losses` is fp32 [b, s]; `mask` [b, s] is above 0 for predicted tokens; `values` (int64 [b, s], at least 0)
    decides each token's bucket."""
    edges = 2 ** torch.arange(num_buckets - 1, device=values.device)  # first value of each bucket but the first
    bucket = torch.bucketize(values.flatten(), edges, right=True)
    chosen = (bucket == torch.arange(num_buckets, device=values.device)[:, None]).double()
    counted = (mask > 0).flatten()
    # The loss of a token that is not predicted may be any number.
    own = torch.where(counted, losses.flatten().double(), 0.0)
    return torch.stack([own, counted.double()]) @ chosen.T


class LossBuckets:
    """Accumulates an evaluation's losses and token counts per bucket in `sums`, float64 [2, 2, n]. The axes are:
    position or segment length (BY); loss sum or token count; bucket."""

    def __init__(self, sequence_length: int, device: torch.device):
        self.num_buckets = sequence_length.bit_length() + 1
        self.sums = torch.zeros(len(BY), 2, self.num_buckets, dtype=torch.float64, device=device)

    def add(self, losses: torch.Tensor, batch: dict[str, torch.Tensor]) -> None:
        """Add the loss of each token of a micro-batch, fp32 [b, s]. Losses are grouped by length only if the batch has
        segment lengths."""
        positions = batch["positions"] if "positions" in batch else position_ids(batch["tokens"])
        self.sums[0] += bucket_sums(losses, batch["loss_mask"], positions, self.num_buckets)
        if SEGMENT_LENGTHS in batch:
            self.sums[1] += bucket_sums(losses, batch["loss_mask"], batch[SEGMENT_LENGTHS], self.num_buckets)


def with_lengths(batch: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a host batch to which each token's segment length is added. Returns the batch itself if its
    documents are joined."""
    if "positions" not in batch:
        return batch
    return {**batch, SEGMENT_LENGTHS: torch.from_numpy(segment_lengths(batch["positions"]))}


def mean_losses(sums: torch.Tensor) -> dict[str, dict[str, float]]:
    """Return mean losses as {"position" or "length": {bucket: loss}} from the sums over all ranks. Empty buckets are
    left out."""
    means = {}
    for by, (losses, counts) in zip(BY, sums.tolist(), strict=True):
        means[by] = {bucket_name(i): losses[i] / count for i, count in enumerate(counts) if count}
    return {by: found for by, found in means.items() if found}
