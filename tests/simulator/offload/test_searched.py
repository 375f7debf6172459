"""A search with moe.weights_device=auto and training.pass_order=auto: its memory, and that no bound drops the best."""

from __future__ import annotations

from dataclasses import replace

import pytest

from configs.compose import compose
from configs.job import Job
from configs.schema import Config
from configs.validate import validate
from simulator.memory import rank_memory
from simulator.search.search import layout_explorer, search_layout
from simulator.search.sizer import LayoutSizer, memory_limits
from simulator.search.space import LayoutSpace
from simulator.search.timer import clock_timer
from tests.simulator.search.exhaustion import best_of, every_fitting
from tests.simulator.search.machines import machine

pytestmark = pytest.mark.fast
VOCAB = 1000
ASKED = ["moe.weights_device=auto", "training.pass_order=auto"]
GIVEN = [
    *("moe.pipeline_degree=1", "moe.memory_strategy=keep", "optimizer.engine=auto", "parallel.context=1"),
    *("parallel.expert_tensor=null", "parallel.tensor=1", "training.activation_offload=none"),
    "parallel.virtual_pipeline=null",
]
MODEL = ["experiment=gpt_moe_tiny", "training.global_batch_size=8", "moe.ffn_hidden_size=1024"]


def _asked(*more: str) -> tuple[Config, frozenset[str]]:
    given = [*GIVEN, *ASKED, *more]
    return compose([*MODEL, *given]), frozenset(each.partition("=")[0] for each in given)


@pytest.mark.parametrize("device", [2**33, 25_000_000, 16_000_000, 13_500_000])
def test_bounds_never_drop_the_best_place_of_experts(device: int) -> None:
    config, fixed = _asked("training.recompute=full")
    hardware, timer = machine(device__memory=device / 0.9), clock_timer()
    number, found = every_fitting(Job(config, 2, VOCAB, "cuda"), hardware, fixed, timer)
    best = best_of(found)
    explorer = layout_explorer(
        Job(config, 2, VOCAB, "cuda"), hardware, fixed, timer, memory_limits(config, 2, hardware)
    )
    explorer.run()
    assert explorer.best is not None and explorer.counts().timed <= number
    assert (explorer.best.cell, explorer.best.saving) == (best.cell, best.saving)
    if device < 20_000_000:
        assert best.saving.streams


def test_places_are_searched_where_they_are_asked_for_alone() -> None:
    config, fixed = _asked()
    open_space = LayoutSpace(Job(config, 2, VOCAB, "cuda"), fixed, 8)
    layouts = {(each.weights_device, each.pass_order) for each in open_space.savings(True)}
    assert layouts == {("device", "by_micro_batch"), ("host", "by_micro_batch"), ("host", "by_layer")}
    assert all(each.state_device in ("host", "disk") for each in open_space.savings(True) if each.streams)
    assert all(each.recompute == "full" for each in open_space.savings(True) if each.pass_order == "by_layer")
    closed = LayoutSpace(Job(compose([*MODEL, *GIVEN]), 2, VOCAB, "cuda"), frozenset(), 8)
    assert {(each.weights_device, each.pass_order) for each in closed.savings(True)} == {("device", "by_micro_batch")}
    on_host = compose([*MODEL, *GIVEN, "moe.weights_device=host", "optimizer.state_device=host"])
    given = LayoutSpace(Job(on_host, 2, VOCAB, "cuda"), frozenset({"moe.weights_device"}), 8)
    assert {each.weights_device for each in given.savings(True)} == {"host"}


def test_a_search_counts_memory_as_a_plan_does() -> None:
    config, fixed = _asked()
    hardware = machine(device__memory=2**33)
    space = LayoutSpace(Job(config, 4, VOCAB, hardware.kind), fixed, 8)
    sizer = LayoutSizer(space, memory_limits(config, 4, hardware).capacity)
    seen = 0
    for group in space.groups():
        for cell in list(space.cells(group))[:2]:
            for saving in [each for each in space.legal_savings(cell) if each.streams]:
                ranks = rank_memory(replace(space.job, config=space.layout(cell, saving)), capacity=sizer.capacity)
                found = sizer.memory(cell, saving)
                assert found.device == max(rank.total for rank in ranks), (cell, saving)
                assert (found.host, found.disk) == (max(rank.host for rank in ranks), max(rank.disk for rank in ranks))
                seen += 1
    assert seen > 40


def test_the_answer_has_keys_that_a_run_takes() -> None:
    config, fixed = _asked()
    answer = search_layout(Job(config, 2, VOCAB, "cuda"), machine(device__memory=16_000_000 / 0.9), fixed)
    assert answer.best.config.moe.weights_device == "host"
    assert "moe.weights_device=host" in answer.best.overrides
    validate(answer.best.config, 2)


def test_by_layer_comes_with_whole_layers_computed_again_and_one_stage() -> None:
    config = compose([*MODEL, *GIVEN, "training.pass_order=by_layer", "moe.weights_device=auto"])
    space = LayoutSpace(Job(config, 2, VOCAB, "cuda"), frozenset({"training.pass_order", "moe.weights_device"}), 8)
    assert {each.recompute for each in space.savings(True)} == {"full"}
    for group in space.groups():
        legal = space.legal_savings(next(space.cells(group)))
        assert all(each.pass_order == "by_layer" for each in legal) and bool(legal) == (group.pipeline == 1)
