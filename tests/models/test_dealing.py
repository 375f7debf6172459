"""Rows that are dealt to the places of context parallelism, against counts row by row."""

from __future__ import annotations

import numpy as np
import pytest

from models.attention.dealing import Deal, deal, exchanged_rows, work_of

pytestmark = pytest.mark.fast


def random_lengths(generator: np.random.Generator, number: int) -> np.ndarray:
    """Pieces that fill so many rows, of one of several kinds."""
    kind, found, left = generator.integers(5), [], number
    while left:
        drawn = (1, number, 7, generator.lognormal(2, 1.5), generator.zipf(1.5))[kind]
        found.append(min(max(1, int(drawn)), left))
        left -= found[-1]
    return np.array(found)


def counted(found: Deal, lengths: np.ndarray, keys: np.ndarray | None) -> tuple[list[int], list[int]]:
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
            pairs += end - begin
        exchanged.append(len(seen - held))
        work.append(pairs)
    return exchanged, work


@pytest.mark.parametrize("with_keys", [False, True])
def test_every_row_has_one_place_and_counts_are_those_of_rows(with_keys: bool) -> None:
    generator = np.random.default_rng(0)
    for _ in range(150):
        number = int(generator.choice([1, 2, 4, 8]))
        lengths = random_lengths(generator, number * int(generator.integers(1, 60)))
        keys = generator.integers(1, lengths + 1) if with_keys else None
        found = deal(lengths, number, keys=keys)
        rows = [found.rows(place) for place in range(number)]
        assert {len(each) for each in rows} == {lengths.sum() // number}
        assert np.array_equal(np.sort(np.concatenate(rows)), np.arange(lengths.sum()))
        exchanged, work = counted(found, lengths, keys)
        assert exchanged_rows(found, lengths, keys).tolist() == exchanged
        assert work_of(found, lengths, keys=keys).tolist() == work


def test_wrong_values() -> None:
    for lengths, number, keys in (([3], 2, None), ([2, 0], 1, None), ([2], 0, None), ([2], 2, [3]), ([2], 2, [0])):
        with pytest.raises(ValueError):
            deal(np.array(lengths), number, keys=None if keys is None else np.array(keys))
