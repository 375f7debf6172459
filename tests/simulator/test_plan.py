"""What a plan says against what is built and what a step takes, and what it refuses."""

from __future__ import annotations

import copy
import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from base.errors import ConfigError
from benchmarks.speed.plan_accuracy import CASES, SMALL, Case, compare
from configs.job import Job
from configs.schema import Config
from configs.validate import planned_world_size
from memory import host_memory
from parallel.pipeline import passes
from simulator.clock.hardware import load_hardware
from simulator.memory import KINDS
from simulator.memory_tape import OperationBytes, Tape, profile, recomputed
from simulator.parameters import rank_coordinates
from simulator.run_plan import RunPlan, make_plan, refuse_what_cannot_fit, refuse_what_the_host_cannot_hold
from tests import distributed
from tests.training.helpers import make_config, train, train_on_ranks
from tests.waits import LONG

ROOT = Path(__file__).resolve().parents[2]
MEMORY, FLOPS = 0.10, 0.01  # bounds of the plan's error


# ---------------------------------------------------------------------------------------------------------------------
# Against what is there
# ---------------------------------------------------------------------------------------------------------------------

LATENT = [
    f"model.{key}"
    for key in ("attention=latent", "head_dim=16", "rotary_head_dim=8", "value_head_dim=16", "kv_lora_rank=32")
]
SHARED = ["moe.shared_expert_ffn_hidden_size=64"]
MEASURED = [
    CASES[0],
    Case(
        "bert_moe_tiny",
        "",
        4,
        ("parallel.tensor=2", "parallel.sequence=true", "parallel.pipeline=2", "model.sequence_length=256"),
    ),
    Case(
        "gpt_moe_tiny",
        "",
        4,
        ("parallel.pipeline=2", "parallel.expert=2", "training.precision=bf16", "model.sequence_length=128"),
    ),
    Case(
        "gpt_tiny",
        "",
        2,
        ("optimizer.distributed=false", "training.recompute=full", "model.tie_embeddings=false", "model.qk_norm=true"),
    ),
    Case("gpt_tiny", "", 2, ("parallel.tensor=2", *LATENT, "model.sliding_window=16", "model.sequence_length=128")),
    Case("gpt_tiny", "", 1, ("training.token_tile=16", "training.precision=bf16", "model.normalization=layernorm")),
    Case(
        "gpt_tiny",
        "",
        1,
        (
            *("training.recompute=full", "training.token_tile=64", "model.ffn_hidden_size=2048"),
            *("model.sequence_length=256", "training.micro_batch_size=4", "training.precision=bf16"),
        ),
    ),
    Case("bert_tiny", "", 2, ("training.token_tile=16", "parallel.tensor=2", "parallel.sequence=true")),
    Case(
        "bert_tiny", "", 1, ("training.recompute=selective", "model.attention_dropout=0.1", "model.hidden_dropout=0.1")
    ),
]


@pytest.mark.parametrize("case", MEASURED, ids=lambda case: case.preset)
def test_memory_and_operations_are_those_of_a_step(case: Case) -> None:
    result = compare(case)
    for kind in KINDS:
        planned, measured = result["planned"][kind], result["measured"][kind]
        assert planned == pytest.approx(measured, rel=MEMORY, abs=SMALL), (kind, result["ratios"])
    for planned, measured in result["by_rank"]:
        assert planned == pytest.approx(measured, rel=MEMORY, abs=SMALL), result["by_rank"]
    assert result["flops_ratio"] == pytest.approx(1.0, rel=FLOPS)


def _plan(experiment: str, *overrides: str, device: str = "cuda") -> RunPlan:
    from configs.compose import compose
    from data.tokenizer import expected_vocab_size

    config = compose([f"experiment={experiment}", *overrides])
    return make_plan(Job(config, planned_world_size(config, 1), expected_vocab_size(config), device))


# Published: GPT-2's paper and weights, arXiv:2407.21783, arXiv:2401.04088, arXiv:2505.09388.
PUBLISHED = {
    "gpt2_124m": (124_439_808, 124_439_808),
    "llama3_8b": (8_030_261_248, 8_030_261_248),
    "mixtral_8x7b": (46_702_792_704, 12_879_925_248),
    "qwen3_30b_a3b": (30_532_122_624, 3_353_032_704),
}


