"""Sequences that several ranks share: which rows each place gets, and which keys and values it is sent, for the
documents that a micro-batch has.

`parallel.context` ranks make places of `context_heads` ranks each. A place's ranks exchange heads for rows, so that
each has all rows of the place for some of the heads; places exchange key and value rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from configs import derived
from configs.derived import context_heads, context_places, rows_of_rank
from configs.schema import Config
from models.attention.dealing import deal, window_work
from models.attention.rounds import Dealt, Pieces, Round
from models.attention.slices import Slices

Lengths = Sequence[int] | np.ndarray
KEPT = 1024  # dealt micro-batches that are remembered: a search of layouts asks for the same again and again


@dataclass(frozen=True)
class SharedRows:
    """What context ranks do with a micro-batch, a mean over those that were dealt."""

    context: int
    heads: int  # ranks of a place, which exchange heads for rows
    places: int
    rows: int  # of one rank
    # Key and value rows that are sent to each place for one attention: of layers whose rows attend to all before them,
    # and of those with a sliding window.
    received: tuple[float, ...]
    received_sliding: tuple[float, ...]
    sliding: float  # share of the layers
    rounds: int  # of attention, the place's own rows included: the most
    round_rows: int  # key and value rows that arrive in one of them: the most
    coming_rows: int  # that may be on their way to a place at once, with those of the round that computes: the most
    moved_rows: int  # that come to a place and leave it in all rounds: the most
    own_parts: float  # of what a place computes with its own keys, where there are others'; counted for latents
    squares: float  # of the documents' pairs, what kernels compute: they take their runs' squares whole
    is_known: bool = True  # whether by documents' lengths; else by samples of one document, which exchange most

    @property
    def of_layer(self) -> tuple[float, ...]:
        """Rows that are sent to each place, the mean of the layers."""
        pairs = zip(self.received, self.received_sliding, strict=True)
        return tuple((1 - self.sliding) * whole + self.sliding * part for whole, part in pairs)

    def mean_received(self, slides: bool | None = None) -> float:
        """Rows that are sent to a place in the mean, which is what it sends as well: of a layer that slides or not;
        None: of all."""
        every = self.of_layer if slides is None else self.received_sliding if slides else self.received
        return sum(every) / self.places


_OF_SAMPLES: dict[tuple[object, ...], SharedRows] = {}


def shared_rows(config: Config, micro_batches: Sequence[Lengths] | None = None) -> SharedRows:
    """Deal micro-batches with documents of these lengths; None: each sample is one document."""
    if micro_batches is not None:
        return _shared_rows(config, micro_batches)
    model = config.model
    key: tuple[object, ...] = (config.parallel.context, context_heads(config), config.training.micro_batch_size)
    key += (config.data.documents, model.family, model.sequence_length, model.attention, model.sliding_window)
    key += (tuple(derived.window_pattern(config)),)
    if key not in _OF_SAMPLES:
        if len(_OF_SAMPLES) >= KEPT:
            _OF_SAMPLES.clear()
        _OF_SAMPLES[key] = _shared_rows(config, None)
    return _OF_SAMPLES[key]


def _shared_rows(config: Config, micro_batches: Sequence[Lengths] | None) -> SharedRows:
    context, heads, places = config.parallel.context, context_heads(config), context_places(config)
    rows, pattern = rows_of_rank(config), derived.window_pattern(config)
    sliding = sum(pattern) / len(pattern)
    is_known = micro_batches is not None or config.data.documents != "separate"
    if micro_batches is None:
        micro_batches = [[config.model.sequence_length] * config.training.micro_batch_size]
    if places == 1:
        return SharedRows(context, heads, 1, rows, (0.0,), (0.0,), sliding, 1, 0, 0, 0, 1.0, 1.0, is_known)
    windows = {bool(slides): pattern.count(slides) for slides in pattern}
    received = {slides: np.zeros(places) for slides in (False, True)}
    computed, pairs, own_parts, most = 0.0, 0.0, 0.0, np.zeros(4, np.int64)
    for lengths in micro_batches:
        batch = _Batch(config, np.asarray(lengths, np.int64), places)
        for slides, layers in windows.items():
            received[slides] += batch.dealt(slides).received.sum(1)
            of_kernels, of_documents = batch.squares(slides)
            computed, pairs = computed + layers * of_kernels, pairs + layers * of_documents
            most = np.maximum(most, batch.rounds(slides))
            own_parts += layers * batch.own_parts(slides) / len(pattern) / len(micro_batches)
    whole, part = (tuple(float(rows) for rows in received[slides] / len(micro_batches)) for slides in (False, True))
    if not sliding:
        part = whole
    squares = computed / pairs
    rounds, round_rows, coming, moved = most.tolist()
    found = (sliding, 1 + rounds, round_rows, coming, moved, own_parts, squares)
    return SharedRows(context, heads, places, rows, whole, part, *found, is_known)


class _Batch:
    """A micro-batch that is dealt as a run deals it."""

    def __init__(self, config: Config, pieces: np.ndarray, places: int) -> None:
        self._pieces, self._places, self._window = pieces, places, config.model.sliding_window
        self._has_latents = config.model.attention == "latent"
        keys = None if config.model.family == "gpt" else pieces
        work = window_work(derived.window_pattern(config), self._window, int(pieces.max()))
        found = deal(pieces, places, work=work, keys=keys)
        self._dealt = {window: Dealt(Pieces(pieces, keys), found, window) for window in (None, self._of(True))}
        self._rounds: dict[int | None, list[tuple[Slices, list[Round]]]] = {}

    def _of(self, slides: bool) -> int | None:
        """The window of layers that slide, where it makes a difference."""
        return self._window if slides and self._window is not None and self._window < self._pieces.max() else None

    def dealt(self, slides: bool) -> Dealt:
        """What each place gets from each."""
        return self._dealt[self._of(slides)]

    def rounds(self, slides: bool) -> tuple[int, int, int, int]:
        """Rounds in which rows arrive, the most rows of one, the most that are on their way to a place at once, and the
        most that come to one and leave it in all."""
        dealt = self.dealt(slides)
        received = dealt.received.sum(1)
        _, found = self._of_places(slides)[int(received.argmax())]
        rows = max((each.num_keys for each in found), default=0)
        moved = received + dealt.received.sum(0)
        return len(found), rows, min(int(received.max()), (1 + dealt.ahead) * rows), int(moved.max())

    def own_parts(self, slides: bool) -> float:
        """Parts in which a place computes with its own keys, each with latents that are expanded: the mean."""
        if not self._has_latents:
            return 1.0
        return sum(len(own) for own, _ in self._computed(slides)) / self._places

    def squares(self, slides: bool) -> tuple[float, float]:
        """Pairs that kernels compute, and twice those that attend."""
        window, pieces = self._of(slides), self._pieces
        slices = [each for own, others in self._computed(slides) for each in (*own, *others)]
        computed = sum(int((each.queries * each.keys).sum()) for each in slices)
        if window is None:
            return float(computed), float((pieces**2).sum())
        short = np.minimum(pieces, window)
        return float(computed), float((short * (2 * pieces - short)).sum())

    def _computed(self, slides: bool) -> list[tuple[list[Slices], list[Slices]]]:
        """By place: slices over its own keys, in the parts in which it computes them, and those over others'."""
        every = self._of_places(slides)
        return [(own.halves() if rounds else [own], [each.slices for each in rounds]) for own, rounds in every]

    def _of_places(self, slides: bool) -> list[tuple[Slices, list[Round]]]:
        """By place: slices over its own keys, and its rounds."""
        window = self._of(slides)
        if window not in self._rounds:
            self._rounds[window] = [self._dealt[window].rounds(place) for place in range(self._places)]
        return self._rounds[window]
