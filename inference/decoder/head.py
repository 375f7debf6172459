"""The output layer: logits, or the scores of given tokens without all logits at once, block of rows after block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F

from inference.decoder.linear import Group, Weights, gather
from inference.weights.parts import WeightUnit
from inference.weights.source import WeightSource

LOGIT_BYTES = 64 * 2**20  # of the fp32 logits that exist at the same time while tokens are scored
BIAS = "output_layer.bias"


class Head:
    """The output layer of this rank's part of the vocabulary; `group` splits it."""

    def __init__(self, source: WeightSource, vocab_size: int, group: Group) -> None:
        self._source, self._vocab_size, self._group = source, vocab_size, group
        self._bias = source.small.get(BIAS)
        self._blocks = source.held.head

    def logits(self, hidden: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """fp32 `[n, V]` of normed hidden states `[n, H]`, of each batch."""
        parts: list[list[torch.Tensor]] = [[] for _ in hidden]
        for block in self._blocks:
            with self._source.use(block.key, _rows) as rows:
                for each, found in zip(hidden, parts, strict=True):
                    found.append(F.linear(each, rows, self._bias_of(block)).float())
        whole = [gather(torch.cat(found, dim=1), self._group) for found in parts]
        return [logits[:, : self._vocab_size].contiguous() for logits in whole]

    def scores(
        self, hidden: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Log-probability of each target, fp32 `[n]`, and whether it is the likeliest token, from normed hidden states
        `[n, H]`, of each batch: the largest logit and the sum of exponentials grow from block to block (online softmax,
        Milakov and Gimelshein 2018)."""
        sums = [_RunningSoftmax.of(len(each), each.device) for each in targets]
        for block in self._blocks:
            (part,) = block.parts
            ((_, first, count),) = part.runs
            count = max(0, min(count, self._vocab_size - first))  # without what pads the vocabulary
            with self._source.use(block.key, _rows) as rows:
                size = max(1, LOGIT_BYTES // (4 * len(rows)))
                for state, wanted, found in zip(hidden, targets, sums, strict=True):
                    for begin in range(0, len(wanted) if count else 0, size):
                        those = slice(begin, begin + size)
                        logits = F.linear(state[those], rows, self._bias_of(block))[:, :count].float()
                        found.add(logits, first, wanted[those], those)
        for found in sums if self._group is not None else ():
            found.join(self._group)
        return [
            (found.target - found.largest - found.sum.log(), found.likeliest == wanted)
            for found, wanted in zip(sums, targets, strict=True)
        ]

    def _bias_of(self, block: WeightUnit) -> torch.Tensor | None:
        (part,) = block.parts
        return None if self._bias is None else self._bias[part.first_row : part.first_row + part.shape[0]]


def _rows(weights: Weights) -> torch.Tensor:
    (rows,) = weights.values()
    return rows


@dataclass
class _RunningSoftmax:
    """What is known after some of the vocabulary, fp32 `[n]`: the largest logit and its token, the sum of exponentials
    of logits less the largest, and the target's logit."""

    largest: torch.Tensor
    likeliest: torch.Tensor
    sum: torch.Tensor
    target: torch.Tensor

    @classmethod
    def of(cls, count: int, device: torch.device) -> _RunningSoftmax:
        lowest = torch.full((count,), float("-inf"), device=device)
        tokens = torch.zeros(count, dtype=torch.long, device=device)
        return cls(lowest, tokens, torch.zeros(count, device=device), torch.zeros(count, device=device))

    def add(self, logits: torch.Tensor, first: int, targets: torch.Tensor, those: slice) -> None:
        """Logits fp32 `[m, rows]` of the tokens from `first` on, for those places."""
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
        """Add the parts of the vocabulary of all tensor ranks."""
        mine = torch.stack([self.largest, self.likeliest.float(), self.sum, self.target])
        parts = [torch.empty_like(mine) for _ in range(group.size())]
        dist.all_gather(parts, mine, group=group)
        self.largest, self.likeliest, self.sum, _ = parts[0][0], parts[0][1].long(), parts[0][2], parts[0][3]
        for part in parts[1:]:
            largest = torch.maximum(self.largest, part[0])
            self.sum = self.sum * (self.largest - largest).exp() + part[2] * (part[0] - largest).exp()
            self.likeliest = torch.where(part[0] > self.largest, part[1].long(), self.likeliest)
            self.largest = largest
        self.target = torch.stack([part[3] for part in parts]).sum(dim=0)  # zero where it is another rank's
