"""Wrong command lines end at once: exit status 2, one line on stderr that names field and value, and advice that works.

Add a row to WRONG for a mistake that the configuration alone shows: it runs in this process through the entry point's
own function. Add a row to WRONG_RUNS for one that shows only with files or ranks: it runs `train.py` for real, and
`prepare` may make files first.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from configs.compose import run
from configs.schema import Config
from tests.configs import advice
from tests.waits import LONG

ROOT = Path(__file__).resolve().parents[1]


class Wrong(NamedTuple):
    argv: list[str]
    says: tuple[str, ...]  # parts of the line
    world_size: int = 1
    fixable: bool = True  # the line proposes something, and with that the command is right


TINY, MOE, BERT = "model=gpt_tiny", "model=gpt_moe_tiny", "model=bert_tiny"
MICRO = "training.micro_batch_size=4"

WRONG: dict[str, Wrong] = {
    # What cannot be read
    "syntax_bracket": Wrong(["name=[a"], ("name=[a", "quote"), fixable=False),
    "syntax_no_value": Wrong(["model.num_layers"], ("model.num_layers", "key=value"), fixable=False),
    "syntax_words": Wrong(["train faster"], ("train faster", "key=value"), fixable=False),
    "syntax_no_key": Wrong(["=3"], ("=3", "key=value"), fixable=False),
    "sweep_without_m": Wrong(["training.seed=1,2"], ("training.seed", "1,2", "-m")),
    "deleted_key": Wrong(["~optimizer.lr"], ("optimizer.lr", "cannot remove a key of the schema")),
    "appended_key": Wrong(["+training.steps=3"], ("training.steps", "exists")),
    "other_config_name": Wrong(["--config-name=other"], ("--config-name", "--config-dir"), fixable=False),
    "missing_config_dir": Wrong(["--config-dir=nowhere"], ("--config-dir", "nowhere"), fixable=False),
    # Keys and choices that do not exist
    "near_key": Wrong(["model.hiden_size=64"], ("model.hiden_size", "model.hidden_size=64")),
    "near_key_in_section": Wrong(["training.batch_size=8"], ("training.batch_size", "training.micro_batch_size=8")),
    "near_section": Wrong(["optimiser.lr=0.01"], ("optimiser.lr", "optimizer.lr=0.01")),
    "bare_key": Wrong(["num_layers=4"], ("num_layers", "model.num_layers=4")),
    "new_key": Wrong(["+model.hidden_sise=64"], ("model.hidden_sise", "model.hidden_size=64")),
    "forced_key": Wrong(["++model.hidden_sise=64"], ("model.hidden_sise", "model.hidden_size=64")),
    "deep_key": Wrong(["moe.placement.polcy=static"], ("moe.placement.polcy", "moe.placement.policy=static")),
    "unknown_key": Wrong(["colour=red"], ("colour", "--help"), fixable=False),
    "unknown_key_in_section": Wrong(["checkpoint.zzz=1"], ("checkpoint.zzz", "interval, keep, resume"), fixable=False),
    "section_as_key": Wrong(["moe.placement=3"], ("moe.placement", "moe.placement.policy"), fixable=False),
    "unknown_model": Wrong(["model=gpt_tinny"], ("gpt_tinny", "model=gpt_tiny", "mixtral_8x7b")),
    "unknown_experiment": Wrong(["experiment=lama3_8b"], ("lama3_8b", "experiment=llama3_8b"), world_size=8),
    "unknown_group": Wrong(["modell=gpt_tiny"], ("modell", "model=gpt_tiny")),
    "empty_choice": Wrong(["model="], ("model ()", "gpt_tiny"), fixable=False),
    "section_as_mapping": Wrong(["optimizer={lr: 1}"], ("optimizer", "adamw"), fixable=False),
    # Types
    "text_for_integer": Wrong(["model.num_layers=four"], ("model.num_layers", "four", "integer")),
    "float_for_integer": Wrong(["training.steps=1e3"], ("training.steps", "integer", "training.steps=1000")),
    "null_for_integer": Wrong(["training.steps=null"], ("training.steps", "null", "integer")),
    "list_for_integer": Wrong(["model.hidden_size=[64]"], ("model.hidden_size", "[64]", "integer")),
    "empty_for_integer": Wrong(["model.hidden_size="], ("model.hidden_size", "integer")),
    "missing_mark": Wrong(["model.num_layers=???"], ("model.num_layers (???)", "model.num_layers=4")),
    "boolean_for_integer": Wrong(["model.hidden_size=true"], ("model.hidden_size", "true", "integer")),
    "text_for_number": Wrong(["optimizer.lr=fast"], ("optimizer.lr", "fast", "number")),
    "text_for_boolean": Wrong(["parallel.sequence=maybe"], ("parallel.sequence", "maybe", "true or false")),
    "mapping_for_text": Wrong(["name={a: 1}"], ("name", "a text")),
    "text_for_list": Wrong(["sample.prompts=hello"], ("sample.prompts", "hello", "list")),
    "unknown_interpolation": Wrong(["run_dir=runs/${nme}"], ("run_dir", "nme"), fixable=False),
    # Values
    "nan": Wrong(["optimizer.lr=nan"], ("optimizer.lr (nan)", "finite")),
    "infinite": Wrong(["optimizer.clip_grad=inf"], ("optimizer.clip_grad (inf)", "finite")),
    "negative": Wrong(["optimizer.weight_decay=-0.1"], ("optimizer.weight_decay (-0.1)", "at least 0")),
    "zero_steps": Wrong(["training.steps=0"], ("training.steps (0)", "at least 1")),
    "dropout": Wrong(["model.hidden_dropout=1.0"], ("model.hidden_dropout (1.0)", "less than 1")),
    "near_value": Wrong(["training.precision=bf6"], ("training.precision (bf6)", "training.precision=bf16")),
    "unknown_family": Wrong(["model.family=t5"], ("model.family (t5)", "gpt, bert")),
    "corpus": Wrong(["data.corpus=[3]"], ("data.corpus ([3])", "stdlib")),
    "empty_name": Wrong(["name="], ("name ()", "empty")),
    "near_plan": Wrong([TINY, "plan=serch", "plan_world_size=2"], ("plan (serch)", "plan=search")),
    "hardware_near": Wrong([TINY, "hardware=h100"], ("hardware (h100)", "hardware=h100_8x")),
    "hardware_path": Wrong([TINY, "hardware=no/such.yaml"], ("hardware (no/such.yaml)", ".yaml file", "hardware=null")),
    "near_layout": Wrong([TINY, "parallel.layout=aut"], ("parallel.layout (aut)", "parallel.layout=auto")),
    "search_for_no_ranks": Wrong([TINY, "plan=search"], ("plan_world_size (null)", "plan_world_size=8")),
    "search_with_a_wrong_key": Wrong(
        [TINY, "plan=search", "plan_world_size=6", "parallel.tensor=3"],
        ("parallel.tensor (3)", "model.num_attention_heads (4)"),
    ),
    "search_with_a_wrong_batch": Wrong(
        [TINY, MICRO, "plan=search", "plan_world_size=2", "training.global_batch_size=10"],
        ("training.global_batch_size (10)", "micro_batch_size (4)"),
    ),
    # Divisibility
    "heads_of_hidden": Wrong(
        [TINY, "model.num_attention_heads=5"], ("model.num_attention_heads (5)", "model.hidden_size (64)")
    ),
    "groups_of_heads": Wrong(
        [TINY, "model.num_query_groups=3"], ("model.num_query_groups (3)", "model.num_attention_heads (4)")
    ),
    "tensor_of_heads": Wrong([TINY, "parallel.tensor=3"], ("parallel.tensor (3)", "model.num_attention_heads (4)"), 3),
    "tensor_of_groups": Wrong(
        [TINY, "parallel.tensor=4", "model.num_query_groups=2"], ("parallel.tensor (4)", "num_query_groups (2)"), 4
    ),
    "tensor_of_ffn": Wrong(
        [TINY, "parallel.tensor=2", "model.ffn_hidden_size=101"], ("parallel.tensor (2)", "ffn_hidden_size (101)"), 2
    ),
    "tensor_of_sequence": Wrong(
        [TINY, "parallel=tp2_sp", "model.sequence_length=33"], ("parallel.tensor (2)", "sequence_length (33)"), 2
    ),
    "pipeline_of_layers": Wrong([TINY, "parallel.pipeline=3"], ("parallel.pipeline (3)", "model.num_layers (4)"), 3),
    "chunks_of_layers": Wrong(
        [TINY, "parallel=pp2_vpp2", "model.num_layers=6"], ("parallel.virtual_pipeline (2)", "num_layers (6)"), 2
    ),
    "expert_of_experts": Wrong([MOE, "parallel.expert=3"], ("parallel.expert (3)", "moe.num_experts (4)"), 3),
    "expert_tensor_of_ffn": Wrong(
        [MOE, "parallel=tp2_sp", "moe.ffn_hidden_size=65"], ("parallel.tensor (2)", "moe.ffn_hidden_size (65)"), 2
    ),
    "world_of_tensor": Wrong([TINY, "parallel.tensor=2"], ("world_size (3)", "parallel.tensor"), 3),
    "world_of_pipeline": Wrong([TINY, "parallel.pipeline=2"], ("world_size (1)", "parallel.pipeline", "2 processes")),
    "world_of_expert": Wrong([MOE, "parallel.expert=4"], ("world_size (2)", "parallel.expert", "4 processes"), 2),
    "batch": Wrong(
        [TINY, MICRO, "training.global_batch_size=10"], ("training.global_batch_size (10)", "micro_batch_size (4)")
    ),
    "batch_of_ranks": Wrong(
        [TINY, MICRO, "training.global_batch_size=8"], ("training.global_batch_size (8)", "data-parallel size (4)"), 4
    ),
    "batch_of_chunks": Wrong(
        [TINY, MICRO, "parallel=pp2_vpp2", "training.global_batch_size=12"],
        ("3 micro-batches", "parallel.pipeline (2)"),
        2,
    ),
    "groups_of_experts": Wrong(
        [MOE, "moe.num_groups=3", "moe.group_top_k=1"], ("moe.num_groups (3)", "moe.num_experts (4)")
    ),
    # What does not go together
    "sequence_without_tensor": Wrong(
        [TINY, "parallel.sequence=true"], ("parallel.sequence (true)", "parallel.tensor (1)")
    ),
    "moe_tensor_without_sequence": Wrong(
        [MOE, "parallel.tensor=2"], ("parallel.sequence (false)", "parallel.sequence=true"), 2
    ),
    "chunks_without_pipeline": Wrong(
        [TINY, "parallel.virtual_pipeline=2"], ("parallel.virtual_pipeline (2)", "parallel.pipeline (1)")
    ),
    "expert_in_dense": Wrong([TINY, "parallel.expert=2"], ("parallel.expert (2)", "dense"), 2),
    "global_loss_in_dense": Wrong(
        [TINY, "moe.global_aux_loss_coeff=0.01"], ("moe.global_aux_loss_coeff (0.01)", "must be 0", "dense")
    ),
    "negative_global_loss": Wrong(
        [MOE, "moe.global_aux_loss_coeff=-0.01"], ("moe.global_aux_loss_coeff (-0.01)", "at least 0")
    ),
    "text_for_global_loss": Wrong(
        [MOE, "moe.global_aux_loss_coeff=auto"], ("moe.global_aux_loss_coeff", "auto", "number")
    ),
    "expert_tensor_alone": Wrong(
        [MOE, "parallel=tp2_sp", "parallel.expert_tensor=1"], ("parallel.expert_tensor (1)", "tensor (2)"), 2
    ),
    "top_k": Wrong([MOE, "moe.top_k=5"], ("moe.top_k (5)", "moe.num_experts (4)")),
    "bias_with_softmax": Wrong(
        [MOE, "moe.expert_bias=true"], ("moe.router_score (softmax)", "moe.router_score=sigmoid")
    ),
    "layer_pattern": Wrong([MOE, "moe.layers=[1,0,1]"], ("moe.layers ([1,0,1])", "model.num_layers (4)")),
    "sentence_head_of_gpt": Wrong([TINY, "model.sentence_head=next_sentence"], ("model.sentence_head", "bert")),
    "short_bert": Wrong([BERT, "model.sequence_length=4"], ("model.sequence_length (4)", "at least 8")),
    "vocabulary": Wrong([TINY, "model.vocab_size=1000"], ("model.vocab_size (1000)", "data.vocab_size (1024)")),
    "min_lr": Wrong(["optimizer.min_lr=1.0"], ("optimizer.min_lr (1.0)", "optimizer.lr")),
    "warmup": Wrong(
        ["training.steps=10", "optimizer.warmup_steps=10"], ("optimizer.warmup_steps (10)", "training.steps (10)")
    ),
    "wsd": Wrong(["optimizer.schedule=wsd"], ("optimizer.wsd_decay_steps (0)", "wsd")),
    "pipeline_degree": Wrong(
        ["moe.pipeline_degree=automatic"], ("moe.pipeline_degree (automatic)", "at least 1, or auto")
    ),
    "memory_budget": Wrong(["moe.memory_budget=100"], ("moe.memory_budget (100.0)", "moe.memory_strategy=auto")),
    "memory_strategy": Wrong(
        ["moe.memory_strategy=reuse"], ("moe.memory_strategy (reuse)", "one of keep, recompute, communicate")
    ),
    "placement": Wrong(["moe.placement.policy=dynamic"], ("moe.placement.policy (dynamic)", "one of static, flex")),
    "placement_without_slots": Wrong(
        ["moe.placement.policy=solve", "parallel.expert=2"],
        ("moe.placement.extra_slots (0)", "moe.placement.extra_slots=2"),
        world_size=2,
    ),
    # Optimizer state and activations off the device
    "disk_without_a_folder": Wrong(
        ["optimizer.state_device=disk"], ("memory.disk_dir (null)", "must be set to a folder")
    ),
    "tier_without_a_sharded_optimizer": Wrong(
        ["optimizer.state_device=host", "optimizer.distributed=false"],
        ("optimizer.state_device (host)", "optimizer.distributed is false"),
    ),
    "experts_off_the_device_with_state_on_it": Wrong(
        [MOE, "moe.weights_device=host"],
        ("optimizer.state_device (device)", "moe.weights_device=host, optimizer state must not be on a faster device"),
    ),
    "experts_on_the_disk_with_state_above": Wrong(
        [MOE, "moe.weights_device=disk", "optimizer.state_device=host", "memory.disk_dir=/var/tmp"],
        ("optimizer.state_device (host)", "must be disk", "optimizer.state_device=disk"),
    ),
    "experts_off_the_device_with_state_anywhere": Wrong(
        [MOE, "moe.weights_device=host", "optimizer.state_device=auto"],
        ("optimizer.state_device (auto)", "must be host or disk"),
    ),
    "experts_off_the_device_in_fp16": Wrong(
        [MOE, "moe.weights_device=host", "optimizer.state_device=host", "training.precision=fp16"],
        ("training.precision (fp16)", "must be fp32 or bf16"),
    ),
    "experts_on_a_disk_without_a_folder": Wrong(
        [MOE, "moe.weights_device=disk", "optimizer.state_device=disk"],
        ("memory.disk_dir (null)", "must be set to a folder"),
    ),
    "engine_without_a_tier": Wrong(["optimizer.engine=host"], ("optimizer.engine (host)", "state_device is device")),
    "activation_offload": Wrong(
        ["training.activation_offload=some"], ("training.activation_offload (some)", "none, auto or a number")
    ),
    "activation_offload_without_recompute": Wrong(
        ["training.activation_offload=64"], ("training.activation_offload (64)", "training.recompute=full")
    ),
    # Sweeps
    "sweep_into_one_folder": Wrong(
        ["-m", "training.seed=1,2"], ("run_dir (runs/quickstart)", "name=quickstart_${training.seed}")
    ),
    "sweep_of_an_interval": Wrong(
        ["-m", "optimizer.lr=interval(0,1)"], ("cannot be parsed", "key=value,value"), fixable=False
    ),
    "sweep_of_a_group": Wrong(["-m", "optimizer=adamw,wsd"], ("run_dir (runs/quickstart)", "name=..."), fixable=False),
    "sweep_with_a_wrong_run": Wrong(
        ["-m", "training.steps=0,1", "name=s${training.steps}"], ("training.steps (0)",), fixable=False
    ),
}


def _enter(monkeypatch: pytest.MonkeyPatch, argv: list[str], world_size: int) -> tuple[object, int]:
    """Run a command line in this process; the exit status and how many runs it started."""
    started: list[Config] = []

    def main(config: Config, given: frozenset[str]) -> int:
        started.append(config)
        return 0

    monkeypatch.setattr(sys, "argv", ["train.py", *argv])
    for name, value in {"RANK": 0, "WORLD_SIZE": world_size, "MASTER_ADDR": "localhost", "MASTER_PORT": 29500}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(SystemExit) as ended:
        run(main)
    return ended.value.code, len(started)


@pytest.mark.fast
@pytest.mark.parametrize("name", WRONG)
def test_wrong_command_line(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = WRONG[name]
    assert _enter(monkeypatch, wrong.argv, wrong.world_size) == (2, 0)
    out, err = capsys.readouterr()
    assert out == ""
    err = err.removeprefix("[rank 0] ")
    assert err.startswith("config error: ") and err.endswith("\n") and err.count("\n") == 1, err
    for phrase in wrong.says:
        assert phrase in err

    if wrong.fixable:
        field, alternatives = advice.split(err)
        assert alternatives, f"no advice in: {err}"
        for alternative in alternatives:
            replaced = {advice.key_of(fix) for fix in alternative} | (
                {advice.key_of(field)} if "not a known key" in err else set()
            )
            kept = [text for text in wrong.argv if advice.key_of(text) not in replaced]
            fixes = [fix for fix in alternative if not fix.startswith("WORLD_SIZE=")]
            processes = [int(fix.partition("=")[2]) for fix in alternative if fix.startswith("WORLD_SIZE=")]
            status, _ = _enter(monkeypatch, kept + fixes, processes[0] if processes else wrong.world_size)
            assert status == 0, capsys.readouterr().err


class WrongRun(NamedTuple):
    argv: list[str]
    says: tuple[str, ...]
    ranks: int = 1
    prepare: Callable[[Path], list[str]] | None = None  # makes files in a fresh folder; returns further overrides
    ours: bool = False  # started by launch/torchrun.sh, not by plain torchrun


def _small_corpus(folder: Path) -> list[str]:
    path = folder / "corpus.txt"
    path.write_text(
        "\n\n\n".join(
            f"document {i}: " + "some words of text to learn from, again and again. " * 20 for i in range(200)
        )
    )
    return [
        f"data.corpus={path}",
        "data.vocab_size=400",
        "data.validation_fraction=0.2",
        "logging=quiet",
        "training.steps=1",
        "sample.prompts=[]",
    ]


def _truncated_tokens(folder: Path) -> list[str]:
    overrides = _small_corpus(folder)
    cache = f"data.cache_dir={folder / 'cache'}"
    data = [override for override in overrides if override.startswith("data.")]
    subprocess.run(
        [sys.executable, "-m", "data.prepare", *data, cache],
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=LONG,
    )
    tokens = next((folder / "cache").rglob("*.bin"))
    os.truncate(tokens, tokens.stat().st_size - 7)
    return overrides


def _run_of_another_model(folder: Path) -> list[str]:
    overrides = _small_corpus(folder)
    done = run_train([TINY, *overrides], 1, folder)
    assert done.returncode == 0, done.stderr
    return overrides


def _empty_folder(folder: Path) -> list[str]:
    (folder / "step_0000010").mkdir()
    return [f"checkpoint.resume={folder / 'step_0000010'}"]


WRONG_RUNS: dict[str, WrongRun] = {
    "missing_corpus": WrongRun([TINY, "data.corpus=no/such/file.txt"], ("data.corpus", "no/such/file.txt")),
    "missing_corpus_on_two_ranks": WrongRun(
        [TINY, "data.corpus=no/such/file.txt"], ("data.corpus", "no/such/file.txt"), ranks=2
    ),
    "missing_tokenizer": WrongRun([TINY, "data.tokenizer=no/such.model"], ("data.tokenizer", "no/such.model")),
    "vocabulary_too_small": WrongRun(
        [TINY, "model.vocab_size=100"], ("model.vocab_size (100)", "data.vocab_size (1024)", "null")
    ),
    "resume_path_missing": WrongRun(
        [TINY, "checkpoint.resume=no/such"], ("checkpoint.resume (no/such)", "no such folder")
    ),
    "resume_path_is_no_checkpoint": WrongRun([TINY], ("checkpoint.resume", "manifest.json"), prepare=_empty_folder),
    "weights_missing": WrongRun([TINY, "checkpoint.weights=no/such"], ("no/such", "config.yaml")),
    "truncated_tokens": WrongRun([TINY], (".bin", "bytes"), prepare=_truncated_tokens),
    "checkpoint_of_another_model": WrongRun(
        [TINY, "model.hidden_size=32"],
        ("model.hidden_size (32)", "(64)", "another model"),
        prepare=_run_of_another_model,
    ),
    "one_process": WrongRun([TINY, "model.num_layer=3"], ("model.num_layer ", "model.num_layers=3")),
    "wrong_type": WrongRun([TINY, "optimizer.lr=fast"], ("optimizer.lr (fast)",)),
    "too_few_processes": WrongRun(["experiment=llama3_8b"], ("world_size (1)", "2 processes")),
    "two_ranks": WrongRun(
        [TINY, "parallel.tensor=3"], ("parallel.tensor (3)", "parallel.tensor=2"), ranks=2, ours=True
    ),
    "two_ranks_unknown_key": WrongRun(
        [TINY, "parallel.tensors=2"], ("parallel.tensors", "parallel.tensor=2"), ranks=2, ours=True
    ),
    "two_ranks_unset_variable": WrongRun(
        [TINY, "model.hidden_size=${oc.env:NO_SUCH_VARIABLE}"],
        ("model.hidden_size (${oc", "variable NO_SUCH_VARIABLE is not set"),
        2,
        ours=True,
    ),
    "two_ranks_search_for_other_devices": WrongRun(
        [TINY, "training.device=cpu", "parallel=auto", "hardware=h100_8x"],
        ("training.device (cpu)", "training.device=auto"),
        ranks=2,
        ours=True,
    ),
    "two_ranks_scalar_for_list": WrongRun(
        [TINY, "training.profile.steps=5"], ("training.profile.steps (5)", "[]"), ranks=2, ours=True
    ),
}


def run_train(argv: list[str], ranks: int, folder: Path, ours: bool = False) -> subprocess.CompletedProcess[str]:
    """Run `train.py`, under torchrun for more than one rank, with its runs and caches in `folder`."""
    single = [sys.executable, "train.py"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "train.py"]
    if ours:
        torchrun = ["bash", "launch/torchrun.sh", "--ranks-per-node", str(ranks), "--"]
    command = [
        *(single if ranks == 1 else torchrun),
        f"run_dir={folder / 'run'}",
        f"data.cache_dir={folder / 'cache'}",
        *argv,
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=LONG)


@pytest.mark.parametrize("name", WRONG_RUNS)
def test_wrong_run(name: str, tmp_path: Path) -> None:
    wrong = WRONG_RUNS[name]
    done = run_train(
        [*wrong.argv, *(wrong.prepare(tmp_path) if wrong.prepare else [])], wrong.ranks, tmp_path, wrong.ours
    )
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    spoken = [line for line in lines if "config error: " in line]
    assert spoken, done.stderr
    for phrase in wrong.says:
        assert phrase in spoken[0]
    # The last word is ours: torchrun's own report ends with the line of the rank that failed first, between rulers.
    assert "config error: " in [line for line in lines if line.strip("=-")][-1], done.stderr
    if wrong.ranks == 1 or wrong.ours:
        assert done.returncode == 2
    if wrong.ours:
        assert lines[-1].startswith("[rank ") and "] config error: " in lines[-1]
    if wrong.ranks == 1:
        assert len(lines) == 1, done.stderr
    else:
        ranks = {line.split("]")[0] for line in spoken if line.startswith("[rank ")}
        assert ranks, done.stderr
