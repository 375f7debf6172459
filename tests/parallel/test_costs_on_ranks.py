"""Cost models measured on two ranks: both keep the same numbers, and measure once."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from parallel.costs.cache import cached, layout_key
from parallel.costs.measure import measure_copies, measure_curve, measure_line, measure_slowdown
from tests.distributed import run

CPU = torch.device("cpu")


def _measure_on_rank(folder: str) -> tuple[str, str, int]:
    group = dist.group.WORLD
    assert group is not None
    rank, size = group.rank(), group.size()

    def make_exchange(num_bytes: int) -> Callable[[], None]:
        sent, received = (
            torch.zeros(size, num_bytes, dtype=torch.uint8),
            torch.zeros(size, num_bytes, dtype=torch.uint8),
        )
        return lambda: dist.all_to_all_single(received, sent, group=group)

    def communicate() -> Callable[[], Any]:
        work = dist.all_reduce(torch.zeros(2**16), group=group, async_op=True)
        return work.wait

    made: list[bool] = []

    def make() -> dict[str, Any]:
        made.append(True)
        line = measure_line(make_exchange, [1024, 16384, 65536], CPU, group, 0.1)
        # Ranks of different speed: the slowest counts.
        slept = measure_curve(lambda n: lambda: time.sleep(0.001 * n * (1 + rank)), [1, 2], CPU, group, 0.05)
        square = torch.ones(128, 128)
        slowdown = measure_slowdown(lambda: torch.mm(square, square), communicate, CPU, group, 0.05)
        copy_lines = measure_copies([4096, 65536], CPU, group, 0.05)
        assert slept(2) >= 0.002 * size and 1.0 <= min(slowdown)
        return {
            "line": [line.alpha, line.beta, line.r2],
            "slept": slept.seconds,
            "slowdown": slowdown,
            "copies": repr(copy_lines),
        }

    key = {"layout": layout_key(group)}
    mine = f"{folder}/{rank}"  # only the first rank's files count
    first = json.dumps(cached(mine, key, make, CPU, group))
    second = json.dumps(cached(mine, key, make, CPU, group))
    return first, second, len(made)


def test_all_ranks_end_with_the_same_numbers(tmp_path: Path) -> None:
    results = run(_measure_on_rank, 2, str(tmp_path))
    assert len({text for first, second, _ in results for text in (first, second)}) == 1
    assert [times for *_, times in results] == [1, 1]
    assert len(list(tmp_path.glob("*/costs_*.json"))) == 1