@pytest.mark.parametrize("experiment", PUBLISHED)
def test_parameters_are_the_published_ones(experiment: str) -> None:
    for overrides in ([], ["parallel=single"]):
        plan = _plan(experiment, *overrides)
        assert (plan.total_parameters, plan.active_parameters) == PUBLISHED[experiment]


def _topology_coordinates(config: Any) -> tuple[int, ...]:
    from parallel import topology

    axes = topology.initialize(config)
    context = axes.context.rank, axes.data_context.rank
    return axes.rank, axes.tensor.rank, axes.data.rank, *context, axes.pipeline.rank, axes.expert.rank


@pytest.mark.parametrize(
    "layout",
    [
        ["parallel.tensor=2", "parallel.sequence=true", "parallel.expert=2"],
        ["parallel.pipeline=2", "parallel.expert=2"],
        ["parallel.tensor=2", "parallel.sequence=true", "parallel.expert=2", "parallel.expert_tensor=2"],
        ["parallel.context=2", "parallel.expert=4"],
        ["parallel.context=2", "parallel.tensor=2", "parallel.sequence=true", "parallel.expert=2"],
    ],
)
def test_places_are_those_of_the_process_groups(layout: list[str]) -> None:
    config = make_config(["experiment=gpt_moe_tiny", *layout], 4)
    expected = distributed.run(_topology_coordinates, 4, config)
    found = [
        (p.rank, p.tensor, p.data, p.context, p.data_context, p.stage, p.expert) for p in rank_coordinates(config, 4)
    ]
    assert found == expected


@pytest.mark.parametrize(("pipeline", "chunks", "micro_batches"), [(2, 2, 4), (4, 2, 8), (2, 3, 2)])
def test_interleaved_schedule_is_megatrons(pipeline: int, chunks: int, micro_batches: int) -> None:
    from megatron.core.pipeline_parallel.schedules import get_schedule_table

    layers = pipeline * chunks
    overrides = [f"model.num_layers={layers}", f"parallel.pipeline={pipeline}", f"parallel.virtual_pipeline={chunks}"]
    config = make_config(["experiment=gpt_tiny", *overrides], pipeline)
    table = [chunk for _, chunk in get_schedule_table(micro_batches, chunks, pipeline)]
    for stage in range(pipeline):
        order = list(passes(config, micro_batches, stage))
        assert [chunk for is_forward, chunk in order if is_forward] == table
        assert [chunk for is_forward, chunk in order if not is_forward] == [chunks - 1 - chunk for chunk in table]
        ahead = max(sum(1 if is_forward else -1 for is_forward, _ in order[: i + 1]) for i in range(len(order)))
        assert ahead == min(micro_batches * chunks, 2 * (pipeline - stage - 1) + (chunks - 1) * pipeline + 1)


class _Collectives(TorchDispatchMode):
    """Bytes that this rank sends in the collectives of torch.distributed that are called, by ring algorithms."""

    TIMES = {"allreduce_": 2, "_allgather_base_": 1, "_reduce_scatter_base_": 1, "reduce_scatter_tensor_coalesced_": 1}

    def __init__(self) -> None:
        super().__init__()
        self.sent = 0.0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = str(function).removesuffix(".default").partition(".")
        if namespace == "c10d" and name in (*self.TIMES, "send"):
            leaves = tree_leaves(args)
            most = max(leaf.numel() * leaf.element_size() for leaf in leaves if isinstance(leaf, torch.Tensor))
            (ranks,) = (
                dist.ProcessGroup.unbox(leaf).size()
                for leaf in leaves
                if isinstance(leaf, torch.ScriptObject) and _is_group(leaf)
            )
            self.sent += most if name == "send" else self.TIMES[name] * (ranks - 1) / ranks * most
        return function(*args, **(kwargs or {}))


def _is_group(leaf: Any) -> bool:
    return "ProcessGroup" in str(leaf._type())


