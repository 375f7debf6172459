"""Draws of random trainings, and what counts as a fault in them."""

from __future__ import annotations

import pytest
import torch

from benchmarks.checks import fuzz
from benchmarks.checks.fuzz_draws import THRESHOLDS, Case, Draw, Leg
from tests.training.helpers import Lines, make_config

pytestmark = pytest.mark.fast


def case(precision: str = "fp32", micro: str = "1") -> Case:
    leg = Leg(2, 2, ("training.micro_batch_size=1",))
    return Case(
        1, "", 2, "short", (f"training.precision={precision}",), (f"training.micro_batch_size={micro}",), (leg,)
    )


def lines(loss: float = 5.0, norm: float = 1.0, aux: float = 1.0) -> Lines:
    same = {"tokens": 8, "learning_rate": 1e-3, "updated": True}
    return [{"step": step, "loss": loss, "grad_norm": norm, "aux_loss": aux, **same} for step in (1, 2)]


def faults(ours: Lines, of: Case) -> list[str]:
    found = fuzz.Found(of)
    fuzz.compare(found, ours, lines())
    return found.faults


def test_a_case_follows_from_the_seed_and_its_number() -> None:
    one, again = (Draw(5, 3, thresholds=False).next_case() for _ in range(2))
    assert one == again
    firsts = {Draw(*each).random.random() for each in ((5, 3, False), (6, 3, False), (5, 4, False), (5, 3, True))}
    assert len(firsts) == 4


def test_a_threshold_is_in_every_layout_of_its_cases() -> None:
    number = list(THRESHOLDS).index("tied, by layer, more than 512 tokens") + 1
    found = Draw(1, number, thresholds=True).next_case()
    assert {"model.tie_embeddings=true", "model.sequence_length=264"} <= set(found.shared)
    assert all(
        {"training.pass_order=by_layer", "training.micro_batch_size=2"} <= set(leg.overrides) for leg in found.legs
    )


def test_differences_above_the_constants_are_faults() -> None:
    assert faults(lines(), case()) == faults(lines(5.00004, 1.00009), case()) == []
    assert "5.0001, one process 5.0: 2.0e-05 apart, allowed 1e-05" in faults(lines(5.0001), case())[0]
    assert "grad_norm" in faults(lines(norm=1.0002), case())[0]
    assert "nan" in faults(lines(float("nan")), case())[0]
    assert faults(lines(5.04, norm=2.0), case("bf16")) == [] and "apart" in faults(lines(5.06), case("bf16"))[0]
    assert faults(lines()[:1], case()) == ["steps [1], one process [1, 2]"]
    assert "tokens" in faults([{**line, "tokens": 7} for line in lines()], case())[0]


def test_a_loss_of_a_micro_batch_is_compared_where_these_are_alike() -> None:
    assert "aux_loss" in faults(lines(aux=1.1), case())[0]
    assert faults(lines(aux=1.1), case(micro="2")) == []


def test_bits_off_the_device_are_those_on_it() -> None:
    assert fuzz.different_bits(lines(), lines()) == []
    assert "grad_norm 1.00000001, on it 1.0" in fuzz.different_bits(lines(norm=1.00000001), lines())[0]


def test_biases_that_do_not_follow_the_counts_are_a_fault() -> None:
    config = make_config(["experiment=gpt_moe_tiny", "moe.router_score=sigmoid", "moe.expert_bias=true"])
    counts = {"moe_layers": {"layer": [0]}, "tokens_per_expert": {"counts": [[9, 7, 8, 8]]}, "updated": True}
    right = torch.tensor([-1e-3, 1e-3, 0.0, 0.0])
    name = "decoder.layers.0.mlp.router.expert_bias"
    assert fuzz.wrong_biases(config, [counts], {name: right}) == []
    assert fuzz.wrong_biases(config, [counts], {name: right.bfloat16()})[0].startswith("layer 0: biases")
