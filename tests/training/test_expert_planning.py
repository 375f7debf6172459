"""Training with plans that the MoE layers choose themselves: same losses, every decision on record, budgets kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from base.errors import ConfigError
from configs.job import Job
from configs.schema import Config
from moe.planning import inputs
from moe.planning.footprint import memory_bytes
from moe.planning.planner import all_plans, rounded_up
from moe.planning.trial import TrialPolicy
from simulator.clock.hardware import load_hardware
from simulator.run_plan import make_plan
from tests.distributed import RankError, run
from tests.tolerances import FP32_LOSS
from tests.training.helpers import Lines, make_config, train, train_on_ranks

NUM_TRIED = 3
TINY = [
    "experiment=gpt_moe_tiny",
    "parallel.expert=2",
    "training.steps=8",
    "training.eval_interval=0",
    "checkpoint.interval=0",
]


def _plans(run_dir: Path) -> list[dict]:  # type: ignore[type-arg]
    return [json.loads(line) for line in (run_dir / "plans.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def fixed(data: list[str], tmp_path_factory: pytest.TempPathFactory) -> Lines:
    """The run with the plan of the config."""
    return train_on_ranks([*TINY, *data, f"run_dir={tmp_path_factory.mktemp('fixed')}"], 2)


def test_planned_runs_lose_the_same_and_record_every_decision(data: list[str], fixed: Lines, tmp_path: Path) -> None:
    auto = ["moe.pipeline_degree=auto", "moe.memory_strategy=auto", f"run_dir={tmp_path / 'auto'}"]
    planned = train_on_ranks([*TINY, *data, *auto], 2)
    for one, other in zip(fixed, planned, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=FP32_LOSS)
        assert other["moe_plan_seconds"] > 0
    costs, *lines = _plans(tmp_path / "auto")
    assert costs["costs"]["flat"]["exchange"]["beta"] >= 0 and len(costs["costs"]["flat"]["forward"]["seconds"]) > 1
    decisions = [line for line in lines if "load" in line]
    assert {"pairs", "expert_pairs"} <= decisions[0]["load"].keys() and "home_sum" in costs["costs"]["flat"]
    measured = [line for line in lines if "measured" in line]
    layers = sorted({line["layer"] for line in decisions})
    assert len(layers) > 1 and sorted({line["layer"] for line in measured}) == layers
    for line in decisions:
        assert min(line["predicted"].values()) > 0 and line["plan"]["degree"] >= 1
    for line in measured:
        assert sorted(line["measured"]) == ["backward", "forward"] and min(line["measured"].values()) > 0


def _train_with_a_trial(config: Config) -> Lines:
    """On a rank: plans that are far from the best by the model are tried too, in a single round."""
    policy = TrialPolicy(most_plans=NUM_TRIED, within=100.0, rounds=1, turns=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inputs, "trial_policy", lambda config: policy)
        return train(config)


def test_the_first_steps_try_plans_and_the_fastest_stays(data: list[str], fixed: Lines, tmp_path: Path) -> None:
    auto = ["moe.pipeline_degree=auto", "moe.memory_strategy=auto", f"run_dir={tmp_path / 'tried'}"]
    tried = run(_train_with_a_trial, 2, make_config([*TINY, *data, *auto], 2))[0]
    for one, other in zip(fixed, tried, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=FP32_LOSS)
    lines = _plans(tmp_path / "tried")
    first_steps, after = range(NUM_TRIED * TrialPolicy.steps), NUM_TRIED * TrialPolicy.steps
    started: dict[int, set[str]] = {}  # by step, of any layer
    for line in lines:
        if "load" in line:
            started.setdefault(line["step"], set()).add(json.dumps(line["plan"]))
    # All layers run one plan for some steps, then the next one.
    assert sorted(step for step in started if step < after) == list(first_steps[:: TrialPolicy.steps])
    of_trial = [started[step] for step in first_steps[:: TrialPolicy.steps]]
    assert all(len(plans) == 1 for plans in of_trial) and len(set.union(*of_trial)) == NUM_TRIED
    measured = [line for line in lines if "measured" in line and line["step"] <= after]
    assert {json.dumps(line["plan"]) for line in measured} == set.union(*of_trial)
    assert all(sorted(line["measured"]) == ["backward", "forward"] for line in measured)


def test_the_budget_decides_how_much_is_kept(data: list[str], tmp_path: Path) -> None:
    def plan(*overrides: str) -> dict:  # type: ignore[type-arg]
        run_dir = tmp_path / str(len(list(tmp_path.iterdir())))
        train_on_ranks(
            [*TINY, *data, "training.steps=1", "moe.memory_strategy=auto", f"run_dir={run_dir}", *overrides], 2
        )
        return next(line for line in _plans(run_dir) if "load" in line)

    free = plan("moe.pipeline_degree=2")
    assert free["plan"]["degree"] == free["plan"]["backward_degree"] == 2
    bytes_kept = free["predicted"]["memory"]
    tight = plan("moe.pipeline_degree=auto", f"moe.memory_budget={0.8 * bytes_kept / 2**20}")
    assert tight["predicted"]["memory"] <= 0.8 * bytes_kept


def test_a_budget_that_nothing_fits_is_refused(data: list[str], tmp_path: Path) -> None:
    with pytest.raises(RankError) as caught:
        train_on_ranks(
            [*TINY, *data, "moe.memory_strategy=auto", "moe.memory_budget=0.01", f"run_dir={tmp_path / 'run'}"], 2
        )
    error = caught.value.__cause__
    assert isinstance(error, ConfigError)
    assert "moe.memory_budget" in str(error) and "the least is" in str(error)


def _least_mib(config: Config, calls: int) -> float:
    """MiB of buffers that the leanest plan needs with so many calls at once."""
    load = rounded_up(inputs.layer_shape(config, "cpu").even())
    plans = all_plans(inputs.limits(config, "cpu", config.parallel.pipeline, 0), load.tokens)
    return min(memory_bytes(load, plan, calls) for plan in plans) / 2**20


def test_a_budget_counts_the_micro_batches_that_are_in_flight(data: list[str], tmp_path: Path) -> None:
    # Two stages of two chunks with a layer each, four micro-batches: the first stage is five passes ahead, the last one
    # three.
    layout = ["parallel.pipeline=2", "parallel.virtual_pipeline=2", "training.device=cpu"]
    overrides = [
        "experiment=gpt_moe_tiny",
        *data,
        *layout,
        "moe.memory_strategy=auto",
        "training.steps=1",
        "checkpoint=off",
    ]
    config = make_config(overrides, 2)
    assert [inputs.live_calls(config, 2, stage) for stage in (0, 1)] == [5, 3]
    # Room for the uneven load that the step is found to have, but not for 8 calls: 2 chunks times 4 micro-batches.
    fits = [*overrides, f"moe.memory_budget={_least_mib(config, 7)}", f"run_dir={tmp_path / 'fits'}"]
    assert len(train_on_ranks(fits, 2)) == 1
    with pytest.raises(RankError, match="5 calls at once"):
        train_on_ranks([*overrides, f"moe.memory_budget={_least_mib(config, 4)}", f"run_dir={tmp_path / 'not'}"], 2)


def test_a_plan_promises_only_what_the_run_may_choose(data: list[str], tmp_path: Path) -> None:
    overrides = ["experiment=gpt_moe_tiny", *data, "training.steps=1", "checkpoint=off", "training.device=cpu"]
    overrides += ["moe.memory_strategy=auto", f"data.cache_dir={tmp_path / 'cache'}", f"run_dir={tmp_path / 'run'}"]
    config = make_config(overrides)
    run(train, 1, config)  # measures the costs
    machine = load_hardware("cpu_emulated")
    assert make_plan(Job(config, 1, 384, "cpu"), hardware=machine).step is not None
    # Four layers hold something at once.
    config.moe.memory_budget = _least_mib(config, 4) + 0.01
    assert make_plan(Job(config, 1, 384, "cpu"), hardware=machine).step is not None
    config.moe.memory_budget = _least_mib(config, 3)
    with pytest.raises(ConfigError, match="4 calls at once") as of_plan:
        make_plan(Job(config, 1, 384, "cpu"), hardware=machine)
    with pytest.raises(RankError, match="4 calls at once") as of_run:
        run(train, 1, config)
    assert str(of_plan.value) == str(of_run.value.__cause__)


def test_a_deterministic_run_tries_nothing() -> None:
    config = make_config(["experiment=gpt_moe_tiny", "moe.pipeline_degree=auto"])
    assert inputs.trial_policy(config) == TrialPolicy()
    config.training.deterministic = True
    assert inputs.trial_policy(config).most_plans == 1