def _sent(config: Any) -> float:
    from parallel import topology
    from training.engine import Engine
    from training.starting.dry_run import made_up_batches
    from training.step import train_step

    model = Engine(config, topology.initialize(config), 1000)
    count = config.training.global_batch_size // (config.training.micro_batch_size * model.topology.data.size)
    batches = made_up_batches(config, count, 1000, seed=model.topology.data.rank)
    train_step(model, batches, 1)
    with _Collectives() as collectives:
        train_step(model, batches, 2)
    model.close()
    return collectives.sent


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("gpt_tiny", ["parallel.tensor=2"]),
        ("gpt_tiny", ["parallel.tensor=2", "parallel.sequence=true", "training.recompute=full"]),
        (
            "gpt_tiny",
            ["parallel.tensor=2", "parallel.sequence=true", "model.position_embedding=learned", "model.num_layers=1"],
        ),
        ("bert_tiny", ["parallel.tensor=2", "parallel.sequence=true"]),
        ("gpt_moe_tiny", ["parallel.tensor=2", "parallel.sequence=true", "training.recompute=full", *SHARED]),
        ("gpt_tiny", ["parallel.tensor=2", *LATENT]),
        ("gpt_tiny", ["parallel.tensor=2", "parallel.sequence=true", "model.q_lora_rank=48", *LATENT]),
        ("gpt_moe_tiny", ["parallel.expert=2", "moe.top_k=4"]),  # all experts: so all are equally busy
        ("gpt_moe_tiny", ["parallel.tensor=2", "parallel.sequence=true", "moe.num_experts=16", "model.num_layers=1"]),
        ("bert_tiny", ["parallel.pipeline=2", "training.precision=bf16"]),
    ],
)
def test_communication_is_what_collectives_move(model: str, layout: list[str]) -> None:
    config = make_config([f"experiment={model}", "training.device=cpu", *layout], 2)
    plan = make_plan(Job(config, 2, 1000, "cpu"))
    for stage, sent in enumerate(distributed.run(_sent, 2, config)):
        planned = plan.communication[stage if config.parallel.pipeline > 1 else 0]
        assert sum(planned.values()) == pytest.approx(sent, rel=0.02)  # norms, counts and losses beside


@pytest.mark.parametrize("policy", ["probs", "position"])
def test_what_capacity_adds_to_communication(policy: str) -> None:
    layout = ["parallel.tensor=2", "parallel.sequence=true", "training.recompute=full", f"moe.drop_policy={policy}"]
    sent, planned = [], []
    for factor in ("null", "0.3"):
        overrides = ["experiment=gpt_moe_tiny", "training.device=cpu", f"moe.capacity_factor={factor}", *layout]
        config = make_config([*overrides, "model.num_layers=1"], 2)
        sent.append(distributed.run(_sent, 2, config)[0])
        planned.append(sum(make_plan(Job(config, 2, 1000, "cpu")).communication[0].values()))
    assert planned[1] - planned[0] == sent[1] - sent[0] > 0


def test_step_time_is_predicted_from_measured_costs(data: list[str], tmp_path: Path) -> None:
    overrides = [
        "experiment=gpt_moe_tiny",
        *data,
        "moe.pipeline_degree=auto",
        "training.steps=1",
        "checkpoint=off",
        "training.device=cpu",
    ]
    cache, machine = f"data.cache_dir={tmp_path / 'cache'}", load_hardware("cpu_emulated")
    config = make_config([*overrides, cache, f"run_dir={tmp_path / 'run'}"])
    wider = make_config([*overrides, cache, "moe.ffn_hidden_size=256"])

    def predicted(config: Config) -> float:
        step = make_plan(Job(config, 1, 384, "cpu"), hardware=machine).step
        assert step is not None and sum(step.reasons.values()) == pytest.approx(step.seconds)
        return step.seconds

    before = predicted(config), predicted(wider)
    assert make_plan(Job(config, 1, 384, "cpu")).step is None  # without a machine
    distributed.run(train, 1, config)
    assert predicted(config) != before[0]
    assert predicted(wider) == before[1]  # other layers than those that were measured
    named = make_config([*overrides, cache, "hardware=cpu_emulated"])
    assert predicted(named) == before[0]  # another machine than this one, for all that is known


