"""Exchange schedule of context parallelism: the attention slices that a rank computes with its own keys, and the rounds
in which it receives other ranks' keys.

A slice is a run of query rows with a run of key rows (mask_slices.py). A rank holds the rows of a micro-batch that
sequence_sharding.py assigns to it, and receives only the key rows that some of its queries attend to. In each round it
receives from the ranks at certain distances before it, so that it sends to and receives from equal numbers of ranks.
Rounds are short, so that the rows of the next round arrive while the current one computes. Every rank computes the same
schedule on the host with numpy, from the starts of documents. A row index counts either the rows of the micro-batch or
the rows that one rank holds, in ascending order. A cp_rank may be a group of ranks that exchange heads (see
sequence_sharding.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np

from models.attention.mask_slices import ANTI_CAUSAL, CAUSAL, FULL, Slices, windowed
from models.attention.sequence_sharding import SequenceSharding

OWN = -1  # the round in which a rank computes with its own keys
# A round has ROUND_ROWS rows, or 1 / ROUNDS of all rows if that is more. Rounds are short because the rows of the first
# round arrive while a rank can compute only with its own keys, and the gradients of the last round return when no
# computation is left.
ROUNDS, ROUND_ROWS = 8, 1024


@dataclass(frozen=True, eq=False)
class Segments:
    """Consecutive segments of packed documents. `lengths`: rows per segment, int64 `[segments]`. `keys`: all rows of
    segment i attend to its first `keys[i]` rows, int64 `[segments]`; None for causal attention."""

    lengths: np.ndarray
    keys: np.ndarray | None = None

    @property
    def first(self) -> np.ndarray:
        """Index of each segment's first row in the micro-batch, int64 `[segments]`."""
        return np.cumsum(self.lengths) - self.lengths


@dataclass(frozen=True, eq=False)
class ExchangeRound:
    """One round of the key exchange on one rank: the key rows that it sends and receives, and its attention over the
    received rows.

    `slices`: attention slices of this rank's query rows over the `num_keys` received key rows, which are sorted by
    sending rank. `sends`: indices of this rank's rows to send, by receiving rank. `receives`: number of rows to
    receive, by sending rank.
    """

    slices: Slices
    num_keys: int
    sends: dict[int, np.ndarray]
    receives: dict[int, int]


class _Spans(NamedTuple):
    """Table of row spans, int64 `[spans]` per column, sorted by row. A span is rows [begin, end) of the micro-batch,
    belongs to one segment, and is held by one rank. `own`: index of row `begin` among the rows that the rank holds."""

    segment: np.ndarray
    cp_rank: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    own: np.ndarray


class _Transfers(NamedTuple):
    """Table of key-row transfers, int64 `[transfers]` per column: `cp_rank` receives rows [begin, end) of the
    micro-batch from `owner`.

    `own`: index of row `begin` among the owner's rows. `chunk`: the rows from one owner to one rank are divided into
    chunks of at most a round's rows, and this is the number of the chunk.
    """

    cp_rank: np.ndarray
    owner: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    own: np.ndarray
    chunk: np.ndarray

    @property
    def num_rows(self) -> np.ndarray:
        """Number of rows in each transfer, int64 `[transfers]`."""
        return self.end - self.begin


class _Keys(NamedTuple):
    """Table of a rank's key rows by round, int64 `[runs]` per column, sorted by row. The rank has rows [begin, end) of
    the micro-batch in round `number`. `buffer`: index of row `begin` among the rank's own rows or in the round's
    receive buffer."""

    number: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    buffer: np.ndarray


class _Squares(NamedTuple):
    """Table of rectangles of the attention mask, int64 `[rectangles]` per column. `kind`: full, causal or anti-causal.
    `query`, `queries`: first query row (an index of the rank's rows) and number of query rows. `key`, `keys`: first key
    row (an index of the micro-batch) and number of key rows."""

    kind: np.ndarray
    query: np.ndarray
    queries: np.ndarray
    key: np.ndarray
    keys: np.ndarray


