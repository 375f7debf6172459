"""Plans are what benchmarks/speed/plan_accuracy.py measures, also where experts have copies or a capacity."""

from __future__ import annotations

import pytest

from benchmarks.speed.plan_accuracy import CASES, Case, compare
from configs.job import Job
from simulator.clock.hardware import load_hardware
from simulator.flops import training_flops_per_token
from simulator.run_plan import make_plan
from tests.training.helpers import make_config

SIZES = ("model.num_layers=2", "training.micro_batch_size=2", "training.global_batch_size=4", "parallel.expert=2")
# The limit makes the planner fill every slot, as the plan assumes.
PLACED = ("moe.placement.policy=solve", "moe.placement.extra_slots=2", "moe.placement.max_load=1.0")


@pytest.mark.parametrize("more", [PLACED, ("moe.capacity_factor=0.3",)], ids=["slots of copies", "capacity"])
def test_a_plan_is_what_was_measured(more: tuple[str, ...]) -> None:
    result = compare(Case("gpt_moe_tiny", "EP2", 2, (*SIZES, *more)))
    assert result["passed"], result


def test_no_send_keeps_an_output_beyond_the_plan() -> None:
    """An interleaved pipeline posts its sends and goes on."""
    (case,) = (case for case in CASES if (case.preset, case.layout) == ("gpt_moe_tiny", "PP2xVPP2"))
    result = compare(case)
    assert result["passed"], result


@pytest.mark.parametrize("policy", ["probs", "position"])
def test_a_plan_charges_what_the_capacity_keeps(policy: str) -> None:
    sizes, machine = ("experiment=gpt_moe_small", "training.device=cpu", *SIZES), load_hardware("cpu_emulated")
    all_of, half, most = (
        make_config([*sizes, f"moe.drop_policy={policy}", f"moe.capacity_factor={factor}"] if factor else sizes, 2)
        for factor in (None, 0.5, 2.0)
    )
    flops = [training_flops_per_token(config, 1000) for config in (all_of, half, most)]
    steps = [make_plan(Job(config, 2, 1000, "cpu"), hardware=machine).step for config in (all_of, half, most)]
    sent = [
        make_plan(Job(config, 2, 1000, "cpu")).communication[0]["expert_all_to_all"] for config in (all_of, half, most)
    ]
    seconds = [step.seconds for step in steps if step is not None]
    assert flops[1] < flops[0] == flops[2] and seconds[1] < seconds[0] == seconds[2] and sent[1] < sent[0] == sent[2]
