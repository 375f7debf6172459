"""Sharding of sequences over context ranks: the rows of each rank, and the keys and values that it receives.

The `parallel.context` ranks form cp_ranks of `context_heads` ranks each. The ranks of one cp_rank exchange attention
heads for sequence rows, so that each has all rows of the cp_rank for some of the heads. Different cp_ranks exchange key
and value rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from configs import derived
from configs.derived import context_heads, num_cp_ranks, rank_sequence_rows
from configs.schema import Config
from models.attention.exchange_rounds import ExchangeRound, ExchangeSchedule, Segments
from models.attention.mask_slices import Slices
from models.attention.sequence_sharding import shard_sequence, window_work

Lengths = Sequence[int] | np.ndarray
MOST_CACHED = 1024  # cached results: a search of layouts asks for the same ones repeatedly


@dataclass(frozen=True)
class SharedRows:
    """Sharding of the sequences of micro-batches over context ranks: the rows of each rank, and the rows it receives.

    A cp_rank is a group of ranks that exchange attention heads. Values are means over the micro-batches, unless noted.
    """

    context: int
    heads: int  # ranks of a cp_rank, which exchange heads for rows
    places: int  # number of cp_ranks; this name is in plan.json
    rows: int  # of one rank; this name is in plan.json
    # Key and value rows that each cp_rank receives for one attention: in layers whose rows attend to all rows before
    # them, and in layers with a sliding window.
    received: tuple[float, ...]
    received_sliding: tuple[float, ...]
    sliding: float  # share of the layers with a sliding window
    rounds: int  # maximum number of rounds of attention, including the one with own rows
    round_rows: int  # maximum number of key and value rows that arrive in one round
    coming_rows: int  # maximum in flight to a cp_rank, including those that a round computes with
    moved_rows: int  # maximum that a cp_rank receives and sends in all rounds
    own_parts: float  # lists of slices over own keys, mean of cp_ranks and layers; 1 without latents
    squares: float  # pairs that kernels compute (whole squares) divided by twice the pairs that attend
    is_known: bool = True  # whether documents' lengths are known; else one document per sample, which exchanges most

    @property
    def of_layer(self) -> tuple[float, ...]:
        """Key and value rows that each cp_rank receives, as a mean over the layers."""
        pairs = zip(self.received, self.received_sliding, strict=True)
        return tuple((1 - self.sliding) * whole + self.sliding * sliding for whole, sliding in pairs)

    def mean_received(self, slides: bool | None = None) -> float:
        """Return the mean number of key and value rows that a cp_rank receives per layer; it sends as many.

        `slides`: in layers with (True) or without (False) a sliding window; None: the mean over all layers.
        """
        every = self.of_layer if slides is None else self.received_sliding if slides else self.received
        return sum(every) / self.places


_OF_SAMPLES: dict[tuple[object, ...], SharedRows] = {}


def shared_rows(config: Config, micro_batches: Sequence[Lengths] | None = None) -> SharedRows:
    """Return the sharding of micro-batches with documents of these lengths; None: each sample is one document."""
    if micro_batches is not None:
        return _shared_rows(config, micro_batches)
    model = config.model
    key: tuple[object, ...] = (config.parallel.context, context_heads(config), config.training.micro_batch_size)
    key += (config.data.documents, model.family, model.sequence_length, model.attention, model.sliding_window)
    key += (tuple(derived.window_pattern(config)),)
    if key not in _OF_SAMPLES:
        if len(_OF_SAMPLES) >= MOST_CACHED:
            _OF_SAMPLES.clear()
        _OF_SAMPLES[key] = _shared_rows(config, None)
    return _OF_SAMPLES[key]


def _shared_rows(config: Config, micro_batches: Sequence[Lengths] | None) -> SharedRows:
    context, heads, cp_size = config.parallel.context, context_heads(config), num_cp_ranks(config)
    rank_rows, pattern = rank_sequence_rows(config), derived.window_pattern(config)
    sliding = sum(pattern) / len(pattern)
    is_known = micro_batches is not None or config.data.documents != "separate"
    if micro_batches is None:
        micro_batches = [[config.model.sequence_length] * config.training.micro_batch_size]
    if cp_size == 1:
        return SharedRows(context, heads, 1, rank_rows, (0.0,), (0.0,), sliding, 1, 0, 0, 0, 1.0, 1.0, is_known)
    windows = {bool(slides): pattern.count(slides) for slides in pattern}
    received = {slides: np.zeros(cp_size) for slides in (False, True)}
    computed, pairs, own_rounds, most = 0.0, 0.0, 0.0, np.zeros(4, np.int64)
    for lengths in micro_batches:
        batch = _Batch(config, np.asarray(lengths, np.int64), cp_size)
        for slides, layers in windows.items():
            received[slides] += batch.schedule(slides).received.sum(1)
            of_kernels, of_documents = batch.squares(slides)
            computed, pairs = computed + layers * of_kernels, pairs + layers * of_documents
            most = np.maximum(most, batch.rounds(slides))
            own_rounds += layers * batch.own_rounds(slides) / len(pattern) / len(micro_batches)
    received_whole, received_sliding = (
        tuple(float(each) for each in received[slides] / len(micro_batches)) for slides in (False, True)
    )
    if not sliding:
        received_sliding = received_whole
    squares = computed / pairs
    rounds, round_rows, coming, moved = most.tolist()
    found = (sliding, 1 + rounds, round_rows, coming, moved, own_rounds, squares)
    return SharedRows(context, heads, cp_size, rank_rows, received_whole, received_sliding, *found, is_known)


class _Batch:
    """One micro-batch, sharded over cp_ranks as in a run."""

    def __init__(self, config: Config, segments: np.ndarray, cp_size: int) -> None:
        self._segments, self._cp_size, self._window = segments, cp_size, config.model.sliding_window
        self._has_latents = config.model.attention == "latent"
        keys = None if config.model.family == "gpt" else segments
        work = window_work(derived.window_pattern(config), self._window, int(segments.max()))
        found = shard_sequence(segments, cp_size, work=work, keys=keys)
        self._schedules = {
            window: ExchangeSchedule(Segments(segments, keys), found, window)
            for window in (None, self._window_of(True))
        }
        self._rounds: dict[int | None, list[tuple[Slices, list[ExchangeRound]]]] = {}

    def _window_of(self, slides: bool) -> int | None:
        """Return the window, in tokens, of the layers with (`slides`) or without a sliding window; None if it is at
        least as long as every document, so that it cuts nothing."""
        return self._window if slides and self._window is not None and self._window < self._segments.max() else None

    def schedule(self, slides: bool) -> ExchangeSchedule:
        """Return the schedule of exchanged rows for layers with or without a sliding window."""
        return self._schedules[self._window_of(slides)]

    def rounds(self, slides: bool) -> tuple[int, int, int, int]:
        """Return the number of rounds in which key and value rows arrive, and three maxima in rows.

        The maxima are of one round, in flight to a cp_rank, and received plus sent by a cp_rank in total.
        """
        schedule = self.schedule(slides)
        received = schedule.received.sum(1)
        _, found = self._of_ranks(slides)[int(received.argmax())]
        num_rows = max((each.num_keys for each in found), default=0)
        moved = received + schedule.received.sum(0)
        return len(found), num_rows, min(int(received.max()), (1 + schedule.ahead) * num_rows), int(moved.max())

    def own_rounds(self, slides: bool) -> float:
        """Return how many times a cp_rank expands the latents of its own keys, on average; 1 without latents."""
        if not self._has_latents:
            return 1.0
        return sum(len(own) for own, _ in self._computed(slides)) / self._cp_size

    def squares(self, slides: bool) -> tuple[float, float]:
        """Return the number of token pairs that kernels compute, and twice the number of pairs that attend."""
        window, segments = self._window_of(slides), self._segments
        slices = [each for own, others in self._computed(slides) for each in (*own, *others)]
        computed = sum(int((each.queries * each.keys).sum()) for each in slices)
        if window is None:
            return float(computed), float((segments**2).sum())
        short = np.minimum(segments, window)
        return float(computed), float((short * (2 * segments - short)).sum())

    def _computed(self, slides: bool) -> list[tuple[list[Slices], list[Slices]]]:
        """Return, per cp_rank, the slices (blocks of the attention mask) on its own keys and on received keys.

        Its own keys have one set of slices, or two if other keys arrive in rounds; received keys have one per round.
        """
        every = self._of_ranks(slides)
        return [(own.halves() if rounds else [own], [each.slices for each in rounds]) for own, rounds in every]

    def _of_ranks(self, slides: bool) -> list[tuple[Slices, list[ExchangeRound]]]:
        """Return, per cp_rank, the slices (blocks of the attention mask) on its own keys, and its receiving rounds."""
        window = self._window_of(slides)
        if window not in self._rounds:
            self._rounds[window] = [self._schedules[window].rounds(cp_rank) for cp_rank in range(self._cp_size)]
        return self._rounds[window]
