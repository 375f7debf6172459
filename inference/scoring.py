"""Log-likelihoods of texts, which may be longer than the model's sequence length."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from data.document_lengths import bucket_name
from inference.decoder import Decoder, TextBatch

T = TypeVar("T")


@dataclass(frozen=True)
class Score:
    """The summed negative log-likelihood in nats of `num_tokens` tokens, which encode `num_bytes` bytes of UTF-8.

    by_position: (nats, number of tokens) per range of positions (0, 1, 2-3, 4-7, ...) of the preceding token. The begin
    token has position 0.
    """

    nats: float
    num_tokens: int
    num_bytes: int
    by_position: dict[str, tuple[float, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, nats: torch.Tensor, num_bytes: int) -> Score:
        """Return the score of one text from the negative log-likelihood of each token, fp64 [n]."""
        found = {}
        for bucket in range((len(nats) - 1).bit_length() + 1):
            own = nats[2 ** (bucket - 1) if bucket else 0 : 2**bucket]
            if len(own):
                found[bucket_name(bucket)] = float(own.sum()), len(own)
        return cls(float(nats.sum()), len(nats), num_bytes, found)

    @property
    def perplexity(self) -> float:
        """Perplexity per token."""
        return math.exp(min(self.nats / max(self.num_tokens, 1), 700.0))

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte of UTF-8, which can be compared between models with different tokenizers."""
        return self.nats / math.log(2) / max(self.num_bytes, 1)

    def __add__(self, other: Score) -> Score:
        by_position = dict(self.by_position)
        for name, (nats, count) in other.by_position.items():
            before, so_far = by_position.get(name, (0.0, 0))
            by_position[name] = before + nats, so_far + count
        counts = self.num_tokens + other.num_tokens, self.num_bytes + other.num_bytes
        return Score(self.nats + other.nats, *counts, by_position)


def windows(num_tokens: int, length: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Yield overlapping windows of at most `length` tokens as (begin, end, first scored token). Each token except the
    first is scored in exactly one window."""
    end, counted = min(length, num_tokens), 1
    while counted < num_tokens:
        yield max(0, end - length), end, counted
        counted, end = end, min(end + stride, num_tokens)


@torch.inference_mode()
def log_likelihoods_of(
    decoder: Decoder, texts: Sequence[list[int]], length: int, stride: int, batch_size: int
) -> list[torch.Tensor]:
    """Return the log-probabilities of each text's tokens after the first, fp64 on the host, given the earlier tokens of
    the window.

    A batch contains windows of one text. If weights are streamed, batches share forward passes.
    """
    results = [torch.zeros(max(len(tokens) - 1, 0), dtype=torch.float64) for tokens in texts]
    groups = [
        (number, pending[begin : begin + batch_size])
        for number, tokens in enumerate(texts)
        for pending in [list(windows(len(tokens), length, stride))]
        for begin in range(0, len(pending), batch_size)
    ]
    for those in shared_batches(decoder, groups, [[end - start for start, end, _ in group] for _, group in groups]):
        found = score_together(decoder, [[texts[n][start:end] for start, end, _ in group] for n, group in those])
        for (number, group), (log_probs, _) in zip(those, found, strict=True):
            for (start, end, first), row in zip(group, log_probs.double().cpu(), strict=True):
                results[number][first - 1 : end - 1] = row[first - start - 1 : end - start - 1]
    return results


def shared_batches(decoder: Decoder, batches: Sequence[T], lengths: Sequence[Sequence[int]]) -> list[Sequence[T]]:
    """Group batches by forward pass: several if weights are streamed, else one. lengths: tokens per text, per batch."""
    if not batches:
        return []
    longest = max(max(of_batch) for of_batch in lengths)
    size = decoder.batches_at_once(max(map(len, lengths)), longest, 0, False, len(batches))
    return [batches[begin : begin + size] for begin in range(0, len(batches), size)]


def score_together(decoder: Decoder, batches: Sequence[list[list[int]]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Score batches of texts in one forward pass, padding shorter texts.

    Returns two tensors `[b, s - 1]` per batch for the tokens after the first: fp32 log-probabilities, and whether the
    token is the most likely one.
    """
    return decoder.score_all([TextBatch.of(texts) for texts in batches])
