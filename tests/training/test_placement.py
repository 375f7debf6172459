"""Trainings whose experts are computed at copies, beside those whose experts stay at home; and what they record."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from benchmarks.checks.placement_parity import PASSES, SCATTERED, Case, compare
from checkpoint.manifest import good_checkpoint_at
from checkpoint.state import read_state
from configs.job import Job
from configs.schema import Config
from moe.placement.plans import read_plans
from moe.placement.policy import ASSUMED
from moe.placement.quotas import Costs, ReplicaLimits, at_primaries
from moe.placement.trace import TraceHeader, read, read_header
from moe.placement_map import Integers, PlacementMap
from simulator.run_plan import make_plan
from tests import distributed
from tests.distributed import RankError
from tests.training.helpers import Lines, make_config, read_metrics, train, train_on_ranks
from training.callbacks.moe.routing_trace import RoutingTrace
from training.resilience.events import read as read_events

# All of them: python -m benchmarks.checks.placement_parity
# Few steps at a high rate: routers that no loss balances soon prefer some experts.
SKEWED = ["training.steps=4", "optimizer.lr=0.02", "optimizer.warmup_steps=0", "optimizer.schedule=constant"]
CASES = [
    Case("EP2", "flex", PASSES[5]),
    Case("EP4", SCATTERED, PASSES[1]),
    Case("DP2xPP2xEP2", "least_loaded", PASSES[2]),
    Case("DP2xPP2xVPP2xEP2", SCATTERED, PASSES[0]),
    Case("TP2+SPxEP2xETP1", "flex", PASSES[4]),
    Case("TP2+SPxEP2xETP2", "solve", PASSES[3]),
]


BITWISE = [
    Case("EP2", SCATTERED, PASSES[4], bitwise=True),
    Case("DP2xPP2xEP2", SCATTERED, PASSES[2], bitwise=True),
]


@pytest.mark.parametrize("case,more", zip(BITWISE, ([], ["training.precision=bf16"])), ids=["EP2", "DP2xPP2xEP2"])
def test_the_same_bits_whatever_the_placement(data: list[str], case: Case, more: list[str]) -> None:
    words = [*data, *SKEWED, "moe.num_experts=8", "moe.placement.interval=2", *more]
    row = compare(case, words)
    assert row.same and row.num_replicas > 0 and row.moved > 0, row


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.layout}, {case.policy}")
def test_copies_change_no_loss(data: list[str], case: Case) -> None:
    row = compare(case, [*data, *SKEWED])
    assert row.passed and row.num_replicas > 0, row
    assert case.policy == SCATTERED or row.placed < row.at_home


EARLY = ["optimizer.state_device=host", "optimizer.early_update=always", "training.global_batch_size=16"]


@pytest.mark.parametrize("layout", ["DP2xPP2xEP2"])
def test_copies_change_no_loss_where_updates_begin_early(data: list[str], layout: str) -> None:
    """What copies add is there before the buffer counts its gradient, and the update that follows it begins."""
    row = compare(Case(layout, SCATTERED, PASSES[0]), [*data, *SKEWED, *EARLY])
    assert row.passed and row.num_replicas > 0, row


def _full(counts_RE: Integers, placement: PlacementMap, costs: Costs, limits: ReplicaLimits) -> Integers:
    """Every slot has an expert of the next rank, which computes half of its assignments."""
    quotas_ER = at_primaries(counts_RE, placement)
    for rank in range(placement.num_ranks):
        for expert in placement.experts_of((rank + 1) % placement.num_ranks)[: limits.replica_slots]:
            home = placement.primary_ranks[expert]
            quotas_ER[expert, rank], rest = divmod(int(quotas_ER[expert, home]), 2)
            quotas_ER[expert, home] -= quotas_ER[expert, rank]
    return quotas_ER


def _train_full(config: Config) -> Lines:
    with mock.patch.dict("moe.placement.policy.POLICIES", {"solve": _full}):
        return train(config)


@pytest.mark.parametrize("more", [[], ["training.recompute=full", "training.precision=bf16"]], ids=["fp32", "bf16"])
def test_the_plan_s_bytes_of_copies_are_those_that_travel(data: list[str], tmp_path: Path, more: list[str]) -> None:
    words = [*data, *more, "experiment=gpt_moe_tiny", "parallel.expert=2", "moe.placement.policy=solve"]
    words += ["moe.placement.extra_slots=2", "training.micro_batch_size=2", "training.steps=2", "checkpoint=off"]
    config = make_config([*words, f"run_dir={tmp_path}", "training.device=cpu"], 2)
    planned = make_plan(Job(config, 2, 1000, "cpu")).communication[0]["expert_copies"]
    for line in distributed.run(_train_full, 2, config)[0]:
        found = line["placement"]
        assert found["sent_bytes"] == found["charged_bytes"] == 2 * planned > 0
        assert found["copies"] == found["returned"] == 2 * 2 * config.model.num_layers
    without = make_config(
        [
            *words,
            "moe.placement.policy=static",
            "moe.placement.extra_slots=0",
            f"run_dir={tmp_path}",
            "training.device=cpu",
        ],
        2,
    )
    assert make_plan(Job(without, 2, 1000, "cpu")).communication[0]["expert_copies"] == 0


def _loads(config: Config) -> tuple[Any, Any]:
    """By step and layer the loads that were planned with, and what this rank had in that step's call."""
    from moe import layer as layers
    from training.callbacks.moe.expert_planning import ExpertPlanning

    ran: list[tuple[int, int]] = []
    planned: list[dict[int, Any]] = []
    sizes_of, decide = layers.exchange_sizes, ExpertPlanning._decide

    def sizes(*arguments: Any) -> Any:
        found = sizes_of(*arguments)
        if torch.is_grad_enabled():
            received_rows = max(sum(found[0].received_rows), sum(found[0].sends.total_rows()))
            ran.append((sum(found[0].assignments.receive), received_rows))
        return found

    def deciding(self: Any, run: Any, loads: dict[int, Any]) -> None:
        planned.append({number: (load.assignments, load.token_rows) for number, load in loads.items()})
        decide(self, run, loads)

    with mock.patch.object(layers, "exchange_sizes", sizes), mock.patch.object(ExpertPlanning, "_decide", deciding):
        train(config)
    number = config.model.num_layers
    planned = planned[1:]  # the first is of an even load
    last = ran[-len(planned) * number :]  # before them calls are measured
    return planned, [last[first : first + number] for first in range(0, len(last), number)]


