"""Bounds never drop the best: the search against all candidates, on few ranks."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from base.errors import ConfigError
from configs.compose import compose
from configs.job import Job
from configs.keys import get
from configs.schema import Config
from configs.validate import validate
from configs.values import as_typed
from simulator.memory import rank_memory
from simulator.search.answer import answer_text
from simulator.search.search import layout_explorer, search_layout
from simulator.search.sizer import memory_limits
from simulator.search.timer import clock_timer
from tests.simulator.search.exhaustion import best_of, every_fitting
from tests.simulator.search.machines import SIMPLE, machine

pytestmark = pytest.mark.fast
VOCAB = 1000
FEW = ["moe.pipeline_degree=1", "optimizer.engine=auto", "moe.memory_strategy=keep"]
NO_TIERS = ["optimizer.state_device=device", "training.activation_offload=none"]

# Overrides, given keys, ranks, bytes of a device.
CASES = {
    "dense, 8 ranks": (
        ["experiment=gpt_tiny", "model.num_layers=4"],
        [*NO_TIERS, "parallel.sequence=false"],
        8,
        2**33,
    ),
    "dense, tiers": (
        ["experiment=gpt_tiny", "training.global_batch_size=4"],
        ["parallel.context=1", "parallel.sequence=false", "parallel.virtual_pipeline=null"],
        4,
        2_600_000,
    ),
    "experts, 4 ranks": (
        ["experiment=gpt_moe_tiny", "training.global_batch_size=4", "moe.num_experts=4"],
        ["parallel.context=1", "parallel.expert_tensor=null", "training.recompute=none", *NO_TIERS],
        4,
        2**33,
    ),
    "experts, 8 ranks": (
        ["experiment=gpt_moe_tiny", "training.global_batch_size=8", "moe.num_experts=4"],
        [*FEW, *NO_TIERS, "training.recompute=none"],
        8,
        2**33,
    ),
    "experts, little memory": (
        ["experiment=gpt_moe_tiny", "model.num_layers=4"],
        [*NO_TIERS, "moe.pipeline_degree=2", "parallel.context=1"],
        4,
        2_500_000,
    ),
    "six experts, 6 ranks": (
        ["experiment=gpt_moe_tiny", "moe.num_experts=6", "training.global_batch_size=12"],
        [*FEW, *NO_TIERS],
        6,
        2**33,
    ),
    "bert": (
        ["experiment=bert_tiny", "training.global_batch_size=4"],
        ["parallel.sequence=false", "optimizer.engine=host"],
        4,
        3_000_000,
    ),
    "separate documents": (
        ["experiment=gpt_tiny", "data.documents=separate", "model.sequence_length=96"],
        [*NO_TIERS, "training.recompute=none"],
        8,
        2**33,
    ),
}


def _asked(overrides: list[str], given: list[str]) -> tuple[Config, frozenset[str]]:
    return compose([*overrides, *given]), frozenset(each.partition("=")[0] for each in given)


@pytest.mark.parametrize("timer", [SIMPLE, clock_timer()], ids=["simple", "clock"])
@pytest.mark.parametrize("case", CASES)
def test_bounds_never_drop_the_best(case: str, timer: object) -> None:
    overrides, given, world_size, device = CASES[case]
    config, fixed = _asked(overrides, given)
    hardware = machine(device__memory=device / 0.9)
    number, found = every_fitting(Job(config, world_size, VOCAB, "cuda"), hardware, fixed, timer)  # type: ignore[arg-type]
    best = best_of(found)
    limits = memory_limits(config, world_size, hardware)
    explorer = layout_explorer(Job(config, world_size, VOCAB, "cuda"), hardware, fixed, timer, limits)  # type: ignore[arg-type]
    explorer.run()
    assert explorer.best is not None
    assert explorer.best.prediction.seconds == pytest.approx(best.prediction.seconds, rel=1e-9)
    assert (explorer.best.cell, explorer.best.saving) == (best.cell, best.saving)
    counts = explorer.counts()
    assert counts.candidates == number
    outcomes = (counts.bounded_by_time, counts.bounded_by_memory, counts.too_large, counts.timed)
    assert sum(outcomes) == number and min(outcomes) >= 0


def test_the_answer_is_what_a_run_takes() -> None:
    start = ["experiment=gpt_moe_tiny", *FEW, "parallel.context=1", "training.activation_offload=none"]
    config, fixed = _asked(start[:1], start[1:])
    hardware = machine(
        device__memory=3_000_000, errors=({"of": "steps", "count": 20, "mean_absolute_error_percent": 4.25},)
    )
    answer = search_layout(Job(config, 4, VOCAB, "cuda"), hardware, fixed)
    assert len(answer.runners_up) >= 4
    for layout in answer.runners_up:
        for choice in layout.choices:
            key = choice.partition("=")[0]
            assert choice == as_typed(key, get(layout.config, key)) != as_typed(key, get(answer.best.config, key))
    seconds = [layout.prediction.seconds for layout in answer.runners_up]
    assert seconds == sorted(seconds)
    capacity = answer.limits.capacity
    for layout in [answer.best, *answer.runners_up]:
        typed = compose([*start, *layout.overrides])
        validate(typed, 4)
        assert typed == layout.config
        memory = rank_memory(Job(typed, 4, VOCAB, "cuda"), capacity=capacity)
        assert layout.memory.device == max(rank.total for rank in memory) <= answer.limits.device
        assert layout.prediction.seconds >= answer.best.prediction.seconds * (1 - 1e-9)
    assert len({tuple(layout.overrides) for layout in [answer.best, *answer.runners_up]}) == 1 + len(answer.runners_up)
    shown = answer_text(answer)
    lines = [line for line in shown.splitlines() if " s (" in line]
    assert len(lines) == 1 + len(answer.runners_up) and all("+-4.2%" in line for line in lines)
    assert all(layout.why for layout in answer.runners_up) and not answer.best.why
    saved = json.loads(json.dumps(answer.as_dict()))
    assert saved["best"]["overrides"] == answer.best.overrides and saved["back_tests"][0]["count"] == 20
    again = search_layout(Job(config, 4, VOCAB, "cuda"), hardware, fixed)
    assert answer_text(again) == shown
    assert "not held to measured steps" in answer_text(replace(answer, errors=()))


def test_given_keys_stay() -> None:
    config, fixed = _asked(["experiment=gpt_tiny"], ["parallel.tensor=2", "parallel.sequence=true"])
    answer = search_layout(Job(config, 4, VOCAB, "cuda"), machine(), fixed, SIMPLE)
    for layout in [answer.best, *answer.runners_up]:
        assert layout.config.parallel.tensor == 2 and layout.config.parallel.sequence
        assert not any(each.startswith(("parallel.tensor=", "parallel.sequence=")) for each in layout.overrides)


def test_what_changes_losses_stays() -> None:
    overrides = ["experiment=gpt_moe_tiny", "training.global_batch_size=24", "optimizer.moment_dtype=bf16"]
    config, fixed = _asked(overrides, [*FEW, "parallel.context=1", "training.activation_offload=none"])
    answer = search_layout(Job(config, 12, VOCAB, "cuda"), machine(), fixed, SIMPLE)
    for layout in [answer.best, *answer.runners_up]:
        found = layout.config
        assert (found.training.global_batch_size, found.model, found.optimizer.moment_dtype) == (
            24,
            config.model,
            "bf16",
        )
        assert found.moe.capacity_factor == config.moe.capacity_factor and found.data == config.data


def test_all_keys_given_leave_one_candidate() -> None:
    given = [
        *("parallel.tensor=2", "parallel.sequence=false", "parallel.pipeline=2", "parallel.virtual_pipeline=null"),
        *("parallel.context=1", "parallel.context_heads=null", "parallel.expert=1", "parallel.expert_tensor=null"),
        *("training.micro_batch_size=2", "training.recompute=full", "training.activation_offload=auto"),
        *("optimizer.state_device=host", "optimizer.engine=host"),
    ]
    config, fixed = _asked(["experiment=gpt_tiny"], given)
    answer = search_layout(Job(config, 4, VOCAB, "cuda"), machine(), fixed, SIMPLE)
    assert answer.counts.candidates == answer.counts.timed == 1
    assert answer.best.overrides == [] and answer.runners_up == []


@pytest.mark.parametrize("world_size", [1, 3, 7])
def test_odd_numbers_of_ranks(world_size: int) -> None:
    config = compose(
        ["experiment=gpt_tiny", f"training.global_batch_size={2 * world_size}", "model.sequence_length=63"]
    )
    answer = search_layout(Job(config, world_size, VOCAB, "cuda"), machine(), frozenset(), SIMPLE)
    validate(answer.best.config, world_size)


def test_a_limit_that_one_layout_meets() -> None:
    config, fixed = _asked(["experiment=gpt_tiny"], NO_TIERS)
    hardware = machine()
    _, found = every_fitting(Job(config, 4, VOCAB, "cuda"), hardware, fixed, SIMPLE)
    least = min(each.memory.device for each in found)
    meets = [each for each in found if each.memory.device == least]
    tight = replace(config, training=replace(config.training, memory_limit_gib=least / 2**30))
    answer = search_layout(Job(tight, 4, VOCAB, "cuda"), hardware, fixed, SIMPLE)
    assert answer.best.memory.device == least
    assert answer.best.prediction.seconds == min(each.prediction.seconds for each in meets)
    tighter = replace(config, training=replace(config.training, memory_limit_gib=(least - 1) / 2**30))
    with pytest.raises(ConfigError, match="training.memory_limit_gib"):
        search_layout(Job(tighter, 4, VOCAB, "cuda"), hardware, fixed, SIMPLE)
