"""Attention over context ranks in many rounds: what one process computes, and the bytes that were counted
beforehand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from models.attention.dealing import Deal, deal
from models.attention.exchange import HeadExchange, RowExchange
from models.attention.rounds import Dealt, Pieces
from models.attention.sliced import SlicePlan, attend
from models.attention.slices import CAUSAL, FULL, Slices, windowed
from parallel.topology import Axis
from tests.distributed import run

RANKS, ROWS, ROUND_ROWS = 4, 64, 4
QUERY_HEADS, WIDTH, VALUES, NUMBER = 4, 6, 5, 4  # channels of keys and of values, and bytes of fp32
SCALE = WIDTH**-0.5
LENGTHS = {"packed": [7, 30, 1, 1, 20, 5], "one": [ROWS]}
DEALS = ("dealt", "zig-zag", "in order", "in reverse by 5")
# Name: lengths, deal, window, ranks of a place, key heads, and whether rows attend to real keys.
Case = tuple[str, str, int | None, int, int, bool]
CASES: list[Case] = [
    *(("packed", dealing, None, 1, 2, False) for dealing in DEALS),
    *(("one", dealing, 9, 1, 1, False) for dealing in DEALS),
    *(("packed", dealing, None, 1, 1, True) for dealing in DEALS),
    *(("one", "zig-zag", None, 2, heads, False) for heads in (1, 2, 4)),
    *(("packed", "in order", window, 4, 2, False) for window in (None, 9)),
    ("one", "dealt", None, 1, 2, False),
    ("one", "in order", None, 1, 2, False),
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


def pieces_of(case: Case) -> Pieces:
    rows = np.array(LENGTHS[case[0]])
    return Pieces(rows, (rows + 1) // 2 if case[5] else None)


def deal_of_case(case: Case) -> Deal:
    return deal_of(case[1], pieces_of(case), RANKS // case[3])


def dealt_of(case: Case) -> Dealt:
    return Dealt(pieces_of(case), deal_of_case(case), case[2], ROUND_ROWS)


def whole_plan(case: Case) -> SlicePlan:
    """What one process computes."""
    pieces, sample = pieces_of(case), np.zeros(len(LENGTHS[case[0]]), np.int64)
    is_causal = pieces.keys is None
    kind = np.full_like(sample, CAUSAL if is_causal else FULL)
    keys = pieces.lengths if pieces.keys is None else pieces.keys
    found = Slices(kind, sample, pieces.first, pieces.lengths, pieces.first, keys)
    return SlicePlan(found if case[2] is None else windowed(found, case[2]), ROWS, 1)


class Received:
    """Bytes of all receives that are posted inside the block."""

    def __init__(self) -> None:
        self.bytes = 0
        self._make = dist.P2POp

    def __call__(self, operation: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> dist.P2POp:
        if operation is dist.irecv:
            self.bytes += tensor.nbytes
        return self._make(operation, tensor, *args, **kwargs)


class Found(NamedTuple):
    forward_bytes: int
    backward_bytes: int
    off: float  # the most that an output or a gradient is from one process's


def found_by_rank(cases: list[Case]) -> list[Found]:
    """On a rank: both passes of each case."""
    group = dist.group.WORLD
    assert group is not None
    context = Axis(dist.get_rank(), dist.get_world_size(), group)
    return [_run(case, context) for case in cases]


def _run(case: Case, context: Axis) -> Found:
    heads, key_heads = case[3:5]
    dealt, (place, head) = dealt_of(case), divmod(context.rank, heads)
    own, rounds = dealt.rounds(place)
    exchanges = [(each.slices, RowExchange(each, context, heads)) for each in rounds]
    exchange = HeadExchange(context, heads) if heads > 1 else None
    plan = SlicePlan(own, ROWS // context.size * heads, 1, exchanges, exchange, dealt.ahead)
    here = deal_of_case(case).rows(place).reshape(heads, -1)[head]
    shapes, generator = (
        ((QUERY_HEADS, WIDTH), (key_heads, WIDTH), (key_heads, VALUES)),
        torch.Generator().manual_seed(0),
    )
    whole = [torch.randn(ROWS, 1, *shape, generator=generator).requires_grad_() for shape in shapes]
    factor = torch.randn(ROWS, 1, QUERY_HEADS, VALUES, generator=generator)
    inputs = [each.detach()[here].requires_grad_() for each in whole]
    with mock.patch("torch.distributed.P2POp", Received()) as posted:
        output = attend(inputs[0], inputs[1], inputs[2], plan, SCALE)
        forward = posted.bytes
        output.backward(factor[here])
    expected = attend(whole[0], whole[1], whole[2], whole_plan(case), SCALE)
    expected.backward(factor)
    pairs = [(output, expected), *((each.grad, of_whole.grad) for each, of_whole in zip(inputs, whole))]
    off = max(float((each - of_whole[here]).detach().abs().max()) for each, of_whole in pairs)
    return Found(forward, posted.bytes - forward, off)


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


def test_rounds_bring_what_was_counted_and_compute_what_one_process_does() -> None:
    by_rank = run(found_by_rank, RANKS, CASES)
    for number, case in enumerate(CASES):
        for rank in range(RANKS):
            found = by_rank[rank][number]
            assert found[:2] == counted(case, rank), (case, rank)
            assert found.off < 1e-5, (case, rank)
    rows = {case: int(dealt_of(case).received.sum()) for case in CASES}
    assert rows["one", "in order", None, 1, 2, False] == ROWS // RANKS * (1 + 2 + 3)
    assert rows["one", "in order", 9, 1, 1, False] == 8 * (RANKS - 1)
    assert rows["one", "zig-zag", None, 2, 1, False] == 3 * ROWS // 4  # up to a place's last row
    assert max(len(dealt_of(case).rounds(0)[1]) for case in CASES) > 4
