"""What a place of context parallelism computes and exchanges: slices over its own rows first, then rounds of others'.

A place holds rows of a micro-batch as models/attention/dealing.py deals them. It gets the key rows that some query of
its attends to and no others: in a round those of owners at certain distances before it, so that each place sends to as
many as it gets from. Made on the host by numpy, alike on all ranks, from where documents begin. Rows are counted
through the micro-batch, or through a place's own (its rows in their order).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from models.attention.dealing import Deal
from models.attention.slices import ANTI_CAUSAL, CAUSAL, FULL, Slices, windowed


@dataclass(frozen=True, eq=False)
class Pieces:
    """Pieces of documents one after the other, int64 `[pieces]`: rows of each, and how many keys its rows attend to
    from its first on; None: each to those before it and itself."""

    lengths: np.ndarray
    keys: np.ndarray | None = None

    @property
    def first(self) -> np.ndarray:
        """The first row of each."""
        return np.cumsum(self.lengths) - self.lengths


@dataclass(frozen=True, eq=False)
class Round:
    """What a place does in one round. `slices`: its query rows over `num_keys` rows that arrive, in the order of their
    owners. `sends`: by place, own rows that it gets; `receives`: by place, how many rows come from it."""

    slices: Slices
    num_keys: int
    sends: dict[int, np.ndarray]
    receives: dict[int, int]


class _Segment(NamedTuple):
    """Rows of one piece on one place; `own`: where they begin among the place's rows."""

    place: int
    begin: int
    end: int
    own: int


class _Transfer(NamedTuple):
    """Rows [begin, end) that a place gets from an owner, in whose rows they begin at `own`."""

    place: int
    owner: int
    begin: int
    end: int
    own: int


