"""A test that is marked fast starts no ranks, however it tries."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch.distributed as dist

from tests import distributed
from tests.marks import StartsRanks
from tests.waits import LONG


@pytest.mark.fast
def test_no_rank_is_called() -> None:
    with pytest.raises(StartsRanks, match=r"test_marks\.py::test_no_rank_is_called is marked fast"):
        distributed.run(dist.get_rank, 1)


@pytest.mark.fast
def test_no_process_group_is_joined() -> None:
    with pytest.raises(StartsRanks, match="marked fast"):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


@pytest.mark.fast
@pytest.mark.parametrize("words", [["train.py", "--help"], ["-m", "torch.distributed.run"]], ids=" ".join)
def test_no_program_is_started_that_trains(words: list[str]) -> None:
    with pytest.raises(StartsRanks, match="marked fast"):
        subprocess.run([sys.executable, *words], timeout=LONG)
    subprocess.run([sys.executable, "-c", ""], check=True, timeout=LONG)


def test_others_may() -> None:
    distributed.forbid()
