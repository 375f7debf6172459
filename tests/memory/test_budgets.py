"""Budgets: what is kept is counted by what it is for, and what is too much is refused with the least that would do."""

from __future__ import annotations

import gc
import math
from pathlib import Path

import pytest
import torch

from base.errors import ConfigError
from base.units import MIB
from configs.schema import MemoryConfig
from memory import budgets, host_memory
from memory.budgets import DISK, HOST, Budget, open_budgets

pytestmark = pytest.mark.fast


@pytest.fixture
def budget() -> Budget:
    made = Budget("memory.host_budget")
    made.open(100.0, 0)
    return made


def test_what_is_kept_is_counted(budget: Budget) -> None:
    budget.take(30 * MIB, "optimizer state")
    budget.take(50 * MIB, "activations")
    budget.give(50 * MIB, "activations")
    budget.take(20 * MIB, "activations")
    assert dict(budget.held) == {"optimizer state": 30 * MIB, "activations": 20 * MIB}
    assert dict(budget.peaks) == {"optimizer state": 30 * MIB, "activations": 50 * MIB}
    assert (budget.total, budget.peak) == (50 * MIB, 80 * MIB)
    budget.open(None, 1000 * MIB)  # another run: what it finds is its first peak
    assert (budget.total, budget.peak) == (50 * MIB, 50 * MIB)


def test_what_is_too_much_is_refused_with_the_least_that_would_do(budget: Budget) -> None:
    budget.take(30 * MIB, "optimizer state")
    budget.take(70 * MIB, "activations")
    budget.give(70 * MIB, "activations")
    with pytest.raises(ConfigError) as caught:
        budget.take(70 * MIB + 1, "activations")
    assert str(caught.value) == (
        "memory.host_budget (100.0) must leave 70.0 MiB for activations, but leaves only 70.0 MiB. "
        "Try memory.host_budget=101"
    )
    assert budget.total == 30 * MIB
    budget.open(101.0, 0)
    budget.take(70 * MIB + 1, "activations")


def test_without_a_budget_it_is_a_share_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    budget = Budget("memory.host_budget")
    budget.open(None, 4000 * MIB)
    assert budget.limit == pytest.approx(800 * MIB)
    with pytest.raises(ConfigError) as caught:
        budget.take(900 * MIB, "optimizer state")
    assert str(caught.value) == (
        "memory.host_budget (null) is 80% of the free bytes by default, which is 800.0 MiB per rank. It must leave "
        "900.0 MiB for optimizer state, but leaves only 800.0 MiB. Try memory.host_budget=900"
    )
    with pytest.raises(ConfigError, match="This node does not have that much free: use more ranks or more nodes"):
        budget.take(1001 * MIB, "optimizer state")
    disk = Budget("memory.disk_budget")
    disk.open(None, 4000 * MIB)
    with pytest.raises(ConfigError, match="free: free some space, or set memory.disk_dir to a folder on another disk"):
        disk.take(1001 * MIB, "optimizer state")


def test_a_tensor_counts_until_it_is_gone(budget: Budget) -> None:
    tensor = torch.zeros(MIB, dtype=torch.int16)
    budget.count(tensor, "experts")
    assert budget.held["experts"] == 2 * MIB
    del tensor
    gc.collect()
    assert (budget.held["experts"], budget.peaks["experts"]) == (0, 2 * MIB)


def test_a_run_opens_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(host_memory, "available", lambda: 10 * MIB)
    monkeypatch.setattr(budgets, "free_bytes", lambda folder: 20 * MIB)
    for budget in (HOST, DISK):
        monkeypatch.setattr(budget, "limit", math.inf)
    open_budgets(MemoryConfig())
    assert (HOST.limit, DISK.limit) == (8 * MIB, math.inf)
    open_budgets(MemoryConfig(disk_dir=str(tmp_path)))
    assert (HOST.limit, DISK.limit) == (8 * MIB, 16 * MIB)
    open_budgets(MemoryConfig(host_budget=3.0, disk_budget=0.5, disk_dir=str(tmp_path)))
    assert (HOST.limit, DISK.limit) == (3 * MIB, MIB // 2)
    monkeypatch.undo()
    with pytest.raises(ConfigError, match=r"memory.disk_dir \(.*missing\) must be an existing folder"):
        open_budgets(MemoryConfig(disk_dir=str(tmp_path / "missing")))
    with pytest.raises(ConfigError, match="must be an existing folder: .* Try another folder"):
        open_budgets(MemoryConfig(disk_dir="/proc/missing"))
    HOST.limit = DISK.limit = math.inf
