"""Every document zig-zag over all places: what stands for models/attention/dealing.py until it is there, by the same
names."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class ZigzagDeal:
    """Runs of rows, int64 `[m]` each: whose they are, the first row of the micro-batch, and how many."""

    num_places: int
    place: np.ndarray
    first: np.ndarray
    length: np.ndarray


def deal(lengths: np.ndarray, num_places: int, *, keys: np.ndarray | None = None) -> ZigzagDeal:
    """Deal rows of pieces that lie one after the other."""
    found: list[tuple[int, int, int]] = []
    begin = 0
    for length in lengths.tolist():
        cuts = [begin + length * number // (2 * num_places) for number in range(2 * num_places + 1)]
        for number, (first, end) in enumerate(zip(cuts, cuts[1:])):
            if end > first:
                found.append((min(number, 2 * num_places - 1 - number), first, end - first))
        begin += length
    columns = np.array(found, dtype=np.int64).reshape(-1, 3).T
    return ZigzagDeal(num_places, *(np.ascontiguousarray(column) for column in columns))


def exchanged_rows(found: ZigzagDeal, lengths: np.ndarray, keys: np.ndarray | None = None) -> np.ndarray:
    """Key rows int64 [num_places] that rows of a place attend to and that it does not hold."""
    ends = np.cumsum(lengths)
    piece = np.searchsorted(ends, found.first, side="right")
    last = np.zeros((found.num_places, len(lengths)), np.int64)  # of the keys of each piece that a place asks for
    own = np.zeros((found.num_places, len(lengths)), np.int64)
    reach = (found.first + found.length - (ends - lengths)[piece]) if keys is None else keys[piece]
    np.maximum.at(last, (found.place, piece), reach)
    np.add.at(own, (found.place, piece), found.length)
    return (last - own).sum(1)