class Dealt:
    """The segments of a deal, and which rows each place gets from which, with this sliding window (None: without)."""

    def __init__(self, pieces: Pieces, deal: Deal, window: int | None = None) -> None:
        self._pieces, self._deal, self._window = pieces, deal, window
        self.place_rows = int(pieces.lengths.sum()) // deal.num_places
        first = pieces.first
        order = np.argsort(deal.first, kind="stable")
        begins = np.union1d(deal.first, first)
        ends = np.append(begins[1:], pieces.lengths.sum())
        place = deal.place[order][np.searchsorted(deal.first[order], begins, side="right") - 1]
        of_piece = np.searchsorted(first, begins, side="right") - 1
        by_place = np.lexsort((begins, place))
        own = np.empty_like(begins)
        sizes = (ends - begins)[by_place]
        own[by_place] = np.cumsum(sizes) - sizes
        own -= place * self.place_rows
        is_whole = np.bincount(of_piece, minlength=len(first))[of_piece] == 1
        self._whole = tuple(column[is_whole] for column in (place, own, ends - begins, of_piece))
        self._cut: dict[int, list[_Segment]] = {}
        columns = (column[~is_whole].tolist() for column in (of_piece, place, begins, ends, own))
        for piece, *segment in zip(*columns):
            self._cut.setdefault(piece, []).append(_Segment(*segment))
        self._transfers = [each for piece in self._cut for each in self._of_piece(piece)]

    @property
    def received(self) -> np.ndarray:
        """Rows that each place gets from each, int64 `[places, owners]`."""
        found = np.zeros((self._deal.num_places, self._deal.num_places), np.int64)
        for each in self._transfers:
            found[each.place, each.owner] += each.end - each.begin
        return found

    def rounds(self, place: int) -> tuple[Slices, list[Round]]:
        """A place's slices over its own keys, and its rounds, as many as every other place has."""
        distances = self._round_of_distance()
        found: list[list[_Transfer]] = [[] for _ in range(max(distances.values(), default=-1) + 1)]
        sent: list[dict[int, list[np.ndarray]]] = [{} for _ in found]
        for each in self._transfers:
            number = distances[(each.place - each.owner) % self._deal.num_places]
            if each.place == place:
                found[number].append(each)
            elif each.owner == place:
                rows = np.arange(each.own, each.own + each.end - each.begin)
                sent[number].setdefault(each.place, []).append(rows)
        rounds = []
        for transfers, sends in zip(found, sent):
            transfers.sort(key=lambda each: (each.owner, each.begin))
            receives: dict[int, int] = {}
            keys, at = [], 0
            for each in transfers:
                receives[each.owner] = receives.get(each.owner, 0) + each.end - each.begin
                keys.append((each.begin, each.end, at))
                at += each.end - each.begin
            slices = _as_slices(self._parts(place, keys))
            in_order = {other: np.sort(np.concatenate(sends[other])) for other in sorted(sends)}
            rounds.append(Round(slices, at, in_order, dict(sorted(receives.items()))))
        return self._own_slices(place), rounds

    def _own_slices(self, place: int) -> Slices:
        here = self._whole[0] == place
        own, lengths, piece = (column[here] for column in self._whole[1:])
        sample = np.zeros_like(own)
        if self._pieces.keys is None:
            whole = Slices(np.full(len(own), CAUSAL), sample, own, lengths, own, lengths)
            if self._window is not None and len(own):
                whole = windowed(whole, self._window)
        else:
            whole = Slices(np.full(len(own), FULL), sample, own, lengths, own, self._pieces.keys[piece])
        keys = [(each.begin, each.end, each.own) for cut in self._cut.values() for each in cut if each.place == place]
        cut = _as_slices(self._parts(place, keys))
        return Slices(*(np.concatenate(pair) for pair in zip(whole.columns, cut.columns)))

    # -- which rows go where -------------------------------------------------------------------------------------------

    def _of_piece(self, piece: int) -> Iterator[_Transfer]:
        segments = self._cut[piece]
        for place in sorted({each.place for each in segments}):
            for low, high in self._needed(piece, place):
                for each in segments:
                    begin, end = max(each.begin, low), min(each.end, high)
                    if each.place != place and begin < end:
                        yield _Transfer(place, each.place, begin, end, each.own + begin - each.begin)

    def _needed(self, piece: int, place: int) -> list[tuple[int, int]]:
        """The rows of a piece that rows of a place attend to, as runs."""
        first = int(self._pieces.first[piece])
        if self._pieces.keys is not None:
            return [(first, first + int(self._pieces.keys[piece]))]
        runs: list[tuple[int, int]] = []
        for each in self._cut[piece]:
            if each.place == place:
                low = first if self._window is None else max(first, each.begin - self._window + 1)
                if runs and low <= runs[-1][1]:
                    low = runs.pop()[0]
                runs.append((low, each.end))
        return runs

    def _round_of_distance(self) -> dict[int, int]:
        """In which round the rows of owners so many places before come: as many distances in one as bring no place
        more rows than it has itself."""
        places = np.arange(self._deal.num_places)
        received = self.received
        found: dict[int, int] = {}
        number, filled = -1, np.zeros(0, np.int64)
        for distance in range(1, self._deal.num_places):
            rows = received[places, (places - distance) % self._deal.num_places]
            if not rows.any():
                continue
            if number < 0 or (filled + rows).max() > self.place_rows:
                number, filled = number + 1, np.zeros_like(rows)
            filled = filled + rows
            found[distance] = number
        return found

    # -- slices of pieces that are cut ---------------------------------------------------------------------------------

    def _parts(self, place: int, keys: list[tuple[int, int, int]]) -> Iterator[tuple[int, ...]]:
        """What a place computes of cut pieces with these keys: (first row, behind the last, where they begin in their
        buffer). Kind, query rows as the place has them, key rows of the buffer."""
        keys = sorted(keys)
        begins = [begin for begin, _, _ in keys]
        for piece, segments in self._cut.items():
            for each in segments:
                if each.place != place:
                    continue
                for kind, query, queries, key, num_keys in self._squares(piece, each):
                    own = each.own + query - each.begin
                    at = max(int(np.searchsorted(begins, key, side="right")) - 1, 0)
                    for begin, end, buffer in keys[at:]:
                        if begin >= key + num_keys:
                            break
                        low, high = max(begin, key), min(end, key + num_keys)
                        if low < high:
                            yield from _clipped(
                                kind, own, queries, low - key, high - key, num_keys, buffer + low - begin
                            )

    def _squares(self, piece: int, run: _Segment) -> Iterator[tuple[int, int, int, int, int]]:
        """All that the rows of a segment attend to: kind, first query row and number, first key row and number."""
        first = int(self._pieces.first[piece])
        if self._pieces.keys is not None:
            yield FULL, run.begin, run.end - run.begin, first, int(self._pieces.keys[piece])
            return
        window = self._window
        if window is None:
            if run.begin > first:
                yield FULL, run.begin, run.end - run.begin, first, run.begin - first
            yield CAUSAL, run.begin, run.end - run.begin, run.begin, run.end - run.begin
            return
        # The piece's rows in blocks of a window, as `windowed` has them: of each block the part that lies in the run.
        for block in range(first + (run.begin - first) // window * window, run.end, window):
            begin, end = max(block, run.begin), min(block + window, run.end)
            if begin > block:
                yield FULL, begin, end - begin, block, begin - block
            yield CAUSAL, begin, end - begin, begin, end - begin
            reach = min(end, block + window - 1) - begin  # the block's last row attends to none before it
            if block > first and reach > 0:
                before = begin - window + 1  # row i of the part attends to these rows from i on
                yield ANTI_CAUSAL, begin, reach, before, reach
                if before + reach < block:
                    yield FULL, begin, reach, before + reach, block - before - reach


def _clipped(
    kind: int, query: int, queries: int, low: int, high: int, num_keys: int, buffer: int
) -> Iterator[tuple[int, ...]]:
    """A slice with its keys [low, high) alone, which begin at `buffer`."""
    keys = high - low
    if kind == CAUSAL:
        # The keys are rows of the queries' own place.
        assert keys == num_keys, "a causal square has its keys where its queries are"
        yield kind, query, queries, buffer, keys
    elif kind == FULL:
        yield kind, query, queries, buffer, keys
    else:  # row i attends to keys i to the last: those before `low` attend to all of these
        if low:
            yield FULL, query, low, buffer, keys
        yield ANTI_CAUSAL, query + low, keys, buffer, keys


def _as_slices(parts: Iterator[tuple[int, ...]]) -> Slices:
    """Parts as slices of one sample; full ones of the same queries whose keys lie side by side are one."""
    merged: list[list[int]] = []
    for part in sorted(parts, key=lambda part: (part[0], part[1], part[2], part[3])):
        last = merged[-1] if merged else None
        if last and part[0] == FULL and tuple(last[:3]) == part[:3] and last[3] + last[4] == part[3]:
            last[4] += part[4]
        else:
            merged.append(list(part))
    merged.sort(key=lambda part: (part[1], part[3]))
    columns = np.array(merged, dtype=np.int64).reshape(-1, 5).T
    kind, query, queries, key, keys = (np.ascontiguousarray(column) for column in columns)
    return Slices(kind, np.zeros_like(kind), query, queries, key, keys)
