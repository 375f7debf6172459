"""What the watchdog makes of a store in which somebody else has written. Ranks that are lost:
tests/training/test_faults.py."""

from __future__ import annotations

import json
import os
import threading
from dataclasses import asdict
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from parallel.liveness.watchdog import Verdict, Watchdog, _read_verdict
from tests import distributed
from tests.waits import LONG

VERDICT = Verdict(rank=1, host="node-a", step=7, reason="is dead", collective="all_reduce", witness=0)


def test_a_verdict_comes_back() -> None:
    assert _read_verdict(json.dumps(asdict(VERDICT)).encode(), world_size=2) == VERDICT


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80",
        b"null",
        b"[1]",
        b"{}",
        {"rank": 2},
        {"rank": -1},
        {"rank": "1"},
        {"rank": True},
        {"reason": 3},
        {"more": 1},
    ],
)
def test_what_no_rank_writes_is_no_verdict(content: bytes | dict[str, Any]) -> None:
    text = content if isinstance(content, bytes) else json.dumps(asdict(VERDICT) | content).encode()
    with pytest.raises(ValueError):
        _read_verdict(text, world_size=2)


def _hear_of_nonsense() -> str:
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # as if a launcher held the store
    words: list[str] = []
    heard = threading.Event()

    def on_verdict(verdict: Verdict, written: bool) -> None:
        words.append(f"{verdict.reason} written={written}")
        heard.set()

    try:
        watchdog = Watchdog(120.0, torch.device("cpu"), on_verdict)
        if dist.get_rank() == 0:
            watchdog._store.set("verdict", b"\x80nonsense")
        assert heard.wait(LONG)
        dist.barrier()
        watchdog.close()
    finally:
        del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
    return words[0]


def test_nonsense_for_a_verdict_ends_the_job_on_every_rank() -> None:
    for words in distributed.run(_hear_of_nonsense, 2):
        assert words.startswith("lost the launcher at ") and "holds a verdict that no rank has written" in words
        assert words.endswith("written=False")


def _hear_of_a_broken_gpu() -> tuple[int, str]:
    found: list[Verdict] = []
    heard = threading.Event()

    def on_verdict(verdict: Verdict, written: bool) -> None:
        found.append(verdict)
        heard.set()

    def fail(device: Any = None) -> Any:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nMore lines.")

    broken = dist.get_rank() == 1
    # A stall of no time: each round asks the device.
    with (
        mock.patch.object(torch.cuda, "default_stream", fail),
        mock.patch("parallel.liveness.watchdog.STALL_SHARE", 0.0),
        mock.patch("parallel.liveness.watchdog.os.kill"),  # a rank that a verdict names would be ended
    ):
        watchdog = Watchdog(120.0, torch.device("cuda" if broken else "cpu"), on_verdict)
        assert heard.wait(LONG)
        dist.barrier()
        watchdog.close()
    return found[0].rank, found[0].reason


def test_a_gpu_that_fails_is_named() -> None:
    expected = 1, "its GPU failed: CUDA error: an illegal memory access was encountered"
    assert distributed.run(_hear_of_a_broken_gpu, 2) == [expected] * 2
