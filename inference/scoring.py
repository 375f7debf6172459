"""Log-likelihoods of texts that may be longer than what the model reads at once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from inference.decoder import Decoder


@dataclass(frozen=True)
class Score:
    """Sum of the negative log-likelihood in nats over `num_tokens` tokens that stand for `num_bytes` bytes of UTF-8."""

    nats: float
    num_tokens: int
    num_bytes: int

    @property
    def perplexity(self) -> float:
        """Per token."""
        return math.exp(min(self.nats / max(self.num_tokens, 1), 700.0))

    @property
    def bits_per_byte(self) -> float:
        """Comparable between tokenizers."""
        return self.nats / math.log(2) / max(self.num_bytes, 1)

    def __add__(self, other: Score) -> Score:
        return Score(self.nats + other.nats, self.num_tokens + other.num_tokens, self.num_bytes + other.num_bytes)


def windows(num_tokens: int, length: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """(begin, end, first token that counts) of overlapping windows of at most `length` tokens; tokens 1, 2, ... count
    once each."""
    end, counted = min(length, num_tokens), 1
    while counted < num_tokens:
        yield max(0, end - length), end, counted
        counted, end = end, min(end + stride, num_tokens)


@torch.inference_mode()
def log_likelihoods(decoder: Decoder, tokens: list[int], length: int, stride: int, batch_size: int) -> torch.Tensor:
    """Log-probability of each token but the first, fp64 on the host, from the tokens of its window before it."""
    result = torch.zeros(max(len(tokens) - 1, 0), dtype=torch.float64)
    pending = list(windows(len(tokens), length, stride))
    for begin in range(0, len(pending), batch_size):
        group = pending[begin : begin + batch_size]
        longest = max(end - start for start, end, _ in group)
        rows = [tokens[start:end] + [0] * (longest - (end - start)) for start, end, _ in group]
        scores = decoder.score(torch.tensor(rows), [end - start for start, end, _ in group])[0].double().cpu()
        for (start, end, first), row in zip(group, scores, strict=True):
            result[first - 1 : end - 1] = row[first - start - 1 : end - start - 1]
    return result
