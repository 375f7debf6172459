"""Buckets: runs of a rank's slices of parameters, whose optimizer state moves between the tiers as one record. Without
torch: a run's plan cuts them too."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

# A larger slice is cut at multiples of so many elements from its start: the vectorised kernel gives other bits where
# a cut leaves it another rest.
CUT = 4096
# Of a rank's state in a bucket, at most: two slots for the largest bucket are then a small part of the state.
MOST = 1 / 8


class Slice(Protocol):
    """What a rank holds of a parameter: see parallel/megatron/tiered.py."""

    @property
    def start(self) -> int: ...

    @property
    def end(self) -> int: ...

    @property
    def place(self) -> Hashable: ...

    @property
    def late(self) -> bool: ...

    @property
    def order(self) -> int: ...


@dataclass(frozen=True)
class Piece:
    """The elements [start, end) of slice `index`'s parameter, from `offset` on in the bucket's record."""

    index: int
    start: int
    end: int
    offset: int


@dataclass(frozen=True)
class Bucket:
    """Pieces of slices of one place, all late or none; `order` is that of the first piece in the forward pass.

    Off the device `of_experts` is the MoE layer of this rank and the run of its part (off_device.py), and `span` the
    length of that run, with what lies between the pieces.
    """

    pieces: tuple[Piece, ...]
    late: bool
    order: int
    of_experts: tuple[int, int] | None = None
    span: int | None = None

    @property
    def numel(self) -> int:
        return self.span if self.span is not None else sum(piece.end - piece.start for piece in self.pieces)


def cut(slices: Sequence[Slice], limit: int) -> list[Bucket]:
    """Buckets of at most `limit` elements (at least CUT), in the order of first use."""
    limit = max(limit // CUT, 1) * CUT
    runs: dict[Hashable, list[int]] = {}
    for index, owned in enumerate(slices):
        runs.setdefault((owned.place, owned.late), []).append(index)
    buckets = []
    for run in runs.values():
        pieces: list[Piece] = []
        for piece in _cut_slices(slices, run, limit):
            filled = pieces[-1].offset + pieces[-1].end - pieces[-1].start if pieces else 0
            if filled + piece.end - piece.start > limit:
                buckets.append(_bucket(slices, pieces))
                pieces, filled = [], 0
            pieces.append(Piece(piece.index, piece.start, piece.end, filled))
        buckets.append(_bucket(slices, pieces))
    return sorted(buckets, key=lambda bucket: bucket.order)


def largest(slices: Sequence[Slice], bucket_parameters: int) -> int:
    """The limit of a rank's buckets: what the config asks for, and MOST of its elements."""
    return min(bucket_parameters, int(MOST * sum(owned.end - owned.start for owned in slices)))


def _cut_slices(slices: Sequence[Slice], run: Iterable[int], limit: int) -> Iterable[Piece]:
    for index in run:
        owned = slices[index]
        for start in range(owned.start, owned.end, limit):
            yield Piece(index, start, min(start + limit, owned.end), 0)


def _bucket(slices: Sequence[Slice], pieces: list[Piece]) -> Bucket:
    first = slices[pieces[0].index]
    return Bucket(tuple(pieces), first.late, min(slices[piece.index].order for piece in pieces))
