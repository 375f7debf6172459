"""Losses and gradient norms of whole trainings do not depend on the layout."""

from __future__ import annotations

import pytest

from benchmarks.checks.layout_parity import SINGLE, compare, markdown
from configs.schema import Config
from tests import distributed
from tests.training.helpers import make_config, train

# All of them: python -m benchmarks.checks.layout_parity
OF_MOE = ["EP2", "TP2+SPxPP2", "DP2xPP2xVPP2xEP2", "TP2+SPxEP2xETP1", "TP2+SPxEP2xETP2"]
OTHERS = [("gpt_tiny", "DP2xTP2"), ("gpt_tiny", "PP2xVPP2"), ("bert_tiny", "TP2xPP2"), ("bert_moe_tiny", "DP2xPP2xEP2")]
STEPS = ["training.steps=5"]


def test_moe_gpt(data: list[str]) -> None:
    comparisons = compare(["gpt_moe_tiny"], OF_MOE, [*data, *STEPS])
    assert [row.layout for row in comparisons] == [SINGLE, *OF_MOE]
    assert [row for row in comparisons if not row.passed] == []
    # Other orders of addition: were every difference zero, the comparison would not compare anything.
    assert any(row.loss_difference > 0 for row in comparisons if row.layout != SINGLE)


@pytest.mark.parametrize(("model", "layout"), OTHERS)
def test_other_models(data: list[str], model: str, layout: str) -> None:
    single, row = compare([model], [layout], [*data, *STEPS])
    assert row.passed, row
    assert f"| {layout} | {row.ranks} |" in markdown([single, row])


def test_bf16(data: list[str]) -> None:
    comparisons = compare(["gpt_moe_tiny"], ["EP2", "TP2+SP"], [*data, *STEPS, "training.precision=bf16"])
    assert len(comparisons) == 3 and all(row.passed for row in comparisons), comparisons


def sends_kept(config: Config) -> int:
    """Train with evaluations, then count the sends that somebody still waits for."""
    from parallel.megatron import fixes

    train(config)
    return len(fixes._sends)


def test_an_evaluation_of_interleaved_stages_keeps_no_outputs(data: list[str]) -> None:
    overrides = ["experiment=gpt_tiny", *data, "parallel.pipeline=2", "parallel.virtual_pipeline=2", "checkpoint=off"]
    steps = ["training.steps=2", "training.eval_interval=1", "training.eval_batches=2", "optimizer.decay_steps=2"]
    assert distributed.run(sends_kept, 2, make_config([*overrides, *steps], 2)) == [0, 0]
