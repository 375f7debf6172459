"""Evaluation losses by where a token stands: by its position in its document's piece, and by that piece's length.

Buckets are powers of 2: 0, 1, 2-3, 4-7, ... Sums are made on the device without a wait for it, and travel with the
evaluation's one all-reduce. Shapes: b samples, s tokens of a sample, n buckets.
"""

from __future__ import annotations

from typing import Any

import torch

from data.pieces import PIECE_LENGTHS, bucket_name, piece_lengths
from parallel.context import position_ids

BY = ("position", "length")


def bucket_sums(losses: torch.Tensor, mask: torch.Tensor, values: torch.Tensor, num_buckets: int) -> torch.Tensor:
    """Sums of the losses fp32 [b, s] of predicted tokens (mask [b, s] above 0) and their number, by the bucket of
    `values` int64 [b, s], at least 0: float64 [2, n]."""
    edges = 2 ** torch.arange(num_buckets - 1, device=values.device)  # where each bucket but the first begins
    bucket = torch.bucketize(values.flatten(), edges, right=True)
    chosen = (bucket == torch.arange(num_buckets, device=values.device)[:, None]).double()
    counted = (mask > 0).flatten()
    own = torch.where(counted, losses.flatten().double(), 0.0)  # where nothing is predicted, a loss is any number
    return torch.stack([own, counted.double()]) @ chosen.T


class LossBuckets:
    """The sums of an evaluation: float64 [2, 2, n], of BY, losses and numbers of predicted tokens."""

    def __init__(self, sequence_length: int, device: torch.device):
        self.num_buckets = sequence_length.bit_length() + 1
        self.sums = torch.zeros(len(BY), 2, self.num_buckets, dtype=torch.float64, device=device)

    def add(self, losses: torch.Tensor, batch: dict[str, torch.Tensor]) -> None:
        """Add a micro-batch's loss of each token, fp32 [b, s]. Lengths are known where documents are separate."""
        positions = batch["positions"] if "positions" in batch else position_ids(batch["tokens"])
        self.sums[0] += bucket_sums(losses, batch["loss_mask"], positions, self.num_buckets)
        if PIECE_LENGTHS in batch:
            self.sums[1] += bucket_sums(losses, batch["loss_mask"], batch[PIECE_LENGTHS], self.num_buckets)


def with_lengths(batch: dict[str, Any]) -> dict[str, Any]:
    """A batch of the host; of separate documents with the length of each token's piece."""
    if "positions" not in batch:
        return batch
    return {**batch, PIECE_LENGTHS: torch.from_numpy(piece_lengths(batch["positions"]))}


def mean_losses(sums: torch.Tensor) -> dict[str, dict[str, float]]:
    """Mean loss by bucket, for each of BY that has any: of the sums over all ranks, on the host."""
    found = {}
    for by, (losses, counts) in zip(BY, sums.tolist(), strict=True):
        means = {bucket_name(i): losses[i] / counts[i] for i in range(len(counts)) if counts[i]}
        if means:
            found[by] = means
    return found