@pytest.mark.parametrize("top_k", [1, 2])
def test_the_degree_is_planned_for_the_load_that_runs(data: list[str], tmp_path: Path, top_k: int) -> None:
    """With experts in order it would be planned for a load that no rank has."""
    words = [*data, *SKEWED, "experiment=gpt_moe_tiny", "moe.aux_loss_coeff=0", "parallel.expert=2", "checkpoint=off"]
    words += ["moe.placement.policy=solve", "moe.placement.extra_slots=2", "moe.placement.interval=2"]
    words += [
        "moe.pipeline_degree=auto",
        "moe.num_experts=8",
        f"moe.top_k={top_k}",
        f"moe.normalize_top_k={str(top_k > 1).lower()}",
        f"run_dir={tmp_path}",
    ]
    words += ["training.micro_batch_size=4", "training.global_batch_size=8", "training.eval_interval=0"]
    config = make_config([*words, "training.device=cpu"], 2)
    (planned, *ran), (_, *other) = distributed.run(_loads, 2, config)
    assert len(planned) == 4
    for loads, here, there in zip(planned, *ran, *other, strict=True):
        assert loads == {number: tuple(map(max, *both)) for number, both in enumerate(zip(here, there, strict=True))}


def test_a_run_records_what_its_routers_chose(data: list[str], tmp_path: Path) -> None:
    words = [
        *data,
        "experiment=gpt_moe_tiny",
        "moe.placement.record=true",
        "training.recompute=full",
        f"run_dir={tmp_path}",
    ]
    words += ["parallel.expert=2", "training.micro_batch_size=2", "training.steps=3", "checkpoint.interval=2"]
    train_on_ranks(words, 2)
    assert read_header(tmp_path / "routing.trace").num_ranks == 2
    found = dict(read(tmp_path / "routing.trace"))
    assert list(found) == [1, 2, 3]
    for line in read_metrics(tmp_path):
        counts_LMRE = found[line["step"]]
        assert counts_LMRE.shape[2] == 2
        assert counts_LMRE.sum((1, 2)).tolist() == line["tokens_per_expert"]["counts"]