Table = TypeVar("Table", _Spans, _Transfers, _Keys, _Squares)


class ExchangeSchedule:
    """Schedule of the key rows that every rank receives from every other rank, in rounds. Attention may have a sliding
    window.

    In a round, a rank receives at most `round_rows` rows, or 1 / ROUNDS of all rows that the busiest rank receives if
    that is more. It never receives more rows than it holds.
    """

    def __init__(
        self, segments: Segments, sharding: SequenceSharding, window: int | None = None, round_rows: int = ROUND_ROWS
    ) -> None:
        self._segments, self._first, self._window = segments, segments.first, window
        self._cp_size = sharding.cp_size
        self.rows_per_rank = int(segments.lengths.sum()) // sharding.cp_size
        order = np.argsort(sharding.first, kind="stable")
        begins = np.union1d(sharding.first, self._first)
        ends = np.append(begins[1:], segments.lengths.sum())
        cp_rank = sharding.cp_rank[order][np.searchsorted(sharding.first[order], begins, side="right") - 1]
        segment = np.searchsorted(self._first, begins, side="right") - 1
        by_rank = np.lexsort((begins, cp_rank))
        own = np.empty_like(begins)
        sizes = (ends - begins)[by_rank]
        own[by_rank] = np.cumsum(sizes) - sizes
        own -= cp_rank * self.rows_per_rank
        is_whole = np.bincount(segment, minlength=len(self._first))[segment] == 1
        spans = _Spans(segment, cp_rank, begins, ends, own)
        self._whole, self._cut = _only(spans, is_whole), _only(spans, ~is_whole)
        receiver, low, high = self._needed()
        run, span = _pairs(
            np.searchsorted(self._cut.end, low, side="right"), np.searchsorted(self._cut.begin, high, side="left")
        )
        at = _only(self._cut, span)
        begin, end = np.maximum(at.begin, low[run]), np.minimum(at.end, high[run])
        found = _Transfers(receiver[run], at.cp_rank, begin, end, at.own + begin - at.begin, np.zeros_like(run))
        self._transfers = _only(found, found.cp_rank != found.owner)
        most = int(self.received.sum(1).max(initial=0))
        self._round_rows = max(1, min(self.rows_per_rank, max(round_rows, -(-most // ROUNDS))))
        self._transfers = _in_chunks(self._transfers, self._round_rows)

    @property
    def ahead(self) -> int:
        """Number of later rounds whose rows may be in flight during a round, the same on all ranks. Together with the
        current round's rows, these are at most twice a rank's rows."""
        return max(1, 2 * self.rows_per_rank // self._round_rows - 1)

    @property
    def received(self) -> np.ndarray:
        """Number of rows that each rank receives from each owner, int64 `[ranks, owners]`."""
        found = np.zeros((self._cp_size, self._cp_size), np.int64)
        np.add.at(found, (self._transfers.cp_rank, self._transfers.owner), self._transfers.num_rows)
        return found

    def rounds(self, cp_rank: int) -> tuple[Slices, list[ExchangeRound]]:
        """Return a rank's attention slices over its own keys, and its exchange rounds. All ranks have the same number
        of rounds."""
        number = self._round_of_transfer()
        count = int(number.max(initial=OWN)) + 1
        keys, receives = self._arriving(cp_rank, number, count)
        slices = self._slices(cp_rank, keys, count)
        sends = self._sends(cp_rank, number, count)
        rounds = [
            ExchangeRound(each, sum(coming.values()), going, coming)
            for each, going, coming in zip(slices[1:], sends, receives, strict=True)
        ]
        # Over its own keys: the slices of segments that the rank holds whole, then those of cut segments.
        here = _only(self._whole, self._whole.cp_rank == cp_rank)
        own, lengths, sample = here.own, here.end - here.begin, np.zeros_like(here.own)
        keys_of = self._segments.keys
        kind, num_keys = (CAUSAL, lengths) if keys_of is None else (FULL, keys_of[here.segment])
        whole = Slices(np.full(len(own), kind), sample, own, lengths, own, num_keys)
        if self._window is not None and keys_of is None and len(own):
            whole = windowed(whole, self._window)
        return Slices(*(np.concatenate(pair) for pair in zip(whole.columns, slices[0].columns))), rounds

    # -- transfers -----------------------------------------------------------------------------------------------------

    def _needed(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the runs of key rows that each rank attends to in segments held by several ranks: rank, first row and
        end of each run, int64 `[runs]` each."""
        order = np.lexsort((self._cut.begin, self._cut.cp_rank))  # so that the segments of each rank are in order
        segment, cp_rank, begin, end, _ = _only(self._cut, order)
        low = self._first[segment]
        if self._window is not None:
            low = np.maximum(low, begin - self._window + 1)
        begins = np.ones(len(segment), bool)  # starts a new run instead of extending the previous one
        begins[1:] = (cp_rank[1:] != cp_rank[:-1]) | (segment[1:] != segment[:-1])
        if self._segments.keys is not None:
            return cp_rank[begins], low[begins], low[begins] + self._segments.keys[segment[begins]]
        begins[1:] |= low[1:] > end[:-1]
        return cp_rank[begins], low[begins], end[np.roll(begins, -1)]

    def _round_of_transfer(self) -> np.ndarray:
        """Return the round number of each transfer, int64 `[transfers]`.

        Transfers with the same chunk number and the same distance between owner and receiver share a round. Further
        transfers join the round while no rank receives more than a round's rows.
        """
        found = self._transfers
        cp_rank, owner, chunk, num_rows = found.cp_rank, found.owner, found.chunk, found.num_rows
        number_of_chunks = int(chunk.max(initial=0)) + 1
        unit = (cp_rank - owner) % self._cp_size * number_of_chunks + chunk
        of_unit = np.zeros((self._cp_size * number_of_chunks, self._cp_size), np.int64)
        np.add.at(of_unit, (unit, cp_rank), num_rows)
        round_of_unit = np.full(len(of_unit), OWN)
        number, filled = OWN, np.zeros(0, np.int64)
        for each in np.flatnonzero(of_unit.any(1)).tolist():
            if number == OWN or (filled + of_unit[each]).max() > self._round_rows:
                number, filled = number + 1, np.zeros(self._cp_size, np.int64)
            filled = filled + of_unit[each]
            round_of_unit[each] = number
        return round_of_unit[unit]

    def _arriving(self, cp_rank: int, number: np.ndarray, count: int) -> tuple[_Keys, list[dict[int, int]]]:
        """Return a table of the key rows that a rank has or receives in segments held by several ranks, and for each of
        `count` rounds a dict from owner to number of received rows. `number`: the round of each transfer."""
        here = np.flatnonzero(self._transfers.cp_rank == cp_rank)
        here = here[np.lexsort((self._transfers.begin[here], self._transfers.owner[here], number[here]))]
        coming, number = _only(self._transfers, here), number[here]
        behind = np.cumsum(coming.num_rows)
        rounds = np.searchsorted(number, number)  # the first transfer of the same round
        buffer = behind - coming.num_rows - (behind - coming.num_rows)[rounds]
        receives: list[dict[int, int]] = [{} for _ in range(count)]
        for each, owner, num_rows in zip(number.tolist(), coming.owner.tolist(), coming.num_rows.tolist()):
            receives[each][owner] = receives[each].get(owner, 0) + num_rows
        own = _only(self._cut, self._cut.cp_rank == cp_rank)
        held = np.full(len(own.begin), OWN), own.begin, own.end, own.own
        received = number, coming.begin, coming.end, buffer
        keys = _Keys(*(np.concatenate(pair) for pair in zip(held, received)))
        order = np.argsort(keys.begin, kind="stable")
        return _only(keys, order), receives

    def _sends(self, cp_rank: int, number: np.ndarray, count: int) -> list[dict[int, np.ndarray]]:
        """Return the indices of the rows that a rank sends, as one dict per round from receiving rank to indices.
        `number`: the round of each transfer."""
        here = np.flatnonzero(self._transfers.owner == cp_rank)
        here = here[np.lexsort((self._transfers.own[here], self._transfers.cp_rank[here], number[here]))]
        going, number = _only(self._transfers, here), number[here]
        behind = np.cumsum(going.num_rows)
        own_rows = np.arange(int(going.num_rows.sum())) + np.repeat(going.own - behind + going.num_rows, going.num_rows)
        last = np.append((number[1:] != number[:-1]) | (going.cp_rank[1:] != going.cp_rank[:-1]), True)[: len(number)]
        found: list[dict[int, np.ndarray]] = [{} for _ in range(count)]
        begin = 0
        for each, other, end in zip(number[last].tolist(), going.cp_rank[last].tolist(), behind[last].tolist()):
            found[each][other] = own_rows[begin:end]
            begin = end
        return found

    # -- slices of segments that are cut -------------------------------------------------------------------------------

    def _slices(self, cp_rank: int, keys: _Keys, count: int) -> list[Slices]:
        """Return a rank's attention slices in segments held by several ranks: first those over its own keys, then those
        over the keys of each round."""
        found = self._squares(_only(self._cut, self._cut.cp_rank == cp_rank))
        squares = _Squares(*(np.concatenate(column) for column in zip(*found)))
        squares = _only(squares, (squares.queries > 0) & (squares.keys > 0))
        square, run = _pairs(
            np.searchsorted(keys.end, squares.key, side="right"),
            np.searchsorted(keys.begin, squares.key + squares.keys, side="left"),
        )
        kind, query, queries, key, num_keys = (column[square] for column in squares)
        low = np.maximum(keys.begin[run], key)
        num_rows = np.minimum(keys.end[run], key + num_keys) - low
        number, buffer = keys.number[run], keys.buffer[run] + low - keys.begin[run]
        # A rank holds the keys of the causal squares of its query rows.
        assert (num_rows == num_keys)[kind == CAUSAL].all(), "a rank has the keys of the causal squares of its queries"
        blocks = np.stack([number, kind, query, queries, buffer, num_rows])
        # Row i of an anti-causal square attends to keys i to the last: rows before `low` attend to all keys here.
        is_anti, before = kind == ANTI_CAUSAL, low - key
        above = is_anti & (before > 0)
        full = np.stack([number, np.full_like(kind, FULL), query, before, buffer, num_rows])[:, above]
        blocks[2, is_anti] += before[is_anti]
        blocks[3, is_anti] = num_rows[is_anti]
        return _by_round(np.concatenate([blocks, full], axis=1), count)

    def _squares(self, runs: _Spans) -> list[_Squares]:
        """Return the rectangles of the attention mask (full, causal, anti-causal) for the query rows in `runs`. Some
        may be empty."""
        first, num_rows = self._first[runs.segment], runs.end - runs.begin
        if self._segments.keys is not None:
            num_keys = self._segments.keys[runs.segment]
            return [_Squares(np.full_like(num_rows, FULL), runs.own, num_rows, first, num_keys)]
        if self._window is None:
            causal = _Squares(np.full_like(num_rows, CAUSAL), runs.own, num_rows, runs.begin, num_rows)
            full = _Squares(np.full_like(num_rows, FULL), runs.own, num_rows, first, runs.begin - first)
            return [causal, full]
        # Blocks of `window` rows of each segment, as in `windowed`, restricted to the rows inside the span.
        window = self._window
        run, number = _pairs((runs.begin - first) // window, -((first - runs.end) // window))
        block = first[run] + number * window
        begin, end = np.maximum(block, runs.begin[run]), np.minimum(block + window, runs.end[run])
        own, num_rows = runs.own[run] + begin - runs.begin[run], end - begin
        # Row i attends to row `before` + i and later rows. The block's last row attends to no row before the block.
        before = begin - window + 1
        reach = np.where(block > first[run], np.minimum(end, block + window - 1) - begin, 0)
        behind = before + reach
        return [
            _Squares(np.full_like(num_rows, FULL), own, num_rows, block, begin - block),
            _Squares(np.full_like(num_rows, CAUSAL), own, num_rows, begin, num_rows),
            _Squares(np.full_like(num_rows, ANTI_CAUSAL), own, reach, before, reach),
            _Squares(np.full_like(num_rows, FULL), own, reach, behind, np.where(reach > 0, block - behind, 0)),
        ]


def _only(table: Table, chosen: np.ndarray) -> Table:
    """Select entries of a table, a tuple of arrays of equal length, by a boolean mask or by indices."""
    return type(table)(*(column[chosen] for column in table))


def _pairs(begin: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return all pairs (i, k) with `begin[i] <= k < end[i]`, sorted, as an int64 array of i and one of k."""
    count = np.maximum(end - begin, 0)
    left = np.repeat(np.arange(len(count)), count)
    return left, np.arange(len(left)) + np.repeat(begin - np.cumsum(count) + count, count)


def _in_chunks(transfers: _Transfers, chunk_rows: int) -> _Transfers:
    """Cut transfers into numbered chunks of `chunk_rows` rows, counted over all rows from one owner to one rank."""
    transfers = _only(transfers, np.lexsort((transfers.begin, transfers.owner, transfers.cp_rank)))
    cp_rank, owner, begin, end, own, _ = transfers
    is_first = np.ones(len(cp_rank), bool)
    is_first[1:] = (cp_rank[1:] != cp_rank[:-1]) | (owner[1:] != owner[:-1])
    before = np.cumsum(end - begin) - (end - begin)
    before = before - before[np.flatnonzero(is_first)[np.cumsum(is_first) - 1]]
    cut, chunk = _pairs(before // chunk_rows, -(-(before + end - begin) // chunk_rows))
    skipped = np.maximum(chunk * chunk_rows - before[cut], 0)
    last = np.minimum((chunk + 1) * chunk_rows - before[cut], (end - begin)[cut])
    return _Transfers(cp_rank[cut], owner[cut], begin[cut] + skipped, begin[cut] + last, own[cut] + skipped, chunk)


def _by_round(blocks: np.ndarray, count: int) -> list[Slices]:
    """Group rectangles of the attention mask: one Slices for the rank's own keys, then one for each of `count` rounds.
    `blocks`: int64 `[6, rectangles]`: round, kind, first query row, number of query rows, first key row, number of key
    rows. Full rectangles of the same queries with adjacent keys are merged."""
    blocks = blocks[:, np.lexsort((blocks[4], blocks[3], blocks[2], blocks[1], blocks[0]))]
    number, kind, query, queries, key, keys = blocks
    same = (blocks[:4, 1:] == blocks[:4, :-1]).all(0) & (kind[1:] == FULL) & (key[1:] == (key + keys)[:-1])
    begins = np.flatnonzero(np.append(True, ~same)[: len(key)])
    merged = blocks[:, begins]
    if len(begins):
        merged[5] = np.add.reduceat(keys, begins)
    merged = merged[:, np.lexsort((merged[3], merged[1], merged[4], merged[2], merged[0]))]
    ends = np.searchsorted(merged[0], np.arange(OWN, count), side="right").tolist()
    rounds = (merged[1:, begin:end] for begin, end in zip([0, *ends], ends))
    return [Slices(kind, np.zeros_like(kind), *columns) for kind, *columns in rounds]
