"""The output layer in blocks of vocabulary rows: logits, or log-probabilities of tokens without all logits at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F

from inference.decoder.linear import Group, Weights, gather
from inference.weights.rank_weights import WeightUnit
from inference.weights.source import WeightSource

LOGIT_BYTES = 64 * 2**20  # of the fp32 logits that exist at the same time while tokens are scored
BIAS = "output_layer.bias"


class Head:
    """The output layer in blocks of rows: this rank's shard of the vocabulary, which is split over `group`."""

    def __init__(self, source: WeightSource, vocab_size: int, group: Group) -> None:
        self._source, self._vocab_size, self._group = source, vocab_size, group
        self._bias = source.small.get(BIAS)
        self._blocks = source.held.head

    def logits(self, hidden: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the logits of each batch, fp32 `[n, V]`, from normed hidden states `[n, H]`."""
        by_block: list[list[torch.Tensor]] = [[] for _ in hidden]
        for block in self._blocks:
            with self._source.use(block.key, _only) as weight:
                for each, found in zip(hidden, by_block, strict=True):
                    found.append(F.linear(each, weight, self._bias_of(block)).float())
        whole = [gather(torch.cat(found, dim=1), self._group) for found in by_block]
        return [logits[:, : self._vocab_size].contiguous() for logits in whole]

    def scores(
        self, hidden: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return, for each batch, the log-probability of each target token, fp32 `[n]`, and whether it is the most
        likely token.

        hidden: after the final norm, `[n, H]`. The largest logit and the sum of exponentials are updated block by block
        (online softmax, Milakov and Gimelshein 2018).
        """
        sums = [_RunningSoftmax.empty(len(each), each.device) for each in targets]
        for block in self._blocks:
            (shard,) = block.shards
            ((_, first, count),) = shard.runs
            count = max(0, min(count, self._vocab_size - first))  # without the vocabulary's padding
            with self._source.use(block.key, _only) as weight:
                size = max(1, LOGIT_BYTES // (4 * len(weight)))
                for state, wanted, found in zip(hidden, targets, sums, strict=True):
                    for begin in range(0, len(wanted) if count else 0, size):
                        those = slice(begin, begin + size)
                        logits = F.linear(state[those], weight, self._bias_of(block))[:, :count].float()
                        found.add(logits, first, wanted[those], those)
        for found in sums if self._group is not None else ():
            found.join(self._group)
        return [
            (found.target - found.largest - found.sum.log(), found.likeliest == wanted)
            for found, wanted in zip(sums, targets, strict=True)
        ]

    def _bias_of(self, block: WeightUnit) -> torch.Tensor | None:
        (shard,) = block.shards
        return None if self._bias is None else self._bias[shard.first_row : shard.first_row + shard.shape[0]]


def _only(weights: Weights) -> torch.Tensor:
    (weight,) = weights.values()
    return weight


@dataclass
class _RunningSoftmax:
    """Softmax statistics over blocks of logits, `[n]`: largest logit, its token, sum of exp, target's logit."""

    largest: torch.Tensor
    likeliest: torch.Tensor
    sum: torch.Tensor
    target: torch.Tensor

    @classmethod
    def empty(cls, count: int, device: torch.device) -> _RunningSoftmax:
        lowest = torch.full((count,), float("-inf"), device=device)
        tokens = torch.zeros(count, dtype=torch.long, device=device)
        return cls(lowest, tokens, torch.zeros(count, device=device), torch.zeros(count, device=device))

    def add(self, logits: torch.Tensor, first: int, targets: torch.Tensor, those: slice) -> None:
        """Add a block of logits, fp32 `[m, block size]`, to the statistics of the m rows in the slice `those`.

        first: token id of the block's first column. targets: each row's target token, int64 `[m]`.
        """
        best, token = logits.max(dim=1)
        before = self.largest[those]
        largest = torch.maximum(before, best)
        self.sum[those] = self.sum[those] * (before - largest).exp() + (logits - largest[:, None]).exp_().sum(dim=1)
        self.likeliest[those] = torch.where(best > before, token + first, self.likeliest[those])
        self.largest[those] = largest
        local = targets - first
        is_here = (local >= 0) & (local < logits.size(1))
        found = logits.gather(1, local.clamp(0, logits.size(1) - 1)[:, None]).squeeze(1)
        self.target[those] = torch.where(is_here, found, self.target[those])

    def join(self, group: dist.ProcessGroup) -> None:
        """Combine the statistics of all tensor ranks, each of which has a shard of the vocabulary."""
        mine = torch.stack([self.largest, self.likeliest.float(), self.sum, self.target])
        of_ranks = [torch.empty_like(mine) for _ in range(group.size())]
        dist.all_gather(of_ranks, mine, group=group)
        first = of_ranks[0]
        self.largest, self.likeliest, self.sum = first[0], first[1].long(), first[2]
        for other in of_ranks[1:]:
            largest = torch.maximum(self.largest, other[0])
            self.sum = self.sum * (self.largest - largest).exp() + other[2] * (other[0] - largest).exp()
            self.likeliest = torch.where(other[0] > self.largest, other[1].long(), self.likeliest)
            self.largest = largest
        self.target = torch.stack([each[3] for each in of_ranks]).sum(dim=0)  # zero except on the rank that has it
