"""Apertus' pairs of streamed and resident experts: their models, and in which order they are predicted."""

from __future__ import annotations

import pytest

from benchmarks.speed import apertus_order
from benchmarks.speed.apertus_order import PAIRS, ApertusRun, ordered_pairs, predicted
from models.blueprint import model_chunks
from simulator.parameters import parameters

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("run", {run.model: run for pair in PAIRS for run in pair}.values(), ids=lambda run: run.model)
def test_models_have_the_sizes_of_their_names(run: ApertusRun) -> None:
    total, active = (float(chunk.strip("AB")) for chunk in run.model.split("-"))
    config = run.config()
    every = [
        p
        for of in model_chunks(config)
        for chunk in of
        for p in parameters(config, chunk, config.model.vocab_size or 0)
    ]
    assert sum(parameter.total for parameter in every) / 1e9 == pytest.approx(total, rel=0.02)
    # their names round, and do not say whether embedding and head count
    assert sum(parameter.active for parameter in every) / 1e9 == pytest.approx(active, abs=0.9)


def test_pairs_come_in_the_published_order_where_they_did() -> None:
    """The two that do not are written in benchmarks/results/apertus_order.md."""
    found = {(pair.streamed.name, pair.resident.name, pair.streamed.model): pair.is_ordered for pair in ordered_pairs()}
    assert [key for key, right in found.items() if not right] == [
        ("EP4, streamed", "EP8, overlap", "46B-A4B"),
        ("EP4, streamed, FP8", "EP16, overlap", "46B-A2B"),
    ]


def test_weights_that_come_take_time_and_the_table_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    streamed, resident = PAIRS[-1]
    assert predicted(streamed) < predicted(resident)
    assert apertus_order.main(["--markdown"]) == 0
    assert f"of {len(PAIRS)} pairs ordered as published" in capsys.readouterr().out
