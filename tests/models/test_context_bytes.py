"""What ranks of context parallelism receive in runs: the rows that were counted beforehand, to the byte."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from models.attention.dealing import Deal, deal
from models.attention.exchange import HeadExchange, RowExchange
from models.attention.rounds import Dealt, Pieces
from models.attention.sliced import SlicePlan, attend
from parallel.topology import Axis
from tests.distributed import run

RANKS, ROWS = 4, 64
QUERY_HEADS, WIDTH, VALUES, NUMBER = 4, 6, 5, 4  # channels of keys and of values, and bytes of fp32
LENGTHS = {"packed": [7, 30, 1, 1, 20, 5], "one": [ROWS]}
DEALS = ("dealt", "zig-zag", "in order", "in reverse by 5")
# Name: lengths, deal, window, ranks of a place, key heads, and whether rows attend to real keys.
Case = tuple[str, str, int | None, int, int, bool]
CASES: list[Case] = [
    *((lengths, dealing, window, 1, 2, False) for lengths in LENGTHS for dealing in DEALS for window in (None, 9)),
    *((lengths, dealing, None, 1, 1, True) for lengths in LENGTHS for dealing in DEALS),
    *(("packed", dealing, None, 2, heads, False) for dealing in DEALS for heads in (1, 2, 4)),
    *(("one", "dealt", window, 4, heads, False) for window in (None, 9) for heads in (1, 2, 4)),
]


def deal_of(name: str, pieces: Pieces, num_places: int) -> Deal:
    if name == "dealt":
        return deal(pieces.lengths, num_places, keys=pieces.keys)
    size = {"zig-zag": ROWS // num_places // 2, "in order": ROWS // num_places, "in reverse by 5": 5}[name]
    owner = np.arange(ROWS) // size
    if name == "zig-zag":
        owner = np.minimum(owner, 2 * num_places - 1 - owner)
    elif name == "in reverse by 5":
        order = np.argsort(-owner % num_places, kind="stable")
        owner = np.empty(ROWS, np.int64)
        owner[order] = np.repeat(np.arange(num_places), ROWS // num_places)
    first = np.concatenate([[0], np.flatnonzero(np.diff(owner)) + 1])
    order = np.lexsort((first, owner[first]))
    return Deal(num_places, owner[first][order], first[order], np.diff(np.append(first, ROWS))[order])


def dealt_of(case: Case) -> Dealt:
    lengths, dealing, window, heads, _, has_keys = case
    rows = np.array(LENGTHS[lengths])
    pieces = Pieces(rows, (rows + 1) // 2 if has_keys else None)
    return Dealt(pieces, deal_of(dealing, pieces, RANKS // heads), window)


class Received:
    """Bytes of all receives that are posted inside the block."""

    def __init__(self) -> None:
        self.bytes = 0
        self._make = dist.P2POp

    def __call__(self, operation: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> dist.P2POp:
        if operation is dist.irecv:
            self.bytes += tensor.nbytes
        return self._make(operation, tensor, *args, **kwargs)


def received(cases: list[Case]) -> list[tuple[int, int]]:
    """On a rank: bytes of the forward and of the backward pass of each case."""
    group = dist.group.WORLD
    assert group is not None
    context, found = Axis(dist.get_rank(), dist.get_world_size(), group), []
    for case in cases:
        heads, key_heads = case[3:5]
        own, rounds = dealt_of(case).rounds(context.rank // heads)
        exchanges = [(each.slices, RowExchange(each, context, heads)) for each in rounds]
        place_rows = ROWS // context.size * heads
        plan = SlicePlan(own, place_rows, 1, exchanges, HeadExchange(context, heads) if heads > 1 else None)
        shapes = (QUERY_HEADS, WIDTH), (key_heads, WIDTH), (key_heads, VALUES)
        inputs = [torch.randn(ROWS // context.size, 1, *shape, requires_grad=True) for shape in shapes]
        counts = []
        with mock.patch("torch.distributed.P2POp", Received()) as posted:
            output = attend(*inputs, plan, 1.0)
            counts.append(posted.bytes)
            output.sum().backward()
            counts.append(posted.bytes - counts[0])
        found.append(tuple(counts))
    return found


def counted(case: Case, rank: int) -> tuple[int, int]:
    """What the rounds say: bytes of the forward and of the backward pass."""
    heads, key_heads = case[3:5]
    place = SimpleNamespace(
        queries=QUERY_HEADS // heads, keys=max(1, key_heads // heads), others=(heads - 1) * ROWS // RANKS
    )
    row, rows = place.keys * (WIDTH + VALUES) * NUMBER, dealt_of(case).received
    coming, home = int(rows[rank // heads].sum()) * row, int(rows[:, rank // heads].sum()) * row
    in_heads = place.others * (place.queries * (WIDTH + VALUES) * NUMBER + row)  # queries, keys, values, and outputs
    return coming + in_heads, coming + home + in_heads


def test_bytes_received_are_those_that_the_rounds_count() -> None:
    by_rank = run(received, RANKS, CASES)
    for number, case in enumerate(CASES):
        for rank in range(RANKS):
            assert by_rank[rank][number] == counted(case, rank), (case, rank)
    rows = {case: int(dealt_of(case).received.sum()) for case in CASES}
    assert rows["one", "in order", None, 1, 2, False] == ROWS // RANKS * (1 + 2 + 3)
    assert rows["one", "in order", 9, 1, 2, False] == 8 * (RANKS - 1)
    assert rows["one", "zig-zag", None, 1, 2, False] == 64 + 56 + 48 + 40 - ROWS  # up to a place's last row
