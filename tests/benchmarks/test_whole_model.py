"""The comparison of whole models on tiny ones: both sides train the same model, and what is printed is what was
measured."""

from __future__ import annotations

import math

import pytest

from benchmarks.speed import whole_model
from tests import distributed

TINY = ["model.num_layers=2", "model.hidden_size=32", "model.num_attention_heads=2", "model.sequence_length=16"]
SIZES = {"dense": ["model.ffn_hidden_size=64"], "moe": ["moe.ffn_hidden_size=64"]}


@pytest.mark.parametrize(("case", "ranks"), [("dense_bf16", 1), ("moe_fp32", 2)])
def test_a_case_is_measured_beside_hugging_face(case: str, ranks: int) -> None:
    overrides = [*TINY, *SIZES[case.split("_")[0]]]
    # Raises where the first losses differ; torch.compile would take half a minute.
    results = distributed.run(whole_model.measure, ranks, case, 3, overrides, ["eager", "autocast"])
    sides = [side for side in whole_model.sides_of(case.split("_")[1]) if side != "compiled"]
    for result in results:
        assert (result["case"], result["ranks"], result["rounds"]) == (case, ranks, 3)
        assert list(result["tokens_per_second"]) == sides
        assert list(result["ratio"]) == sides[1:]
        assert all(math.isfinite(number) and number > 0 for ratio in result["ratio"].values() for number in ratio)
    shown = whole_model.show(results[:1], markdown=True).splitlines()
    assert [line.split("|")[3].strip() for line in shown[2:]] == sides


def test_a_ratio_is_of_the_same_round() -> None:
    assert whole_model.ratio([2.0, 6.0, 12.0], [1.0, 2.0, 3.0]) == pytest.approx([3.0, 2 / math.sqrt(3)])


def test_another_loss_is_noticed() -> None:
    with pytest.raises(distributed.RankError, match="do not compute the same loss"):
        distributed.run(_with_a_wrong_loss, 1)


def _with_a_wrong_loss() -> None:
    ours = whole_model._ours
    whole_model._ours = lambda engine: lambda batch: ours(engine)(batch) * 1.1  # type: ignore[assignment]
    try:
        whole_model.measure("dense_fp32", 2, [*TINY, *SIZES["dense"]], ["eager"])
    finally:
        whole_model._ours = ours  # type: ignore[assignment]