# ---------------------------------------------------------------------------------------------------------------------
# The tape
# ---------------------------------------------------------------------------------------------------------------------


def test_tape_holds_what_autograd_holds() -> None:
    tape = Tape()
    x = tape.new(100)
    hidden = tape.apply(400, [x], keeps=[x], takes=OperationBytes(weight=1000))
    active = tape.apply(400, [hidden], keeps=[hidden])
    tape.drop(hidden)
    output = tape.apply(100, [active], keeps=[active], takes=OperationBytes(weight=1000))
    tape.drop(active)
    assert (tape.now, tape.peak) == (1000, 1000)
    tape.peak = 0
    tape.backward(output)
    # The output and its gradient, x, both hidden tensors, the gradient of the active one and of the weight.
    assert tape.peak == 100 + 100 + 100 + 800 + 400 + 1000
    assert tape.now == 200  # x and the output, which the caller holds


def test_recomputation_keeps_inputs_alone() -> None:
    def block(tape: Tape, x: Any) -> Any:
        hidden = tape.apply(400, [x], keeps=[x])
        output = tape.apply(100, [hidden], keeps=[hidden])
        tape.drop(hidden)
        return output

    tape = Tape()
    x = tape.new(100)
    outer = profile(lambda inner, x: recomputed(inner, block, x), x)
    plain = profile(block, x)
    assert (plain.kept, outer.kept) == (500, 100)
    assert outer.forward == plain.forward == 500  # at its most, the first run too has the hidden tensor


# ---------------------------------------------------------------------------------------------------------------------
# What fits
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "overrides", "fix"),
    [
        ("gpt_tiny", ["training.global_batch_size=32", "training.micro_batch_size=32"], "training.micro_batch_size"),
        (
            "gpt_moe_tiny",
            ["training.micro_batch_size=1", "model.num_layers=16", "model.sequence_length=256"],
            "training.recompute",
        ),
    ],
)
def test_what_cannot_fit_is_refused_with_what_would(model: str, overrides: list[str], fix: str) -> None:
    config = make_config([f"experiment={model}", "training.device=cpu", *overrides])
    plan = make_plan(Job(config, 1, 512, "cpu"))
    refuse_what_cannot_fit(plan)  # no limit
    static = plan.worst.total - plan.worst.activations
    config.training.memory_limit_gib = (static + 0.4 * plan.worst.activations) / 2**30
    with pytest.raises(ConfigError, match=rf"training\.memory_limit_gib is .* Try {fix}=") as refusal:
        refuse_what_cannot_fit(plan)
    changed = copy.deepcopy(config)
    for item in str(refusal.value).partition("Try ")[2].split():
        key, _, value = item.partition("=")
        if value:
            setattr(changed.training, key.removeprefix("training."), int(value) if value.isdigit() else value)
    refuse_what_cannot_fit(make_plan(Job(changed, 1, 512, "cpu")))
    assert changed.training != config.training
    if fix == "training.micro_batch_size":  # the largest that fits: the next one does not
        changed.training.micro_batch_size *= 2
        with pytest.raises(ConfigError):
            refuse_what_cannot_fit(make_plan(Job(changed, 1, 512, "cpu")))
    config.training.memory_limit_gib = static / 2 / 2**30
    with pytest.raises(ConfigError, match="more ranks"):
        refuse_what_cannot_fit(plan)


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_the_host_cannot_hold_is_refused(monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    config = make_config(
        ["experiment=gpt_tiny", "training.device=cpu", "training.global_batch_size=32", "training.micro_batch_size=16"]
    )
    plan = make_plan(Job(config, ranks, 512, "cpu"))
    for name, value in (
        ("RANK", ranks - 1),
        ("WORLD_SIZE", ranks),
        ("LOCAL_RANK", ranks - 1),
        ("LOCAL_WORLD_SIZE", ranks),
    ):
        monkeypatch.setenv(name, str(value))
    needed = sum(rank.total for rank in plan.memory)

    def limit(num_bytes: float) -> None:
        monkeypatch.setattr(host_memory, "available", lambda: int(num_bytes))

    limit(needed)
    refuse_what_the_host_cannot_hold(plan)
    limit(0.8 * needed)
    with pytest.raises(
        ConfigError, match=r"of the host's memory is free\. Try training\.micro_batch_size=\d+( training\.|\.$)"
    ):
        refuse_what_the_host_cannot_hold(plan)
    limit(1000)
    with pytest.raises(
        ConfigError, match=r"model\.num_layers \(4\) and .* are too large: .* needs? .* Try a smaller model"
    ):
        refuse_what_the_host_cannot_hold(plan)
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")  # the other rank is on another node
    limit(0.95 * needed / ranks)
    refuse_what_the_host_cannot_hold(plan)


@pytest.mark.parametrize("version", [1, 2])
def test_the_memory_that_a_cgroup_leaves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: int) -> None:
    limit, use, reclaimable, mapped = host_memory.FILES[version]
    root = tmp_path / "memory" if version == 1 else tmp_path
    for folder, most in ((root / "a", "1000000"), (root / "a/b", "max" if version == 2 else str(2**63 - 4096))):
        folder.mkdir(parents=True)
        (folder / limit).write_text(f"{most}\n")
        (folder / use).write_text("300000\n")
        (folder / "memory.stat").write_text(f"anon 1\n{reclaimable} 150000\n{mapped} 50000\n")
    (tmp_path / "own").write_text("4:cpu,cpuacct:/x\n3:memory:/a/b\n0::/none\n" if version == 1 else "0::/a/b\n")
    monkeypatch.setattr(host_memory, "CGROUP_ROOT", tmp_path)
    monkeypatch.setattr(host_memory, "OWN_CGROUPS", tmp_path / "own")
    assert host_memory.available() == 800_000
    (tmp_path / "own").unlink()
    assert host_memory.available() > 2**20


