"""Trainings whose experts are computed at copies, beside those whose experts stay at home; and what they record."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.placement_parity import PASSES, SCATTERED, Case, compare
from moe.placement.trace import Header, read, read_header
from tests.training.helpers import read_metrics, train_on_ranks
from training.callbacks.moe.routing_trace import RoutingTrace

# All of them: python -m benchmarks.placement_parity
# Few steps at a high rate: routers that no loss balances soon prefer some experts.
SKEWED = ["training.steps=4", "optimizer.lr=0.01", "optimizer.warmup_steps=0", "optimizer.schedule=constant"]
CASES = [
    Case("EP2", "least_loaded", PASSES[4]),
    Case("EP2", "flex", PASSES[5]),
    Case("EP4", SCATTERED, PASSES[1]),
    Case("DP2xEP2", "quota", PASSES[0]),
    Case("DP2xPP2xEP2", SCATTERED, PASSES[2]),
    Case("DP2xPP2xVPP2xEP2", SCATTERED, PASSES[0]),
    Case("TP2+SPxEP2xETP1", SCATTERED, PASSES[3]),
    Case("TP2+SPxEP2xETP2", "solve", PASSES[3]),
]


BITWISE = [
    Case("EP2", SCATTERED, PASSES[4], bitwise=True),
    Case("DP2xPP2xEP2", SCATTERED, PASSES[2], bitwise=True),
]


@pytest.mark.parametrize("case,more", zip(BITWISE, ([], ["training.precision=bf16"])), ids=["EP2", "DP2xPP2xEP2"])
def test_the_same_bits_whatever_the_placement(data: list[str], case: Case, more: list[str]) -> None:
    words = [*data, *SKEWED, "moe.num_experts=8", "moe.placement.interval=2", *more]
    row = compare(case, words)
    assert row.same and row.copies > 0 and row.moved > 0, row


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.layout}, {case.policy}")
def test_copies_change_no_loss(data: list[str], case: Case) -> None:
    row = compare(case, [*data, *SKEWED])
    assert row.passed and row.copies > 0, row
    assert case.policy == SCATTERED or row.placed < row.at_home


def test_a_run_records_what_its_routers_chose(data: list[str], tmp_path: Path) -> None:
    words = [
        *data,
        "experiment=gpt_moe_tiny",
        "moe.placement.record=true",
        "training.recompute=full",
        f"run_dir={tmp_path}",
    ]
    words += ["parallel.expert=2", "training.micro_batch_size=2", "training.steps=3", "checkpoint.interval=2"]
    train_on_ranks(words, 2)
    assert read_header(tmp_path / "routing.trace").num_ranks == 2
    found = dict(read(tmp_path / "routing.trace"))
    assert list(found) == [1, 2, 3]
    for line in read_metrics(tmp_path):
        counts_LMRE = found[line["step"]]
        assert counts_LMRE.shape[2] == 2
        assert counts_LMRE.sum((1, 2)).tolist() == line["tokens_per_expert"]["counts"]


def test_steps_that_are_taken_again_stand_once(tmp_path: Path) -> None:
    run: Any = SimpleNamespace(progress=SimpleNamespace(step=0))
    trace = RoutingTrace()
    trace._path, trace._header = tmp_path / "routing.trace", Header("run", 2, 1, 1)
    trace._open(run)
    assert trace._writer is not None
    for step in (1, 2, 3):
        trace._writer.append(step, np.full((1, 1, 1, 2), step))
    run.progress.step = 1
    trace.on_rollback(run)
    trace._writer.append(2, np.full((1, 1, 1, 2), 7))
    trace.on_end(run)
    assert [(step, int(counts.max())) for step, counts in read(trace._path)] == [(1, 1), (2, 7)]