def test_steps_that_are_taken_again_stand_once(tmp_path: Path) -> None:
    run: Any = SimpleNamespace(progress=SimpleNamespace(step=0))
    trace = RoutingTrace()
    trace._path, trace._header = tmp_path / "routing.trace", TraceHeader("run", 2, 1, 1)
    trace._open(run)
    assert trace._writer is not None
    for step in (1, 2, 3):
        trace._writer.append(step, np.full((1, 1, 1, 2), step))
    run.progress.step = 1
    trace.on_rollback(run)
    trace._writer.append(2, np.full((1, 1, 1, 2), 7))
    trace.close()
    assert [(step, int(counts.max())) for step, counts in read(trace._path)] == [(1, 1), (2, 7)]


def test_plans_are_recorded_and_replayed(data: list[str], tmp_path: Path) -> None:
    common = [*data, *SKEWED, "experiment=gpt_moe_tiny", "moe.aux_loss_coeff=0", "parallel.expert=2"]
    common += ["moe.placement.extra_slots=2", "moe.placement.interval=2", "training.eval_interval=2"]
    first = ["moe.placement.policy=solve", "moe.placement.max_load=1.0", "moe.placement.record=true"]
    first += ["checkpoint.interval=2"]
    recorded = train_on_ranks([*common, *first, f"run_dir={tmp_path / 'first'}"], 2)
    path = tmp_path / "first" / "placement_0_0.plans"
    plans = read_plans(path)
    assert sorted(plans.calls) == [0, 1, 2, 3]
    assert all(sorted(of_layer) == [1, 2, 3, 4] for of_layer in plans.calls.values())
    assert any(line["placement"]["copies"] for line in recorded)
    assert recorded[1]["placement"]["moved"] > 0 and [header.step for header in plans.headers] == [1, 3]
    assert [list(homes) for homes in plans.headers[1].primaries.values()] == recorded[1]["placement"]["homes"]
    again = ["moe.placement.policy=solve", f"moe.placement.replay={tmp_path / 'first'}", "checkpoint=off"]
    replayed = train_on_ranks([*common, *again, f"run_dir={tmp_path / 'again'}"], 2)
    for key in ("loss", "grad_norm"):
        assert [line.get(key) for line in replayed] == [line.get(key) for line in recorded]
    for key in ("placed", "copies", "moved"):
        assert [line["placement"][key] for line in replayed] == [line["placement"][key] for line in recorded]
    for number, (more, said) in enumerate(
        (
            ("training.steps=5", "step 5, layer 0, call 0 is not in the file"),  # before the first step
            ("moe.placement.interval=3", r"step 3, layer \d: the primary of expert \d was on rank"),
        )
    ):
        taken = tmp_path / f"refused{number}" / "metrics.jsonl"
        with pytest.raises(RankError, match=f"moe.placement.replay: {path}: {said}") as caught:
            train_on_ranks([*common, *again, more, f"run_dir={taken.parent}"], 2)
        assert ("RejectedRun" if "step 3" in said else "ConfigError") in str(caught.value)
        assert "(rank 0)" in str(caught.value)
        assert len(taken.read_text().splitlines() if taken.exists() else []) == (2 if "step 3" in said else 0)


