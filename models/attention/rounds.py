"""What a place of context parallelism computes and exchanges: slices over its own rows first, then rounds of others'.

A place holds rows of a micro-batch as models/attention/dealing.py deals them. It gets the key rows that some query of
its attends to and no others: in a round those of owners at certain distances before it, so that each place sends to as
many as it gets from. Rounds are short, so that what they bring comes while others compute. Made on the host by numpy,
alike on all ranks, from where documents begin. Rows are counted through the micro-batch, or through a place's own (its
rows in their order).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from models.attention.dealing import Deal
from models.attention.slices import ANTI_CAUSAL, CAUSAL, FULL, Slices, windowed

OWN = -1  # the round in which a place computes with its own keys
# At least so many rounds if they have so many rows: of the rows that a place gets, those of the first round come while
# it has only its own to compute with, and gradients of those of the last go home while it has nothing to compute.
ROUNDS, ROUND_ROWS = 8, 1024


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


class _Segments(NamedTuple):
    """Rows [begin, end) of a piece on one place, int64 `[segments]` each, in the order of the rows; `own`: where they
    begin among the place's rows."""

    piece: np.ndarray
    place: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    own: np.ndarray

    def only(self, chosen: np.ndarray) -> _Segments:
        """The segments that a mask or indices choose."""
        return _Segments(*(column[chosen] for column in self))


class _Transfers(NamedTuple):
    """Rows [begin, end) that a place gets from an owner, in whose rows they begin at `own`, int64 `[transfers]` each;
    `part`: of all that it gets from this owner, counted in parts of a round's rows."""

    place: np.ndarray
    owner: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    own: np.ndarray
    part: np.ndarray

    @property
    def rows(self) -> np.ndarray:
        """How many rows each brings."""
        return self.end - self.begin

    def only(self, chosen: np.ndarray) -> _Transfers:
        """The transfers that a mask or indices choose."""
        return _Transfers(*(column[chosen] for column in self))


class _Keys(NamedTuple):
    """Rows [begin, end) that a place has in a round, where they begin at `buffer`: int64 `[runs]` each, in the order of
    the rows."""

    number: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    buffer: np.ndarray


class _Squares(NamedTuple):
    """What rows of segments attend to, int64 `[squares]` each: kind, first query row among the place's and number,
    first key row of the micro-batch and number."""

    kind: np.ndarray
    query: np.ndarray
    queries: np.ndarray
    key: np.ndarray
    keys: np.ndarray


