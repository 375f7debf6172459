"""Attention over context ranks in many rounds against one process, and its bytes against those that the schedule
has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from models.attention.exchange_rounds import ExchangeSchedule, Segments
from models.attention.mask_slices import CAUSAL, FULL, Slices, windowed
from models.attention.row_exchange import HeadExchange, RowExchange
from models.attention.sequence_sharding import SequenceSharding, shard_sequence
from models.attention.slice_attention import SlicePlan, attend
from parallel.topology import Axis
from tests.distributed import run

RANKS, NUM_ROWS, ROUND_ROWS = 4, 64, 4
QUERY_HEADS, WIDTH, VALUES, NUMBER = 4, 6, 5, 4  # channels of keys and of values, and bytes of fp32
SCALE = WIDTH**-0.5
LENGTHS = {"packed": [7, 30, 1, 1, 20, 5], "one": [NUM_ROWS]}
SHARDINGS = ("balanced", "zig-zag", "in order", "in reverse by 5")
# Name: lengths, sharding, window, ranks of a cp_rank, key heads, and whether rows attend to real keys only.
Case = tuple[str, str, int | None, int, int, bool]
CASES: list[Case] = [
    *(("packed", sharding, None, 1, 2, False) for sharding in SHARDINGS),
    *(("one", sharding, 9, 1, 1, False) for sharding in SHARDINGS),
    *(("packed", sharding, None, 1, 1, True) for sharding in SHARDINGS),
    *(("one", "zig-zag", None, 2, heads, False) for heads in (1, 2, 4)),
    *(("packed", "in order", window, 4, 2, False) for window in (None, 9)),
    ("one", "balanced", None, 1, 2, False),
    ("one", "in order", None, 1, 2, False),
]


def sharding_of(name: str, segments: Segments, cp_size: int) -> SequenceSharding:
    if name == "balanced":
        return shard_sequence(segments.lengths, cp_size, keys=segments.keys)
    size = {"zig-zag": NUM_ROWS // cp_size // 2, "in order": NUM_ROWS // cp_size, "in reverse by 5": 5}[name]
    owner = np.arange(NUM_ROWS) // size
    if name == "zig-zag":
        owner = np.minimum(owner, 2 * cp_size - 1 - owner)
    elif name == "in reverse by 5":
        order = np.argsort(-owner % cp_size, kind="stable")
        owner = np.empty(NUM_ROWS, np.int64)
        owner[order] = np.repeat(np.arange(cp_size), NUM_ROWS // cp_size)
    first = np.concatenate([[0], np.flatnonzero(np.diff(owner)) + 1])
    order = np.lexsort((first, owner[first]))
    return SequenceSharding(cp_size, owner[first][order], first[order], np.diff(np.append(first, NUM_ROWS))[order])


def segments_of(case: Case) -> Segments:
    lengths = np.array(LENGTHS[case[0]])
    return Segments(lengths, (lengths + 1) // 2 if case[5] else None)


def sharding_of_case(case: Case) -> SequenceSharding:
    return sharding_of(case[1], segments_of(case), RANKS // case[3])


def schedule_of(case: Case) -> ExchangeSchedule:
    return ExchangeSchedule(segments_of(case), sharding_of_case(case), case[2], ROUND_ROWS)


def whole_plan(case: Case) -> SlicePlan:
    """Return the plan of one process."""
    segments, sample = segments_of(case), np.zeros(len(LENGTHS[case[0]]), np.int64)
    is_causal = segments.keys is None
    kind = np.full_like(sample, CAUSAL if is_causal else FULL)
    keys = segments.lengths if segments.keys is None else segments.keys
    found = Slices(kind, sample, segments.first, segments.lengths, segments.first, keys)
    return SlicePlan(found if case[2] is None else windowed(found, case[2]), NUM_ROWS, 1)


class Received:
    """Counts the bytes of all receives that are posted inside the block."""

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
    off: float  # largest difference of an output or a gradient from one process's


def found_by_rank(cases: list[Case]) -> list[Found]:
    """Return, on a rank, the results of both passes of each case."""
    group = dist.group.WORLD
    assert group is not None
    context = Axis(dist.get_rank(), dist.get_world_size(), group)
    return [_run(case, context) for case in cases]


def _run(case: Case, context: Axis) -> Found:
    heads, key_heads = case[3:5]
    schedule, (cp_rank, head) = schedule_of(case), divmod(context.rank, heads)
    own, rounds = schedule.rounds(cp_rank)
    exchanges = [(each.slices, RowExchange(each, context, heads)) for each in rounds]
    exchange = HeadExchange(context, heads) if heads > 1 else None
    plan = SlicePlan(own, NUM_ROWS // context.size * heads, 1, exchanges, exchange, schedule.ahead)
    here = sharding_of_case(case).sequence_rows(cp_rank).reshape(heads, -1)[head]
    shapes, generator = (
        ((QUERY_HEADS, WIDTH), (key_heads, WIDTH), (key_heads, VALUES)),
        torch.Generator().manual_seed(0),
    )
    whole = [torch.randn(NUM_ROWS, 1, *shape, generator=generator).requires_grad_() for shape in shapes]
    factor = torch.randn(NUM_ROWS, 1, QUERY_HEADS, VALUES, generator=generator)
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
    """Return the bytes of the forward and of the backward pass that the rounds have."""
    heads, key_heads = case[3:5]
    of_rank = SimpleNamespace(
        queries=QUERY_HEADS // heads, keys=max(1, key_heads // heads), others=(heads - 1) * NUM_ROWS // RANKS
    )
    row, received = of_rank.keys * (WIDTH + VALUES) * NUMBER, schedule_of(case).received
    coming, home = int(received[rank // heads].sum()) * row, int(received[:, rank // heads].sum()) * row
    # Queries, keys, values, and outputs.
    in_heads = of_rank.others * (of_rank.queries * (WIDTH + VALUES) * NUMBER + row)
    return coming + in_heads, coming + home + in_heads


def test_rounds_bring_what_was_counted_and_compute_what_one_process_does() -> None:
    by_rank = run(found_by_rank, RANKS, CASES)
    for number, case in enumerate(CASES):
        for rank in range(RANKS):
            found = by_rank[rank][number]
            assert found[:2] == counted(case, rank), (case, rank)
            assert found.off < 1e-5, (case, rank)
    received = {case: int(schedule_of(case).received.sum()) for case in CASES}
    assert received["one", "in order", None, 1, 2, False] == NUM_ROWS // RANKS * (1 + 2 + 3)
    assert received["one", "in order", 9, 1, 1, False] == 8 * (RANKS - 1)
    assert received["one", "zig-zag", None, 2, 1, False] == 3 * NUM_ROWS // 4  # up to a rank's last row
    assert max(len(schedule_of(case).rounds(0)[1]) for case in CASES) > 4