def _out_of_memory(config: Any) -> str:
    from parallel import topology
    from training.engine import Engine
    from training.starting import dry_run

    plan = make_plan(Job(config, 1, 512, "cpu"))
    engine = Engine(config, topology.initialize(config), 512)
    before = torch.get_rng_state()

    def fail(engine: Any, batches: Any) -> None:
        torch.rand(1)
        raise torch.OutOfMemoryError("CUDA out of memory")

    run_again, dry_run.run_again = dry_run.run_again, fail
    try:
        dry_run.first_batch(engine, plan)
    except ConfigError as error:
        assert torch.equal(before, torch.get_rng_state())
        return str(error)
    finally:
        dry_run.run_again = run_again
    return "nothing was raised"


def test_memory_that_runs_out_in_the_dry_run_is_told_with_what_fits() -> None:
    config = make_config(["experiment=gpt_tiny", "training.micro_batch_size=8", "training.device=cpu"])
    (message,) = distributed.run(_out_of_memory, 1, config)
    assert message.startswith("training.micro_batch_size (8) needs ") and "Try training.micro_batch_size=4" in message


def test_a_dry_run_changes_nothing_and_the_plan_is_left_behind(data: list[str], tmp_path: Path) -> None:
    aux_free = ["moe.router_score=sigmoid", "moe.expert_bias=true", "moe.aux_loss_coeff=0"]
    dropout = ["model.hidden_dropout=0.1", "parallel.expert=2", "training.steps=3", "checkpoint=off"]
    runs = {}
    for name in ("true", "false"):
        overrides = [
            "experiment=gpt_moe_tiny",
            *data,
            *aux_free,
            *dropout,
            f"training.dry_run={name}",
            f"run_dir={tmp_path / name}",
        ]
        runs[name] = [(line["loss"], line["grad_norm"]) for line in train_on_ranks(overrides, 2)]
    assert runs["true"] == runs["false"]
    plan = json.loads((tmp_path / "true" / "plan.json").read_text())
    assert [rank["rank"] for rank in plan["memory_per_rank"]] == [0, 1]
    for rank in plan["memory_per_rank"]:
        assert rank["total"] == sum(rank[kind] for kind in KINDS) > 0
    assert "moe.expert_bias (true; " in plan["unexportable"]
    assert plan["parameters"]["total"] > plan["parameters"]["active"] > 0 and plan["flops_per_token"] > 0


