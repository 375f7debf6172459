"""Evaluation losses by a token's position in its document's segment, and by the length of that segment.

Buckets are powers of 2: 0, 1, 2-3, 4-7, ... Sums are computed on the device without a wait for it, and share the
evaluation's one all-reduce. Shapes: b samples, s tokens of a sample, n buckets.
"""

from __future__ import annotations

from typing import Any

import torch

from data.document_lengths import SEGMENT_LENGTHS, bucket_name, segment_lengths
from models.attention.sequence_rows import position_ids

BY = ("position", "length")


def bucket_sums(losses: torch.Tensor, mask: torch.Tensor, values: torch.Tensor, num_buckets: int) -> torch.Tensor:
    """Return the sums of the losses fp32 [b, s] of predicted tokens (mask [b, s] above 0) and the numbers of these
    tokens, by bucket of `values` (int64 [b, s], at least 0): float64 [2, n]."""
    edges = 2 ** torch.arange(num_buckets - 1, device=values.device)  # first value of each bucket but the first
    bucket = torch.bucketize(values.flatten(), edges, right=True)
    chosen = (bucket == torch.arange(num_buckets, device=values.device)[:, None]).double()
    counted = (mask > 0).flatten()
    own = torch.where(
        counted, losses.flatten().double(), 0.0
    )  # the loss of a token that is not predicted may be any number
    return torch.stack([own, counted.double()]) @ chosen.T


class LossBuckets:
    """Collects an evaluation's sums, float64 [2, 2, n]: by BY, then losses or numbers of tokens, then bucket."""

    def __init__(self, sequence_length: int, device: torch.device):
        self.num_buckets = sequence_length.bit_length() + 1
        self.sums = torch.zeros(len(BY), 2, self.num_buckets, dtype=torch.float64, device=device)

    def add(self, losses: torch.Tensor, batch: dict[str, torch.Tensor]) -> None:
        """Add a micro-batch's loss of each token, fp32 [b, s]. Lengths are known if documents are separate."""
        positions = batch["positions"] if "positions" in batch else position_ids(batch["tokens"])
        self.sums[0] += bucket_sums(losses, batch["loss_mask"], positions, self.num_buckets)
        if SEGMENT_LENGTHS in batch:
            self.sums[1] += bucket_sums(losses, batch["loss_mask"], batch[SEGMENT_LENGTHS], self.num_buckets)


def with_lengths(batch: dict[str, Any]) -> dict[str, Any]:
    """Return a batch on the host, for separate documents with the length of each token's segment added."""
    if "positions" not in batch:
        return batch
    return {**batch, SEGMENT_LENGTHS: torch.from_numpy(segment_lengths(batch["positions"]))}


def mean_losses(sums: torch.Tensor) -> dict[str, dict[str, float]]:
    """Return the mean loss by bucket, for each of BY that has tokens, from the sums over all ranks on the host."""
    found = {}
    for by, (losses, counts) in zip(BY, sums.tolist(), strict=True):
        means = {bucket_name(i): losses[i] / counts[i] for i in range(len(counts)) if counts[i]}
        if means:
            found[by] = means
    return found
