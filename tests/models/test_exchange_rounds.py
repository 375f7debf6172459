"""Rounds of context parallelism against a mask of every pair of rows: each pair is computed once, by the rank that has
the query row, and no row arrives to which none of the rank's rows attends."""

from __future__ import annotations

import numpy as np
import pytest

from models.attention.exchange_rounds import ROUND_ROWS, ROUNDS, ExchangeRound, ExchangeSchedule, Segments
from models.attention.mask_slices import ANTI_CAUSAL, CAUSAL, Slices
from models.attention.sequence_sharding import SequenceSharding, shard_sequence

pytestmark = pytest.mark.fast

SEEDS = 200


def lengths_of(rng: np.random.Generator, num_rows: int) -> np.ndarray:
    cuts = rng.choice(np.arange(1, num_rows), int(rng.integers(0, min(num_rows, 8))), replace=False)
    return np.diff(np.concatenate([[0], np.sort(cuts), [num_rows]]))


def sharding_of(owner: np.ndarray, cp_size: int) -> SequenceSharding:
    """Return the sharding in which each row is on the rank that owns it."""
    first = np.concatenate([[0], np.flatnonzero(np.diff(owner)) + 1])
    length = np.diff(np.append(first, len(owner)))
    order = np.lexsort((first, owner[first]))
    return SequenceSharding(cp_size, owner[first][order], first[order], length[order])


def scattered(rng: np.random.Generator, num_rows: int, cp_size: int) -> SequenceSharding:
    """Return runs of rows on ranks at random."""
    runs = np.array_split(np.arange(num_rows), max(1, num_rows // int(rng.integers(1, 6))))
    order = np.concatenate([runs[i] for i in rng.permutation(len(runs))])
    owner = np.empty(num_rows, np.int64)
    owner[order] = np.repeat(np.arange(cp_size), num_rows // cp_size)
    return sharding_of(owner, cp_size)


def mask_of(segments: Segments, window: int | None) -> np.ndarray:
    """Return which row attends to which, bool `[n, n]`."""
    n = int(segments.lengths.sum())
    segment, row = np.repeat(np.arange(len(segments.lengths)), segments.lengths), np.arange(n)
    same = segment[:, None] == segment
    if segments.keys is not None:
        return same & (row < (segments.first + segments.keys)[segment])
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


def arriving_rows(
    cp_rank: int, number: int, rounds: list[list[ExchangeRound]], sharding: SequenceSharding
) -> np.ndarray:
    """Return the rows of the micro-batch that arrive in one round, as their owners send them."""
    arrived = []
    for owner, count in rounds[cp_rank][number].receives.items():
        sent = rounds[owner][number].sends[cp_rank]
        assert len(sent) == count
        arrived.append(sharding.sequence_rows(owner)[sent])
    assert list(rounds[cp_rank][number].receives) == sorted(rounds[cp_rank][number].receives)
    return np.concatenate(arrived) if arrived else np.zeros(0, np.int64)


def check(segments: Segments, sharding: SequenceSharding, window: int | None, round_rows: int = ROUND_ROWS) -> int:
    mask, found = mask_of(segments, window), ExchangeSchedule(segments, sharding, window, round_rows)
    by_rank = [found.rounds(cp_rank) for cp_rank in range(sharding.cp_size)]
    rounds = [each for _, each in by_rank]
    assert len({len(each) for each in rounds}) == 1
    counts, received = np.zeros_like(mask, np.int64), found.received
    for cp_rank, (own, _) in enumerate(by_rank):
        queries = sharding.sequence_rows(cp_rank)
        for half in own.halves():
            count_pairs(counts, half, queries, queries)
        arrived = [queries]
        for number, each in enumerate(rounds[cp_rank]):
            keys = arriving_rows(cp_rank, number, rounds, sharding)
            assert (
                len(keys)
                == each.num_keys
                <= min(found.rows_per_rank, max(round_rows, -(-received.sum(1).max() // ROUNDS)))
            )
            count_pairs(counts, each.slices, queries, keys)
            arrived.append(keys)
        others = np.concatenate(arrived[1:]) if arrived[1:] else np.zeros(0, np.int64)
        assert len(np.unique(others)) == len(others) == received[cp_rank].sum()
        needed = np.setdiff1d(np.flatnonzero(mask[queries].any(0)), queries)
        np.testing.assert_array_equal(np.sort(others), needed)
    np.testing.assert_array_equal(counts, mask)
    return len(rounds[0])


@pytest.mark.parametrize("masks", ["causal", "windows", "keys"])
@pytest.mark.parametrize("kind", ["balanced", "scattered"])
def test_every_pair_is_computed_once_and_no_row_comes_in_vain(masks: str, kind: str) -> None:
    rng = np.random.default_rng(0)
    for _ in range(SEEDS):
        cp_size = int(rng.integers(1, 7))
        num_rows = cp_size * int(rng.integers(2, 20))
        lengths = lengths_of(rng, num_rows)
        keys = rng.integers(1, lengths + 1) if masks == "keys" else None
        window = int(rng.integers(1, 12)) if masks == "windows" else None
        sharding = (
            shard_sequence(lengths, cp_size, keys=keys) if kind == "balanced" else scattered(rng, num_rows, cp_size)
        )
        check(Segments(lengths, keys), sharding, window, int(rng.choice([1, 3, ROUND_ROWS])))


def test_one_giant_document_on_many_ranks() -> None:
    lengths = np.array([960])
    assert check(Segments(lengths), shard_sequence(lengths, 16), None) == 15  # a rank's rows arrive in each
    check(Segments(lengths), shard_sequence(lengths, 16), 100)
    assert check(Segments(lengths), shard_sequence(lengths, 2), None, 1) == ROUNDS
    assert check(Segments(lengths), shard_sequence(lengths, 2), None) == 1


def test_halves_of_a_rank_with_one_document_have_as_many_pairs() -> None:
    own, _ = ExchangeSchedule(Segments(np.array([4096])), shard_sequence(np.array([4096]), 2)).rounds(0)
    first, second = own.halves()
    assert first.pairs + second.pairs == own.pairs
    assert abs(first.pairs - second.pairs) < own.pairs / 10


def test_documents_that_no_rank_shares_need_no_rounds() -> None:
    lengths = np.full(8, 16)
    found = ExchangeSchedule(Segments(lengths), sharding_of(np.repeat(np.arange(4), 32), 4))
    assert not found.received.any()
    for cp_rank in range(4):
        own, rounds = found.rounds(cp_rank)
        assert rounds == [] and own.pairs == 2 * 16 * 17 // 2
