"""Rounds of context parallelism against a mask of every pair of rows: each pair is computed once, by the place that has
the query row, and no row comes that none of the place's attends to."""

from __future__ import annotations

import numpy as np
import pytest

from models.attention.dealing import Deal, deal
from models.attention.rounds import ROUND_ROWS, ROUNDS, Dealt, Pieces, Round
from models.attention.slices import ANTI_CAUSAL, CAUSAL, Slices

pytestmark = pytest.mark.fast

SEEDS = 200


def lengths_of(rng: np.random.Generator, rows: int) -> np.ndarray:
    cuts = rng.choice(np.arange(1, rows), int(rng.integers(0, min(rows, 8))), replace=False)
    return np.diff(np.concatenate([[0], np.sort(cuts), [rows]]))


def deal_of(owner: np.ndarray, num_places: int) -> Deal:
    """Each row on the place that owns it."""
    first = np.concatenate([[0], np.flatnonzero(np.diff(owner)) + 1])
    length = np.diff(np.append(first, len(owner)))
    order = np.lexsort((first, owner[first]))
    return Deal(num_places, owner[first][order], first[order], length[order])


def scattered(rng: np.random.Generator, rows: int, num_places: int) -> Deal:
    """Runs of rows on places at random."""
    runs = np.array_split(np.arange(rows), max(1, rows // int(rng.integers(1, 6))))
    order = np.concatenate([runs[i] for i in rng.permutation(len(runs))])
    owner = np.empty(rows, np.int64)
    owner[order] = np.repeat(np.arange(num_places), rows // num_places)
    return deal_of(owner, num_places)


def mask_of(pieces: Pieces, window: int | None) -> np.ndarray:
    """Which row attends to which, bool `[n, n]`."""
    n = int(pieces.lengths.sum())
    piece, row = np.repeat(np.arange(len(pieces.lengths)), pieces.lengths), np.arange(n)
    same = piece[:, None] == piece
    if pieces.keys is not None:
        return same & (row < (pieces.first + pieces.keys)[piece])
    behind = row[:, None] - row
    return same & (behind >= 0) & (behind < (n if window is None else window))


def count_pairs(counts: np.ndarray, slices: Slices, queries: np.ndarray, keys: np.ndarray) -> None:
    """Add 1 to `counts` `[n, n]` for each pair of slices whose rows are these of the micro-batch."""
    for kind, _, query, num_queries, key, num_keys in zip(*(column.tolist() for column in slices.columns)):
        square = np.ones((num_queries, num_keys), np.int64)
        if kind == CAUSAL:
            square = np.tril(square)
        elif kind == ANTI_CAUSAL:
            square = np.triu(square)
        counts[np.ix_(queries[query : query + num_queries], keys[key : key + num_keys])] += square


def arriving_rows(place: int, number: int, rounds: list[list[Round]], dealt: Deal) -> np.ndarray:
    """Rows of the micro-batch that come in one round, as their owners send them."""
    parts = []
    for owner, count in rounds[place][number].receives.items():
        sent = rounds[owner][number].sends[place]
        assert len(sent) == count
        parts.append(dealt.rows(owner)[sent])
    assert list(rounds[place][number].receives) == sorted(rounds[place][number].receives)
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def check(pieces: Pieces, dealt: Deal, window: int | None, round_rows: int = ROUND_ROWS) -> int:
    mask, found = mask_of(pieces, window), Dealt(pieces, dealt, window, round_rows)
    by_place = [found.rounds(place) for place in range(dealt.num_places)]
    rounds = [each for _, each in by_place]
    assert len({len(each) for each in rounds}) == 1
    counts, received = np.zeros_like(mask, np.int64), found.received
    for place, (own, _) in enumerate(by_place):
        queries = dealt.rows(place)
        for half in own.halves():
            count_pairs(counts, half, queries, queries)
        arrived = [queries]
        for number, each in enumerate(rounds[place]):
            keys = arriving_rows(place, number, rounds, dealt)
            assert (
                len(keys)
                == each.num_keys
                <= min(found.place_rows, max(round_rows, -(-received.sum(1).max() // ROUNDS)))
            )
            count_pairs(counts, each.slices, queries, keys)
            arrived.append(keys)
        others = np.concatenate(arrived[1:]) if arrived[1:] else np.zeros(0, np.int64)
        assert len(np.unique(others)) == len(others) == received[place].sum()
        needed = np.setdiff1d(np.flatnonzero(mask[queries].any(0)), queries)
        np.testing.assert_array_equal(np.sort(others), needed)
    np.testing.assert_array_equal(counts, mask)
    return len(rounds[0])


@pytest.mark.parametrize("masks", ["causal", "windows", "keys"])
@pytest.mark.parametrize("dealing", ["dealt", "scattered"])
def test_every_pair_is_computed_once_and_no_row_comes_in_vain(masks: str, dealing: str) -> None:
    rng = np.random.default_rng(0)
    for _ in range(SEEDS):
        num_places = int(rng.integers(1, 7))
        rows = num_places * int(rng.integers(2, 20))
        lengths = lengths_of(rng, rows)
        keys = rng.integers(1, lengths + 1) if masks == "keys" else None
        window = int(rng.integers(1, 12)) if masks == "windows" else None
        dealt = deal(lengths, num_places, keys=keys) if dealing == "dealt" else scattered(rng, rows, num_places)
        check(Pieces(lengths, keys), dealt, window, int(rng.choice([1, 3, ROUND_ROWS])))


def test_one_giant_document_on_many_places() -> None:
    lengths = np.array([960])
    assert check(Pieces(lengths), deal(lengths, 16), None) == 15  # a place's rows come in each
    check(Pieces(lengths), deal(lengths, 16), 100)
    assert check(Pieces(lengths), deal(lengths, 2), None, 1) == ROUNDS
    assert check(Pieces(lengths), deal(lengths, 2), None) == 1


def test_halves_of_a_place_with_one_document_have_as_many_pairs() -> None:
    own, _ = Dealt(Pieces(np.array([4096])), deal(np.array([4096]), 2)).rounds(0)
    first, second = own.halves()
    assert first.pairs + second.pairs == own.pairs
    assert abs(first.pairs - second.pairs) < own.pairs / 10


def test_documents_that_no_place_shares_need_no_rounds() -> None:
    lengths = np.full(8, 16)
    found = Dealt(Pieces(lengths), deal_of(np.repeat(np.arange(4), 32), 4))
    assert not found.received.any()
    for place in range(4):
        own, rounds = found.rounds(place)
        assert rounds == [] and own.pairs == 2 * 16 * 17 // 2
