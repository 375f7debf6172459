"""Training with plans that the MoE layers choose themselves: same losses, every decision on record, budgets kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from configs.schema import Config, ConfigError
from moe import trial
from moe.planner import Planner, close_plans
from tests.distributed import RankError, run
from tests.tolerances import FP32_LOSS
from tests.training.helpers import Lines, make_config, train, train_on_ranks
from training.callbacks.expert_planning import TRIAL_STEPS

NUM_TRIED = 3
TINY = ["experiment=gpt_moe_tiny", "parallel.expert=2", "training.steps=8", "training.eval_interval=0", "checkpoint.interval=0"]


def _plans(run_dir: Path) -> list[dict]:  # type: ignore[type-arg]
    return [json.loads(line) for line in (run_dir / "plans.jsonl").read_text().splitlines()]


def test_planned_runs_lose_the_same_and_record_every_decision(data: list[str], tmp_path: Path) -> None:
    fixed = train_on_ranks([*TINY, *data, f"run_dir={tmp_path / 'fixed'}"], 2)
    auto = ["moe.pipeline_degree=auto", "moe.memory_strategy=auto", f"run_dir={tmp_path / 'auto'}"]
    planned = train_on_ranks([*TINY, *data, *auto], 2)
    for one, other in zip(fixed, planned, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=FP32_LOSS)
        assert other["moe_plan_seconds"] > 0
    costs, *lines = _plans(tmp_path / "auto")
    assert costs["costs"]["flat"]["exchange"]["beta"] >= 0 and len(costs["costs"]["flat"]["forward"]["seconds"]) > 1
    decisions = [line for line in lines if "load" in line]
    measured = [line for line in lines if "measured" in line]
    layers = sorted({line["layer"] for line in decisions})
    assert len(layers) > 1 and sorted({line["layer"] for line in measured}) == layers
    for line in decisions:
        assert min(line["predicted"].values()) > 0 and line["plan"]["degree"] >= 1
    for line in measured:
        assert sorted(line["measured"]) == ["backward", "forward"] and min(line["measured"].values()) > 0


def _train_with_a_trial(config: Config) -> Lines:
    """On a rank: plans that are far from the best by the model are tried too, in a single round."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("ROUNDS", 1), ("TURNS", 1), ("MOST", NUM_TRIED)):
            patch.setattr(trial, name, value)
        patch.setattr(trial, "CLOSE", 100.0)
        patch.setattr(Planner, "close", lambda planner, load: close_plans(planner.costs, load, planner.limits, within=100.0))
        return train(config)


def test_the_first_steps_try_plans_and_the_fastest_stays(data: list[str], tmp_path: Path) -> None:
    fixed = train_on_ranks([*TINY, *data, f"run_dir={tmp_path / 'fixed'}"], 2)
    auto = ["moe.pipeline_degree=auto", "moe.memory_strategy=auto", f"run_dir={tmp_path / 'tried'}"]
    tried = run(_train_with_a_trial, 2, make_config([*TINY, *data, *auto], 2))[0]
    for one, other in zip(fixed, tried, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=FP32_LOSS)
    lines = _plans(tmp_path / "tried")
    first_steps, after = range(NUM_TRIED * TRIAL_STEPS), NUM_TRIED * TRIAL_STEPS
    begun: dict[int, set[str]] = {}  # by step, of any layer
    for line in lines:
        if "load" in line:
            begun.setdefault(line["step"], set()).add(json.dumps(line["plan"]))
    # All layers run one plan for some steps, then the next one.
    assert sorted(step for step in begun if step < after) == list(first_steps[::TRIAL_STEPS])
    of_trial = [begun[step] for step in first_steps[::TRIAL_STEPS]]
    assert all(len(plans) == 1 for plans in of_trial) and len(set.union(*of_trial)) == NUM_TRIED
    measured = [line for line in lines if "measured" in line and line["step"] <= after]
    assert {json.dumps(line["plan"]) for line in measured} == set.union(*of_trial)
    assert all(sorted(line["measured"]) == ["backward", "forward"] for line in measured)


def test_the_budget_decides_how_much_is_kept(data: list[str], tmp_path: Path) -> None:
    def plan(*overrides: str) -> dict:  # type: ignore[type-arg]
        run_dir = tmp_path / str(len(list(tmp_path.iterdir())))
        train_on_ranks([*TINY, *data, "training.steps=1", "moe.memory_strategy=auto", f"run_dir={run_dir}", *overrides], 2)
        return next(line for line in _plans(run_dir) if "load" in line)

    free = plan("moe.pipeline_degree=2")
    assert free["plan"]["degree"] == free["plan"]["backward_degree"] == 2
    bytes_kept = free["predicted"]["memory"]
    tight = plan("moe.pipeline_degree=auto", f"moe.memory_budget={0.8 * bytes_kept / 2**20}")
    assert tight["predicted"]["memory"] <= 0.8 * bytes_kept


def test_a_budget_that_nothing_fits_is_refused(data: list[str], tmp_path: Path) -> None:
    with pytest.raises(RankError) as caught:
        train_on_ranks([*TINY, *data, "moe.memory_strategy=auto", "moe.memory_budget=0.01", f"run_dir={tmp_path / 'run'}"], 2)
    error = caught.value.__cause__
    assert isinstance(error, ConfigError)
    assert "moe.memory_budget" in str(error) and "the least is" in str(error)
