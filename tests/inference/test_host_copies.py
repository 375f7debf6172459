"""Units that the host keeps for a GPU: the first ones, as long as it has memory."""

from __future__ import annotations

import pytest
import torch

from inference.weights.loader import HostCopies
from memory.budgets import HOST
from memory.completion import Cancelled, Completion
from memory.host_link import HostLink


def test_who_comes_first_stays_within_the_hosts_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    before = HOST.held["weights"]
    monkeypatch.setattr(HOST, "limit", HOST.total + 3072)
    host_copies = HostCopies(HostLink(torch.device("cpu")))
    host_copies.expected = 10 * 700
    found = [host_copies.add(str(number), 700) for number in range(6)]
    # A segment of 2048 bytes, as 8192 exceed the limit, and then one of 1024.
    assert [host_copy is not None for host_copy in found] == [True, True, True, False, False, False]
    assert HOST.held["weights"] - before == 3072
    assert [host_copies.find(str(number)) for number in range(6)] == found
    filled = [host_copy.memory.fill_(number) for number, host_copy in enumerate(found) if host_copy is not None]
    assert [int(memory.sum()) for memory in filled] == [0, 700, 1400]
    del host_copies, found, filled
    assert HOST.held["weights"] == before


def test_a_copy_whose_reading_failed_is_read_again() -> None:
    host_copies = HostCopies(HostLink(torch.device("cpu")))
    host_copy = host_copies.add("unit", 64)
    assert host_copy is not None and host_copy.must_be_read
    host_copy.read = Completion.already()
    assert not host_copy.must_be_read
    for error in (OSError("gone"), Cancelled()):
        host_copy.read = Completion()
        host_copy.read.finish(error)
        assert host_copy.must_be_read
