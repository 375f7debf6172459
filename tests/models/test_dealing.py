"""Rows that are dealt to the places of context parallelism, against counts row by row, and against bounds."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from benchmarks.dealing import MIXES, bound, pieces, zigzag
from models.attention.dealing import Deal, deal, exchanged_rows, work_of

pytestmark = pytest.mark.fast

CORPUS = np.array([30, 190, 700, 2500, 7400, 19600, 4000, 1200, 60, 11000])  # lengths like the default corpus's


def random_lengths(generator: np.random.Generator, number: int) -> np.ndarray:
    """Pieces that fill so many rows, of one of several kinds."""
    kind, left = generator.integers(5), number
    found: list[int] = []
    while left:
        drawn = (1, number, 7, generator.lognormal(2, 1.5), generator.zipf(1.5))[kind]
        found.append(min(max(1, int(drawn)), left))
        left -= found[-1]
    return np.array(found)


def counted(found: Deal, lengths: np.ndarray, window: int, keys: np.ndarray | None) -> tuple[list[int], list[int]]:
    """Exchanged rows and work of each place, row by row."""
    begins = np.cumsum(lengths) - lengths
    exchanged, work = [], []
    for place in range(found.num_places):
        held = set(found.rows(place).tolist())
        seen: set[int] = set()
        pairs = 0
        for row in held:
            piece = int(np.searchsorted(begins, row, side="right")) - 1
            begin = int(begins[piece])
            end = row + 1 if keys is None else begin + int(keys[piece])
            seen |= set(range(begin, end))
            pairs += min(end - begin, window)
        exchanged.append(len(seen - held))
        work.append(pairs)
    return exchanged, work


@pytest.mark.parametrize("kind", ["causal", "window", "fractions", "keys"])
def test_every_row_has_one_place_and_counts_are_those_of_rows(kind: str) -> None:
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
        found = deal(lengths, number, work=work, keys=keys)
        rows = [found.rows(place) for place in range(number)]
        assert {len(each) for each in rows} == {lengths.sum() // number}
        assert np.array_equal(np.sort(np.concatenate(rows)), np.arange(lengths.sum()))
        assert all((np.diff(each) > 0).all() for each in rows)
        same = found.place[1:] == found.place[:-1]
        apart = found.first[1:] > found.first[:-1] + found.length[:-1]
        assert (np.diff(found.place) >= 0).all() and (apart | ~same).all(), "neighbouring runs are one"
        exchanged, pairs = counted(found, lengths, window, keys)
        assert exchanged_rows(found, lengths, keys).tolist() == exchanged
        scale = 0.25 if kind == "fractions" else 1
        assert work_of(found, lengths, work, keys).tolist() == [scale * each for each in pairs]


@pytest.mark.parametrize("mix", MIXES)
def test_work_is_level_and_few_rows_are_exchanged(mix: str) -> None:
    """Where every piece fits on a place, the bound is 0 and maybe out of reach: a quarter of zig-zag's then."""
    for samples, number in itertools.product((1, 4), (2, 4, 8, 64)):
        lengths = pieces(mix, 32768, samples, 0, CORPUS)
        found = deal(lengths, number)
        work, exchanged = work_of(found, lengths), int(exchanged_rows(found, lengths).sum())
        assert work.max() * number <= 1.02 * work.sum()
        assert exchanged <= max(1.1 * bound(lengths, number), 0.25 * zigzag(lengths, number))
        if mix in ("one giant", "all equal"):
            assert exchanged <= bound(lengths, number)


@pytest.mark.parametrize("window", [64, 2048])
def test_windows_are_level(window: int) -> None:
    lengths = pieces("Zipf", 32768, 1, 1, CORPUS)
    work = np.concatenate([[0], np.cumsum(np.minimum(np.arange(lengths.max()) + 1, window))])
    for number in (2, 8, 64):
        found = deal(lengths, number, work=work)
        of_places = work_of(found, lengths, work)
        assert of_places.max() * number <= 1.02 * of_places.sum()


def test_key_rows_are_level() -> None:
    lengths, keys = np.full(16, 512), np.tile([512, 384, 256, 128], 4)
    found = deal(lengths, 4, keys=keys)
    assert work_of(found, lengths, keys=keys).tolist() == [4 * 512 * 320] * 4
    assert not exchanged_rows(found, lengths, keys).any()
    found = deal(lengths[:1], 4, keys=keys[:1])
    assert exchanged_rows(found, lengths[:1], keys[:1]).sum() == 3 * 512


def test_nothing_is_cut_where_whole_pieces_fit_on_two_places() -> None:
    """Against every choice of pieces."""
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
        exchanged = exchanged_rows(deal(lengths, 2), lengths).sum()
        if possible:
            whole += 1
            assert exchanged == 0, lengths
    assert whole > 10


def test_one_giant_is_not_above_zigzag() -> None:
    for number in (2, 4, 8, 64):
        lengths = np.array([2 * number * 64])
        assert exchanged_rows(deal(lengths, number), lengths).sum() <= zigzag(lengths, number)


def test_the_same_is_dealt_again_whatever_the_numbers_are_kept_in() -> None:
    lengths = pieces("code", 16384, 2, 3, CORPUS)
    first = deal(lengths, 8)
    for again in (deal(lengths, 8), deal(lengths.astype(np.int32), 8)):
        for name in ("place", "first", "length"):
            assert np.array_equal(getattr(first, name), getattr(again, name))


def test_wrong_values() -> None:
    for lengths, number, keys in (([3], 2, None), ([2, 0], 1, None), ([2], 0, None), ([2], 2, [3]), ([2], 2, [0])):
        with pytest.raises(ValueError):
            deal(np.array(lengths), number, keys=None if keys is None else np.array(keys))
    with pytest.raises(ValueError, match="longest"):
        deal(np.array([4]), 2, work=np.arange(4))