def test_auto_has_copies_where_they_pay_and_goes_on_so(data: list[str], tmp_path: Path) -> None:
    common = [*data, *SKEWED, "experiment=gpt_moe_tiny", "moe.aux_loss_coeff=0", "parallel.expert=2"]
    common += ["moe.placement.policy=auto", "moe.placement.extra_slots=2", "moe.placement.interval=0"]
    whole = train_on_ranks([*common, f"run_dir={tmp_path / 'whole'}", "checkpoint=off"], 2)
    placed = [line["placement"] for line in whole]
    assert placed[0]["placed"] is None and placed[0]["copies"] == 0  # nothing is known before the first step
    assert any(each["placed"] is not None and each["placed"] < each["at_home"] for each in placed[1:])
    for steps in (2, 4):
        train_on_ranks([*common, f"run_dir={tmp_path / 'parts'}", f"training.steps={steps}"], 2)
    assert [(line["loss"], line["placement"]) for line in read_metrics(tmp_path / "parts")] == [
        (line["loss"], line["placement"]) for line in whole
    ]


def test_a_limit_is_kept_or_said_and_counted_or_ends_the_run_with_all_saved(data: list[str], tmp_path: Path) -> None:
    common = [*data, *SKEWED, "experiment=gpt_moe_tiny", "moe.aux_loss_coeff=0", "parallel.expert=2"]
    common += ["moe.placement.policy=solve", "moe.placement.extra_slots=1", f"run_dir={tmp_path}"]
    blocks = ["moe.placement.bitwise=true", "moe.placement.block_rows=64"]
    kept = train_on_ranks([*common, *blocks, "moe.placement.max_load=1.3", "checkpoint=off"], 2)
    for line in kept:
        assert max(line["placement"]["ranks_placed"]) <= 1.3 and line["placement"]["placed"] <= 1.3
        assert line["placement"]["over_calls"] == 0 and line["placement"]["over_worst"] is None
    hard = [*common, *blocks, "moe.placement.max_load=1.0", f"run_dir={tmp_path / 'hard'}", "checkpoint.interval=0"]
    words = (
        r"max_load \(1.0\) was exceeded: in step 1 .* in \d+ calls; .* The run is saved after step 1. To continue, set"
    )
    with pytest.raises(RankError, match=words):
        train_on_ranks([*hard, "moe.placement.over_limit=stop"], 2)
    # A launcher that starts it again does not take it on.
    with pytest.raises(RankError, match=r"max_load \(1.0\) was exceeded: in step 1 .* To continue, set"):
        train_on_ranks([*hard, "moe.placement.over_limit=stop"], 2)
    saved = good_checkpoint_at(tmp_path / "hard")
    assert saved is not None and saved.name == "step_0000001"
    assert [event["kind"] for event in read_events(tmp_path / "hard")].count("over_limit") == 1
    soft = train_on_ranks(hard, 2)
    assert [line["step"] for line in soft] == [2, 3, 4]
    placements = [line["placement"] for line in soft if line["placement"]["over_calls"]]
    assert placements and all(1 < each["over_worst"] < 1.3 for each in placements)
    # It was said at the stop, and is said once.
    assert [event["kind"] for event in read_events(tmp_path / "hard")].count("over_limit") == 1


def test_measured_costs_are_those_of_the_first_start_that_asks(
    data: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    common = [
        *data,
        *SKEWED,
        "experiment=gpt_moe_tiny",
        "parallel.expert=2",
        "parallel.pipeline=2",
        f"run_dir={tmp_path}",
    ]
    common += ["moe.placement.policy=auto", "moe.placement.extra_slots=2"]
    common += ["model.num_layers=2", "moe.layers=[0,1]"]  # the first stage has no experts
    found = []
    for steps, costs in enumerate(("assumed", "measured", "measured"), 1):
        train_on_ranks([*common, f"training.steps={steps}", f"moe.placement.costs={costs}"], 4)
        state = read_state(good_checkpoint_at(tmp_path))["callbacks"]["home_moves"]
        assert state["costs_asked"] == costs
        said = [line for line in capfd.readouterr().out.splitlines() if "placement costs:" in line]
        assert len(said) == (costs == "measured")
        assert all(f"{state['costs']['copy_in_node']} for a replica inside a node" in line for line in said)
        found.append((state["costs"], said))
    assert found[0][0] == ASSUMED["cpu"].as_dict() and found[1][0] == found[2][0]
    assert "at an earlier start" not in found[1][1][0] and "at an earlier start" in found[2][1][0]
