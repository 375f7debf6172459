"""What a plan says of layer inputs on the host, against the tensors of a step. What the store of layer inputs counts is
compared in tests/training/test_activation_offload.py."""

from __future__ import annotations

import pytest

from benchmarks.speed.plan_accuracy import Case, compare
from configs import derived
from configs.job import Job
from simulator.layer_inputs import layer_inputs
from simulator.memory import TOLERANCE
from simulator.run_plan import make_plan
from simulator.text import text
from tests.training.helpers import make_config

DEEP = (
    "model.num_layers=8",
    "model.sequence_length=256",
    "training.recompute=full",
    "training.micro_batch_size=2",
    "training.global_batch_size=4",
)


def _activations(offload: str, *overrides: str) -> tuple[int, int]:
    """Planned and measured."""
    case = Case("gpt_tiny", "single", 1, (*DEEP, *overrides, f"training.activation_offload={offload}"))
    result = compare(case)
    assert result["planned"]["host"] == result["measured"]["host"]
    ((planned, measured),) = result["by_rank"]
    return planned, measured


def test_a_step_saves_what_the_plan_says() -> None:
    all_planned, all_measured = _activations("none")
    for offload in ("0.3", "auto"):
        planned, measured = _activations(offload)
        assert all_planned - planned == all_measured - measured > 0


def test_a_plan_is_right_about_passes_by_layer() -> None:
    planned, measured = _activations("1.5", "training.pass_order=by_layer", "training.global_batch_size=8")
    assert planned == pytest.approx(measured, rel=TOLERANCE)


@pytest.mark.fast
def test_by_layer_each_input_goes_once_and_comes_back_twice() -> None:
    overrides = ["experiment=gpt_tiny", "training.recompute=full", "training.activation_offload=auto"]
    config = make_config([*overrides, "training.pass_order=by_layer", "training.micro_batch_size=1"])
    plan, layers, count = layer_inputs(config, 1, 0), config.model.num_layers, derived.num_micro_batches(config, 1)
    size = rank_input(1)
    assert plan.host == (layers + 1) * count * size
    # An input of every layer and a gradient behind it; the first layer's forward pass finds its input there, and its
    # last backward pass a gradient that nothing has made way for.
    out, back = 2 * layers * count, (3 * layers - 1) * count - 1
    assert plan.link_bytes == (out * size, back * size)
    assert max(plan.during) == plan.device_peak == 5 * size


@pytest.mark.fast
def test_a_plan_tells_what_comes_to_the_host() -> None:
    config = make_config(["experiment=gpt_tiny", "training.recompute=full", "training.activation_offload=auto"])
    plan = make_plan(Job(config, 1, 384, "cpu"))
    (rank,) = plan.as_dict()["memory_per_rank"]
    assert rank["host_activations"] == config.model.num_layers * rank_input(config.training.micro_batch_size)
    assert "Layer inputs on the host are not included" in text(plan)
    assert rank["host_activations_out"] == rank["host_activations"] * derived.num_micro_batches(config, 1)
    assert rank["host_activations_back"] > 0


def rank_input(samples: int) -> int:
    config = make_config(["experiment=gpt_tiny"])
    return samples * config.model.sequence_length * config.model.hidden_size * 4