class Dealt:
    """The segments of a deal, and which rows each place gets from which, with this sliding window (None: without).
    A round brings at most `round_rows` rows, or as many as make ROUNDS rounds, and no more than a place has."""

    def __init__(self, pieces: Pieces, deal: Deal, window: int | None = None, round_rows: int = ROUND_ROWS) -> None:
        self._pieces, self._first, self._window = pieces, pieces.first, window
        self._num_places = deal.num_places
        self.place_rows = int(pieces.lengths.sum()) // deal.num_places
        order = np.argsort(deal.first, kind="stable")
        begins = np.union1d(deal.first, self._first)
        ends = np.append(begins[1:], pieces.lengths.sum())
        place = deal.place[order][np.searchsorted(deal.first[order], begins, side="right") - 1]
        piece = np.searchsorted(self._first, begins, side="right") - 1
        by_place = np.lexsort((begins, place))
        own = np.empty_like(begins)
        sizes = (ends - begins)[by_place]
        own[by_place] = np.cumsum(sizes) - sizes
        own -= place * self.place_rows
        is_whole = np.bincount(piece, minlength=len(self._first))[piece] == 1
        segments = _Segments(piece, place, begins, ends, own)
        self._whole, self._cut = segments.only(is_whole), segments.only(~is_whole)
        self._transfers = self._all_transfers()
        most = int(self.received.sum(1).max(initial=0))
        self._round_rows = max(1, min(self.place_rows, max(round_rows, -(-most // ROUNDS))))
        self._transfers = _in_parts(self._transfers, self._round_rows)

    @property
    def ahead(self) -> int:
        """How many rounds after the one that computes may be on their way, alike for all places: with its rows
        they are at most twice what a place has."""
        return max(1, 2 * self.place_rows // self._round_rows - 1)

    @property
    def received(self) -> np.ndarray:
        """Rows that each place gets from each, int64 `[places, owners]`."""
        found = np.zeros((self._num_places, self._num_places), np.int64)
        np.add.at(found, (self._transfers.place, self._transfers.owner), self._transfers.rows)
        return found

    def rounds(self, place: int) -> tuple[Slices, list[Round]]:
        """A place's slices over its own keys, and its rounds, as many as every other place has."""
        number = self._round_of_transfer()
        count = int(number.max(initial=OWN)) + 1
        keys, receives = self._arriving(place, number, count)
        slices = self._slices(place, keys, count)
        sends = self._sends(place, number, count)
        rounds = [
            Round(each, sum(coming.values()), going, coming)
            for each, going, coming in zip(slices[1:], sends, receives, strict=True)
        ]
        return self._with_whole(place, slices[0]), rounds

    def _with_whole(self, place: int, cut: Slices) -> Slices:
        """A place's slices over its own keys: those of pieces that it has whole before those of others."""
        here = self._whole.only(self._whole.place == place)
        own, lengths, sample = here.own, here.end - here.begin, np.zeros_like(here.own)
        if self._pieces.keys is None:
            whole = Slices(np.full(len(own), CAUSAL), sample, own, lengths, own, lengths)
            if self._window is not None and len(own):
                whole = windowed(whole, self._window)
        else:
            whole = Slices(np.full(len(own), FULL), sample, own, lengths, own, self._pieces.keys[here.piece])
        return Slices(*(np.concatenate(pair) for pair in zip(whole.columns, cut.columns)))

    # -- which rows go where -------------------------------------------------------------------------------------------

    def _all_transfers(self) -> _Transfers:
        place, low, high = self._needed()
        run, segment = _pairs(
            np.searchsorted(self._cut.end, low, side="right"), np.searchsorted(self._cut.begin, high, side="left")
        )
        at = self._cut.only(segment)
        begin, end = np.maximum(at.begin, low[run]), np.minimum(at.end, high[run])
        found = _Transfers(place[run], at.place, begin, end, at.own + begin - at.begin, np.zeros_like(run))
        return found.only(found.place != found.owner)

    def _needed(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The rows of cut pieces that places attend to, as runs: place, first row and the one behind the last."""
        order = np.lexsort((self._cut.begin, self._cut.place))  # so pieces are in their order on each place
        piece, place, begin, end, _ = self._cut.only(order)
        low = self._first[piece]
        if self._window is not None:
            low = np.maximum(low, begin - self._window + 1)
        begins = np.ones(len(piece), bool)  # a run, and no more of the one before
        begins[1:] = (place[1:] != place[:-1]) | (piece[1:] != piece[:-1])
        if self._pieces.keys is not None:
            return place[begins], low[begins], low[begins] + self._pieces.keys[piece[begins]]
        begins[1:] |= low[1:] > end[:-1]
        return place[begins], low[begins], end[np.roll(begins, -1)]

    def _round_of_transfer(self) -> np.ndarray:
        """In which round each transfer comes, int64 `[transfers]`: the parts of all owners so many places before, as
        many in one as bring no place more than a round's rows."""
        place, owner, part, rows = (getattr(self._transfers, name) for name in ("place", "owner", "part", "rows"))
        number_of_parts = int(part.max(initial=0)) + 1
        unit = (place - owner) % self._num_places * number_of_parts + part
        of_unit = np.zeros((self._num_places * number_of_parts, self._num_places), np.int64)
        np.add.at(of_unit, (unit, place), rows)
        found = np.full(len(of_unit), OWN)
        number, filled = OWN, np.zeros(0, np.int64)
        for each in np.flatnonzero(of_unit.any(1)).tolist():
            if number == OWN or (filled + of_unit[each]).max() > self._round_rows:
                number, filled = number + 1, np.zeros(self._num_places, np.int64)
            filled = filled + of_unit[each]
            found[each] = number
        return found[unit]

    def _arriving(self, place: int, number: np.ndarray, count: int) -> tuple[_Keys, list[dict[int, int]]]:
        """The keys of cut pieces that a place has in each round, and by round how many rows come from which owner."""
        here = np.flatnonzero(self._transfers.place == place)
        here = here[np.lexsort((self._transfers.begin[here], self._transfers.owner[here], number[here]))]
        coming, number = self._transfers.only(here), number[here]
        behind = np.cumsum(coming.rows)
        rounds = np.searchsorted(number, number)  # the first of the same round
        buffer = behind - coming.rows - (behind - coming.rows)[rounds]
        receives: list[dict[int, int]] = [{} for _ in range(count)]
        for each, owner, rows in zip(number.tolist(), coming.owner.tolist(), coming.rows.tolist()):
            receives[each][owner] = receives[each].get(owner, 0) + rows
        own = self._cut.only(self._cut.place == place)
        keys = _Keys(
            np.concatenate([np.full(len(own.begin), OWN), number]),
            np.concatenate([own.begin, coming.begin]),
            np.concatenate([own.end, coming.end]),
            np.concatenate([own.own, buffer]),
        )
        order = np.argsort(keys.begin, kind="stable")
        return _Keys(*(column[order] for column in keys)), receives

    def _sends(self, place: int, number: np.ndarray, count: int) -> list[dict[int, np.ndarray]]:
        """By round: own rows of a place that each other one gets, in their order."""
        here = np.flatnonzero(self._transfers.owner == place)
        here = here[np.lexsort((self._transfers.own[here], self._transfers.place[here], number[here]))]
        going, number = self._transfers.only(here), number[here]
        behind = np.cumsum(going.rows)
        rows = np.arange(int(going.rows.sum())) + np.repeat(going.own - behind + going.rows, going.rows)
        last = np.append((number[1:] != number[:-1]) | (going.place[1:] != going.place[:-1]), True)[: len(number)]
        found: list[dict[int, np.ndarray]] = [{} for _ in range(count)]
        begin = 0
        for each, other, end in zip(number[last].tolist(), going.place[last].tolist(), behind[last].tolist()):
            found[each][other] = rows[begin:end]
            begin = end
        return found

    # -- slices of pieces that are cut ---------------------------------------------------------------------------------

    def _slices(self, place: int, keys: _Keys, count: int) -> list[Slices]:
        """What a place computes of cut pieces: with its own keys, then of each round."""
        squares = self._squares(self._cut.only(self._cut.place == place))
        square, run = _pairs(
            np.searchsorted(keys.end, squares.key, side="right"),
            np.searchsorted(keys.begin, squares.key + squares.keys, side="left"),
        )
        kind, query, queries, key, num_keys = (column[square] for column in squares)
        low = np.maximum(keys.begin[run], key)
        rows = np.minimum(keys.end[run], key + num_keys) - low
        number, buffer = keys.number[run], keys.buffer[run] + low - keys.begin[run]
        # The keys of a causal square are rows of the queries' own place.
        assert (rows == num_keys)[kind == CAUSAL].all(), "a causal square has its keys where its queries are"
        parts = np.stack([number, kind, query, queries, buffer, rows])
        # Row i of an anti-causal square attends to keys i to the last: those before `low` attend to all of these.
        is_anti, before = kind == ANTI_CAUSAL, low - key
        above = is_anti & (before > 0)
        full = np.stack([number, np.full_like(kind, FULL), query, before, buffer, rows])[:, above]
        parts[2, is_anti] += before[is_anti]
        parts[3, is_anti] = rows[is_anti]
        return _by_round(np.concatenate([parts, full], axis=1), count)

    def _squares(self, runs: _Segments) -> _Squares:
        """All that the rows of segments attend to."""
        first, rows = self._first[runs.piece], runs.end - runs.begin
        if self._pieces.keys is not None:
            return _Squares(np.full_like(rows, FULL), runs.own, rows, first, self._pieces.keys[runs.piece])
        if self._window is None:
            causal = _Squares(np.full_like(rows, CAUSAL), runs.own, rows, runs.begin, rows)
            full = _Squares(np.full_like(rows, FULL), runs.own, rows, first, runs.begin - first)
            return _joined([causal, full])
        # The piece's rows in blocks of a window, as `windowed` has them: of each block the part that lies in the run.
        window = self._window
        run, number = _pairs((runs.begin - first) // window, -((first - runs.end) // window))
        block = first[run] + number * window
        begin, end = np.maximum(block, runs.begin[run]), np.minimum(block + window, runs.end[run])
        own, rows = runs.own[run] + begin - runs.begin[run], end - begin
        # Row i of a part attends to the rows from `before` + i on; the block's last one to none before the block.
        before = begin - window + 1
        reach = np.where(block > first[run], np.minimum(end, block + window - 1) - begin, 0)
        behind = before + reach
        return _joined(
            [
                _Squares(np.full_like(rows, FULL), own, rows, block, begin - block),
                _Squares(np.full_like(rows, CAUSAL), own, rows, begin, rows),
                _Squares(np.full_like(rows, ANTI_CAUSAL), own, reach, before, reach),
                _Squares(np.full_like(rows, FULL), own, reach, behind, np.where(reach > 0, block - behind, 0)),
            ]
        )


def _pairs(begin: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each i with each number from `begin[i]` to before `end[i]`."""
    count = np.maximum(end - begin, 0)
    left = np.repeat(np.arange(len(count)), count)
    return left, np.arange(len(left)) + np.repeat(begin - np.cumsum(count) + count, count)


def _in_parts(transfers: _Transfers, rows: int) -> _Transfers:
    """Transfers cut so that all from one owner to one place are in parts of so many rows."""
    transfers = transfers.only(np.lexsort((transfers.begin, transfers.owner, transfers.place)))
    place, owner, begin, end, own, _ = transfers
    is_first = np.ones(len(place), bool)
    is_first[1:] = (place[1:] != place[:-1]) | (owner[1:] != owner[:-1])
    before = np.cumsum(end - begin) - (end - begin)
    before = before - before[np.flatnonzero(is_first)[np.cumsum(is_first) - 1]]
    cut, part = _pairs(before // rows, -(-(before + end - begin) // rows))
    skipped = np.maximum(part * rows - before[cut], 0)
    last = np.minimum((part + 1) * rows - before[cut], (end - begin)[cut])
    return _Transfers(place[cut], owner[cut], begin[cut] + skipped, begin[cut] + last, own[cut] + skipped, part)


def _joined(parts: list[_Squares]) -> _Squares:
    """All squares that have a pair."""
    columns = [np.concatenate(column) for column in zip(*parts)]
    has = (columns[2] > 0) & (columns[4] > 0)
    return _Squares(*(column[has] for column in columns))


def _by_round(parts: np.ndarray, count: int) -> list[Slices]:
    """Parts (round, kind, first query row, number, first key row, number, `[6, parts]`) as slices of one sample, by
    round; full ones of the same queries whose keys lie side by side are one."""
    parts = parts[:, np.lexsort((parts[4], parts[3], parts[2], parts[1], parts[0]))]
    number, kind, query, queries, key, keys = parts
    same = (parts[:4, 1:] == parts[:4, :-1]).all(0) & (kind[1:] == FULL) & (key[1:] == (key + keys)[:-1])
    begins = np.flatnonzero(np.append(True, ~same)[: len(key)])
    merged = parts[:, begins]
    if len(begins):
        merged[5] = np.add.reduceat(keys, begins)
    merged = merged[:, np.lexsort((merged[3], merged[1], merged[4], merged[2], merged[0]))]
    ends = np.searchsorted(merged[0], np.arange(OWN, count), side="right").tolist()
    found = []
    for begin, end in zip([0, *ends], ends):
        _, kind, query, queries, key, keys = merged[:, begin:end]
        found.append(Slices(kind, np.zeros_like(kind), query, queries, key, keys))
    return found
