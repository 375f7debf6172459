"""Sequence sharding against counts row by row, and against bounds."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from benchmarks.speed.sequence_sharding import MIXES, bound, segment_lengths, work_per_rank, zigzag
from models.attention.sequence_sharding import SequenceSharding, exchanged_rows, shard_sequence

pytestmark = pytest.mark.fast

CORPUS = np.array([30, 190, 700, 2500, 7400, 19600, 4000, 1200, 60, 11000])  # lengths like the default corpus's


def random_lengths(generator: np.random.Generator, number: int) -> np.ndarray:
    """Return segments that fill `number` rows, of one of several kinds."""
    kind, left = generator.integers(5), number
    found: list[int] = []
    while left:
        drawn = (1, number, 7, generator.lognormal(2, 1.5), generator.zipf(1.5))[kind]
        found.append(min(max(1, int(drawn)), left))
        left -= found[-1]
    return np.array(found)


def counted(
    found: SequenceSharding, lengths: np.ndarray, window: int, keys: np.ndarray | None
) -> tuple[list[int], list[int]]:
    """Return exchanged rows and work of each rank, counted row by row."""
    begins = np.cumsum(lengths) - lengths
    exchanged, work = [], []
    for cp_rank in range(found.cp_size):
        held = set(found.sequence_rows(cp_rank).tolist())
        seen: set[int] = set()
        pairs = 0
        for row in held:
            segment = int(np.searchsorted(begins, row, side="right")) - 1
            begin = int(begins[segment])
            end = row + 1 if keys is None else begin + int(keys[segment])
            seen |= set(range(begin, end))
            pairs += min(end - begin, window)
        exchanged.append(len(seen - held))
        work.append(pairs)
    return exchanged, work


@pytest.mark.parametrize("kind", ["causal", "window", "fractions", "keys"])
def test_every_row_has_one_rank_and_counts_are_those_of_rows(kind: str) -> None:
    generator = np.random.default_rng(0)
    for _ in range(60):
        number = int(generator.choice([1, 2, 3, 4, 8]))
        lengths = random_lengths(generator, number * int(generator.integers(1, 60)))
        window, keys, work = int(lengths.max()), None, None
        if kind == "keys":
            keys = generator.integers(1, lengths + 1)
        elif kind != "causal":
            window = int(generator.integers(1, lengths.max() + 1))
            work = np.concatenate([[0], np.cumsum(np.minimum(np.arange(lengths.max()) + 1, window))])
        work = work * 0.25 if work is not None and kind == "fractions" else work
        found = shard_sequence(lengths, number, work=work, keys=keys)
        held_rows = [found.sequence_rows(cp_rank) for cp_rank in range(number)]
        assert {len(each) for each in held_rows} == {lengths.sum() // number}
        assert np.array_equal(np.sort(np.concatenate(held_rows)), np.arange(lengths.sum()))
        assert all((np.diff(each) > 0).all() for each in held_rows)
        same = found.cp_rank[1:] == found.cp_rank[:-1]
        distant = found.first[1:] > found.first[:-1] + found.length[:-1]
        assert (np.diff(found.cp_rank) >= 0).all() and (distant | ~same).all(), "adjacent runs are merged"
        exchanged, pairs = counted(found, lengths, window, keys)
        assert exchanged_rows(found, lengths, keys).tolist() == exchanged
        scale = 0.25 if kind == "fractions" else 1
        assert work_per_rank(found, lengths, work, keys).tolist() == [scale * each for each in pairs]


@pytest.mark.parametrize("mix", MIXES)
def test_work_is_level_and_few_rows_are_exchanged(mix: str) -> None:
    """If every segment fits on a rank, the bound is 0 and may be out of reach: then a quarter of zig-zag's is
    allowed."""
    for samples, number in itertools.product((1, 4), (2, 4, 8, 64)):
        lengths = segment_lengths(mix, 32768, samples, 0, CORPUS)
        found = shard_sequence(lengths, number)
        work, exchanged = work_per_rank(found, lengths), int(exchanged_rows(found, lengths).sum())
        assert work.max() * number <= 1.02 * work.sum()
        assert exchanged <= max(1.1 * bound(lengths, number), 0.25 * zigzag(lengths, number))
        if mix in ("one giant", "all equal"):
            assert exchanged <= bound(lengths, number)


@pytest.mark.parametrize("window", [64, 2048])
def test_windows_are_level(window: int) -> None:
    lengths = segment_lengths("Zipf", 32768, 1, 1, CORPUS)
    work = np.concatenate([[0], np.cumsum(np.minimum(np.arange(lengths.max()) + 1, window))])
    for number in (2, 8, 64):
        found = shard_sequence(lengths, number, work=work)
        of_ranks = work_per_rank(found, lengths, work)
        assert of_ranks.max() * number <= 1.02 * of_ranks.sum()


def test_key_rows_are_level() -> None:
    lengths, keys = np.full(16, 512), np.tile([512, 384, 256, 128], 4)
    found = shard_sequence(lengths, 4, keys=keys)
    assert work_per_rank(found, lengths, keys=keys).tolist() == [4 * 512 * 320] * 4
    assert not exchanged_rows(found, lengths, keys).any()
    found = shard_sequence(lengths[:1], 4, keys=keys[:1])
    assert exchanged_rows(found, lengths[:1], keys[:1]).sum() == 3 * 512


def test_nothing_is_cut_where_whole_segments_fit_on_two_ranks() -> None:
    """Against every choice of segments."""
    generator = np.random.default_rng(2)
    whole = 0
    for _ in range(150):
        lengths = generator.integers(1, 40, int(generator.integers(6, 13)))
        lengths[-1] += lengths.sum() % 2
        work = lengths * (lengths + 1) // 2
        choices = (np.arange(2 ** len(lengths))[:, None] >> np.arange(len(lengths)) & 1).astype(bool)
        of_one = choices @ work
        level = np.maximum(of_one, work.sum() - of_one) * 2 <= 1.02 * work.sum()
        possible = bool((level & (choices @ lengths * 2 == lengths.sum())).any())
        exchanged = exchanged_rows(shard_sequence(lengths, 2), lengths).sum()
        if possible:
            whole += 1
            assert exchanged == 0, lengths
    assert whole > 10


def test_one_giant_is_not_above_zigzag() -> None:
    for number in (2, 4, 8, 64):
        lengths = np.array([2 * number * 64])
        assert exchanged_rows(shard_sequence(lengths, number), lengths).sum() <= zigzag(lengths, number)


def test_the_same_sharding_is_made_again_whatever_the_type_of_the_numbers() -> None:
    lengths = segment_lengths("code", 16384, 2, 3, CORPUS)
    first = shard_sequence(lengths, 8)
    for again in (shard_sequence(lengths, 8), shard_sequence(lengths.astype(np.int32), 8)):
        for name in ("cp_rank", "first", "length"):
            assert np.array_equal(getattr(first, name), getattr(again, name))


def test_wrong_values() -> None:
    for lengths, number, keys in (([3], 2, None), ([2, 0], 1, None), ([2], 0, None), ([2], 2, [3]), ([2], 2, [0])):
        with pytest.raises(ValueError):
            shard_sequence(np.array(lengths), number, keys=None if keys is None else np.array(keys))
    with pytest.raises(ValueError, match="longest"):
        shard_sequence(np.array([4]), 2, work=np.arange(4))