def test_training_refuses_before_it_allocates(data: list[str], tmp_path: Path) -> None:
    limit = ["training.memory_limit_gib=0.001", "checkpoint=off", f"run_dir={tmp_path}"]
    with pytest.raises(distributed.RankError, match=r"needs .* MiB on rank 0 \(weights"):
        distributed.run(train, 1, make_config(["experiment=gpt_tiny", *data, *limit]))


# ---------------------------------------------------------------------------------------------------------------------
# The command line
# ---------------------------------------------------------------------------------------------------------------------


def _train_py(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "train.py"), *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=LONG)


def test_command_line_plans_without_a_cluster(tmp_path: Path) -> None:
    result = _train_py(tmp_path, "experiment=deepseek_v3_like", "plan=json", "plan_world_size=512")
    assert result.returncode == 0, result.stderr
    plan = json.loads(result.stdout)
    assert plan["world_size"] == len(plan["memory_per_rank"]) == len(plan["layout"]) == 512
    assert "moe.router_score (sigmoid; " in plan["unexportable"]
    assert plan["predicted_step"] is None and len(plan["communication_per_step"]) == 4
    assert sorted({layer for axes in plan["layout"] for layer in axes["layers"]}) == list(range(60))
    assert list(tmp_path.iterdir()) == []  # nothing is prepared, nothing written


def test_command_line_refuses_as_training_does(tmp_path: Path) -> None:
    result = _train_py(tmp_path, "experiment=llama3_8b", "plan=true", "parallel.tensor=3")
    assert result.returncode == 2 and result.stdout == ""
    assert "parallel.tensor (3) must divide" in result.stderr


def test_a_plan_imports_neither_torch_nor_megatron() -> None:
    code = "import sys, simulator.text; print(sorted({'torch', 'megatron'} & sys.modules.keys()))"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=LONG)
    assert found.stdout == "[]\n", found.stderr


def test_text_names_everything() -> None:
    from simulator.text import text

    plan = _plan("mixtral_8x7b")
    words = text(plan)
    for quoted in (
        "46,702,792,704",
        "stage 3",
        "layers 24-31",
        "head, loss",
        "experts 0 | 1",
        *KINDS,
        "<- most",
        "a prediction needs a machine",
    ):
        assert quoted in words, quoted
    assert dataclasses.asdict(plan.worst)["rank"] == plan.as_dict()["worst_rank"]
    assert "Hugging Face" not in words and plan.as_dict()["unexportable"] is None
    mixtral = make_config(["experiment=mixtral_8x7b", "moe.router_score=sigmoid"], 64)
    other = dataclasses.replace(plan, job=dataclasses.replace(plan.job, config=mixtral))
    assert text(other).endswith(f"no export to Hugging Face: {other.unexportable}")
    assert "moe.router_score (sigmoid; mixtral has softmax)" in text(other)
    mixtral.moe.expert_bias = True
    assert "moe.expert_bias (true; mixtral has false)" in text(other)


@pytest.mark.parametrize("bitwise", ["false", "true"])
def test_the_limit_of_a_rank_is_in_the_plan(bitwise: str) -> None:
    from simulator.text import text

    asked = ["model=gpt_moe_tiny", "parallel.expert=2", "moe.placement.policy=solve", "moe.placement.extra_slots=1"]
    asked += [f"moe.placement.bitwise={bitwise}"]
    plans = {
        limit: make_plan(Job(make_config([*asked, f"moe.placement.max_load={limit}"], 2), 2, 1024, "cpu"))
        for limit in ("null", "1.0", "1.25", "1.5", "9")
    }
    totals = {limit: plan.worst.activations for limit, plan in plans.items()}
    assert totals["null"] == totals["1.0"] < totals["1.25"] < totals["1.5"] < totals["9"]
    assert "max_load (1.25) times the mean rank's assignments; a call that cannot keep it takes" in text(plans["1.25"])
    assert "max_load" not in text(plans["null"])
    hard = [*asked, "moe.placement.max_load=1.25", "moe.placement.over_limit=stop"]
    assert "a call that cannot keep it ends the run" in text(make_plan(Job(make_config(hard, 2), 2, 1024, "cpu")))
