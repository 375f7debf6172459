"""stand-in"""
from __future__ import annotations
from dataclasses import dataclass
import numpy as np

@dataclass(frozen=True, eq=False)
class Deal:
    num_places: int
    place: np.ndarray
    first: np.ndarray
    length: np.ndarray
    def rows(self, place):
        here = self.place == place
        return np.concatenate([np.arange(f, f + l) for f, l in zip(self.first[here], self.length[here])])

def deal(lengths, num_places, *, work=None, keys=None):
    n = int(lengths.sum())
    if num_places == 1:
        return Deal(1, np.array([0]), np.array([0]), np.array([n]))
    owner = np.empty(n, np.int64)
    c = n // num_places
    h = c // 2
    for p in range(num_places):
        owner[p * h:(p + 1) * h] = p
    rest = c - h
    for p in range(num_places):
        q = num_places - 1 - p
        owner[num_places * h + p * rest: num_places * h + (p + 1) * rest] = q
    cut = np.flatnonzero(np.diff(owner)) + 1
    first = np.concatenate([[0], cut]); end = np.append(cut, n)
    place = owner[first]
    order = np.lexsort((first, place))
    return Deal(num_places, place[order], first[order], (end - first)[order])
