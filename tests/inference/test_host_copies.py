"""Units that the host keeps for a GPU: whoever comes first, as long as there is room."""

from __future__ import annotations

import pytest
import torch

from inference.weights.host_copies import HostCopies
from memory.budgets import HOST
from memory.completion import Cancelled, Completion
from memory.host_link import HostLink


def test_who_comes_first_stays_within_the_hosts_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    before = HOST.held["weights"]
    monkeypatch.setattr(HOST, "limit", HOST.total + 3072)
    copies = HostCopies(HostLink(torch.device("cpu")))
    copies.expected = 10 * 700
    found = [copies.add(str(number), 700) for number in range(6)]
    # A segment of 2048 bytes, as 8192 have no room, and then one of 1024.
    assert [copy is not None for copy in found] == [True, True, True, False, False, False]
    assert HOST.held["weights"] - before == 3072
    assert [copies.of(str(number)) for number in range(6)] == found
    filled = [copy.memory.fill_(number) for number, copy in enumerate(found) if copy is not None]
    assert [int(memory.sum()) for memory in filled] == [0, 700, 1400]
    del copies, found, filled
    assert HOST.held["weights"] == before


def test_a_copy_whose_reading_failed_is_read_again() -> None:
    copies = HostCopies(HostLink(torch.device("cpu")))
    copy = copies.add("unit", 64)
    assert copy is not None and copy.must_be_read
    copy.read = Completion.already()
    assert not copy.must_be_read
    for error in (OSError("gone"), Cancelled()):
        copy.read = Completion()
        copy.read.finish(error)
        assert copy.must_be_read
