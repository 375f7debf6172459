"""Where a plan puts optimizer state, against where a run has it, and what it refuses."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from base.errors import ConfigError
from benchmarks.speed.plan_accuracy import EXPERT_CASES, KINDS, SMALL, TIER_CASES, Case, compare
from configs.job import Job
from models.blueprint import model_chunks
from simulator.buffers import buffers
from simulator.offload.state import planned_slices
from simulator.parameters import parameters, rank_coordinates
from simulator.run_plan import RunPlan, make_plan, refuse_what_cannot_fit
from simulator.text import text
from tests import distributed
from tests.configs import advice
from tests.training.helpers import make_config

VOCAB_SIZE = 1000
TIERED = ["training.device=cpu", "optimizer.state_device=host", "parallel.overlap_grad_reduce=true"]
LATENT = [
    f"model.{key}"
    for key in ("attention=latent", "head_dim=16", "rotary_head_dim=8", "value_head_dim=16", "kv_lora_rank=32")
]
LAYOUTS: list[tuple[str, list[str]]] = [
    ("gpt_moe_tiny", ["parallel.tensor=2", "parallel.sequence=true", "parallel.expert=2", "model.linear_bias=true"]),
    ("gpt_tiny", ["parallel.tensor=2", "parallel.sequence=true", "parallel.pipeline=2", "model.qk_norm=true"]),
    ("gpt_tiny", ["parallel.tensor=2", "parallel.sequence=true", "model.q_lora_rank=48", *LATENT]),
    ("gpt_tiny", ["parallel.tensor=2", "model.position_embedding=learned"]),
    ("gpt_moe_tiny", ["parallel.pipeline=2", "parallel.virtual_pipeline=2", "model.num_layers=4"]),
    ("gpt_moe_tiny", ["parallel.tensor=2", "parallel.sequence=true", "parallel.expert=2", "parallel.expert_tensor=2"]),
    ("bert_tiny", ["parallel.tensor=2", "parallel.sequence=true"]),
    ("bert_tiny", ["parallel.pipeline=2"]),
]


def _owned(config: Any) -> list[tuple[int, int, bool, Any]]:
    from parallel import topology
    from parallel.megatron.offloaded import owned_slices
    from training.engine import Engine

    model = Engine(config, topology.initialize(config), VOCAB_SIZE)
    found = [
        (each.start, each.end, each.reduced_at_step_end, each.bucket_key)
        for each in owned_slices(model.optimizer, model.chunks)
    ]
    model.close()
    return found


def _numbered(slices: list[tuple[int, int, bool, Any]]) -> list[tuple[int, int, bool, int]]:
    """With places in the order in which they come."""
    seen: dict[Any, int] = {}
    return [(start, end, at_end, seen.setdefault(key, len(seen))) for start, end, at_end, key in slices]


@pytest.mark.parametrize(("model", "layout"), LAYOUTS)
def test_slices_are_those_that_a_rank_owns(model: str, layout: list[str]) -> None:
    config = make_config([f"experiment={model}", *TIERED, *layout], 4)
    built = distributed.run(_owned, 4, config)
    for coordinates in rank_coordinates(config, 4):
        local = [parameters(config, chunk, VOCAB_SIZE) for chunk in model_chunks(config)[coordinates.stage]]
        static = buffers(Job(config, 4, VOCAB_SIZE, "cpu"), coordinates.stage)
        planned = planned_slices(static, local, {"dense": coordinates.data, "expert": coordinates.expert_data})
        named = [(each.start, each.end, each.reduced_at_step_end, each.bucket_key) for each in planned]
        assert _numbered(named) == _numbered(built[coordinates.rank])


MEMORY = 0.10  # bound of the plan's error
BY_NAME = {case.layout: case for case in (*TIER_CASES, *EXPERT_CASES)}
MEASURED = [
    *("host by host, PP2, fp16", "host, EP2, bf16", "auto, device, host and disk"),
    *("experts on host, EP2, bf16", "experts on disk, DP2 in parts, by layer, bf16"),
]


@pytest.mark.parametrize("case", [BY_NAME[name] for name in MEASURED], ids=lambda case: case.layout)
def test_tiers_take_what_the_plan_says(case: Case) -> None:
    result = compare(case)
    assert result["planned"]["host"] > 0
    for kind in KINDS:
        assert result["planned"][kind] == pytest.approx(result["measured"][kind], rel=MEMORY, abs=SMALL), kind


# ---------------------------------------------------------------------------------------------------------------------
# What fits
# ---------------------------------------------------------------------------------------------------------------------


def _plan(*overrides: str, ranks: int = 1) -> RunPlan:
    small = ["experiment=gpt_tiny", "training.device=cpu", "optimizer.bucket_parameters=16384"]
    return make_plan(Job(make_config([*small, *overrides], ranks), ranks, VOCAB_SIZE, "cpu"))


@pytest.mark.parametrize(
    "overrides",
    [
        ["optimizer.state_device=host"],
        ["optimizer.state_device=host", "optimizer.engine=host", "parallel.overlap_grad_reduce=true"],
        ["optimizer.state_device=host", "optimizer.early_update=always", "parallel.overlap_grad_reduce=true"],
        ["optimizer.state_device=auto", "training.memory_limit_gib=0.0075"],
        ["optimizer.state_device=auto", "training.memory_limit_gib=0.0075", "memory.disk_dir=/var/tmp"],
        ["optimizer.state_device=disk", "memory.disk_dir=/var/tmp"],
    ],
)
def test_what_no_tier_holds_is_refused_with_the_least_that_would(overrides: list[str]) -> None:
    plan = _plan(*overrides, "memory.host_budget=0.05", "memory.disk_budget=1000")
    with pytest.raises(ConfigError, match=r"memory\.host_budget \(0\.05\) must leave [\d.]+ MiB for") as refusal:
        refuse_what_cannot_fit(plan)
    least = int(str(refusal.value).rpartition("memory.host_budget=")[2])
    refuse_what_cannot_fit(_plan(*overrides, f"memory.host_budget={least}", "memory.disk_budget=1000"))
    if least > 1:
        with pytest.raises(ConfigError):
            refuse_what_cannot_fit(_plan(*overrides, f"memory.host_budget={least - 1}", "memory.disk_budget=1000"))


MIXTRAL = ["experiment=mixtral_8x7b", "training.device=cuda", "optimizer.state_device=auto"]
MIXTRAL += ["optimizer.bucket_parameters=16777216"]
OFFLOADED = ["training.recompute=full", "training.activation_offload=auto", "training.micro_batch_size=1"]


@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        (32, [*MIXTRAL, "training.memory_limit_gib=30", "memory.host_budget=1000"]),
        (4, ["parallel.pipeline=4", "optimizer.state_device=auto", "training.memory_limit_gib=0.005"]),
        (2, ["parallel.pipeline=2", *OFFLOADED, "optimizer.state_device=host"]),
        (1, [*OFFLOADED, "optimizer.state_device=host", "training.activation_offload=9"]),
        (2, [*OFFLOADED, "optimizer.state_device=disk", "memory.disk_dir=/var/tmp", "memory.disk_budget=0.1"]),
        (2, ["optimizer.state_device=disk", "memory.disk_dir=/var/tmp", "memory.disk_budget=0.1"]),
    ],
)
def test_budgets_that_are_proposed_are_enough(ranks: int, overrides: list[str]) -> None:
    """Each by itself, for every rank, and all that is too small at once."""
    words = [*([] if "memory.host_budget" in overrides[-1] else ["memory.host_budget=0.05"]), *overrides]
    with pytest.raises(ConfigError) as caught:
        refuse_what_cannot_fit(_plan(*words, ranks=ranks))
    field, alternatives = advice.split(str(caught.value))
    assert field == "memory.host_budget" and len(alternatives) == 1
    refuse_what_cannot_fit(_plan(*words, *alternatives[0], ranks=ranks))


@pytest.mark.parametrize("command", [["experiment=gpt_moe_small"], ["model=gpt_moe_tiny"], ["model=bert_tiny"]])
def test_slots_are_a_part_of_the_state_that_they_serve(command: list[str]) -> None:
    """The documented first commands, with the default size of a bucket."""
    more = [*command, "training.device=cpu", "parallel.overlap_grad_reduce=true"]
    at_home = make_plan(Job(make_config(more, 1), 1, VOCAB_SIZE, "cpu")).worst
    plan = make_plan(Job(make_config([*more, "optimizer.state_device=host"], 1), 1, VOCAB_SIZE, "cpu"))
    assert plan.worst.arrangement is not None
    assert plan.worst.optimizer == plan.worst.arrangement.device_bytes < at_home.optimizer / 2
    assert "this saves " in text(plan) and "the host's memory too" in text(plan)


def test_a_plan_says_where_a_tier_saves_nothing() -> None:
    plan = _plan("optimizer.state_device=auto")
    assert "this saves nothing" in text(plan)


def test_what_the_disk_cannot_hold_is_refused() -> None:
    disk = ["optimizer.state_device=disk", "memory.disk_dir=/var/tmp"]
    with pytest.raises(ConfigError, match=r"memory\.disk_budget \(0\.1\) .* Try memory\.disk_budget=3"):
        refuse_what_cannot_fit(_plan(*disk, "memory.disk_budget=0.1"))


def test_a_full_device_is_told_of_the_other_targets() -> None:
    plan = _plan("model.num_layers=16", "training.micro_batch_size=1", "training.recompute=full")
    plan.job.config.training.memory_limit_gib = (plan.worst.total - plan.worst.optimizer / 2) / 2**30
    with pytest.raises(
        ConfigError, match=r"set optimizer\.state_device=host, so that each rank needs at most .* of the host"
    ):
        refuse_what_cannot_fit(plan)


def test_the_budget_decides_what_may_leave_early() -> None:
    early = ["optimizer.state_device=host", "optimizer.engine=device_stream", "parallel.overlap_grad_reduce=true"]
    roomy, tight = _plan(*early).worst.arrangement, _plan(*early, "memory.host_budget=5").worst.arrangement
    assert roomy is not None and tight is not None
    assert roomy.early_share == 1.0 and tight.early_share == 0.0
    assert tight.host_bytes < 5 * 2**20 < roomy.host_bytes


def test_the_device_keeps_what_the_forward_pass_needs_first() -> None:
    found = _plan("optimizer.state_device=auto", "training.memory_limit_gib=0.0075").worst
    assert found.arrangement is not None and found.total <= 0.0075 * 2**30
    tiers = list(found.arrangement.targets)
    assert 0 < tiers.count("device") < len(tiers) and tiers == sorted(tiers)
    assert set(_plan("optimizer.state_device=auto").worst.arrangement.targets) == {"device"}  # type: ignore[union-attr]


def test_a_plan_says_where_state_lies() -> None:
    from simulator.text import text

    config = ["optimizer.state_device=host", "parallel.overlap_grad_reduce=true", "memory.host_budget=64"]
    plan = _plan(*config)
    shown, kept = text(plan), plan.as_dict()["memory_per_rank"][0]
    assert "host     " in shown and "of 64.00 MiB (memory.host_budget)" in shown
    assert "at least 100.0% of the gradients can be offloaded" in shown
    assert "it takes" not in shown  # on a CPU there is no link whose rate could be assumed
    assert "(assumed) it takes" in text(dataclasses.replace(plan, job=dataclasses.replace(plan.job, device="cuda")))
    assert kept["host"] == plan.worst.host == sum(kept["host_parts"].values())
    assert kept["optimizer"] == plan.worst.arrangement.device_bytes  # type: ignore[union-attr]
