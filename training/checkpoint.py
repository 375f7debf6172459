"""Checkpoints that are whole or not there, and that load into any layout.

A checkpoint is a folder `step_0000100` in Megatron-core's distributed format (weights, optimizer state, random number
states), with `state.json` (step, config, layout) and, written last, `manifest.json` (every file with its size). It is
written under a temporary name and renamed when complete, so a name without `.tmp` was complete once; the manifest tells
whether it still is.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from configs.schema import Config, ConfigError
from optim import state as optimizer_state
from parallel.topology import Topology
from training.step import Model

FORMAT = 1
MANIFEST = "manifest.json"
STATE = "state.json"
# Keys of the model config that say what the weights are; a checkpoint that differs in one is of another model.
MODEL_KEYS = (
    "family num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups head_dim vocab_size tie_embeddings "
    "position_embedding normalization norm_position qk_norm activation linear_bias qkv_bias sentence_head"
).split()
MOE_KEYS = "num_experts ffn_hidden_size shared_expert_ffn_hidden_size layers expert_bias".split()


@dataclass
class Progress:
    """How far a run is: finished optimizer steps and the training samples they consumed."""

    step: int = 0
    consumed_samples: int = 0


def folder_of(run_dir: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return run_dir / "checkpoints" / f"step_{step:07d}"


def problem_with(folder: Path) -> str | None:
    """Why the folder is no complete checkpoint, in one line; None if it is one."""
    if not folder.is_dir():
        return "no such folder"
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        files = manifest["files"]
        if manifest["format"] != FORMAT:
            return f"its format ({manifest['format']}) is not the one this version reads ({FORMAT})"
    except FileNotFoundError:
        return f"it has no {MANIFEST}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"its {MANIFEST} cannot be read ({type(error).__name__}: {error})"
    for name, size in files.items():
        path = folder / name
        if not path.is_file():
            return f"its file {name} is missing"
        if path.stat().st_size != size:
            return f"its file {name} has {path.stat().st_size} bytes, not {size}"
    return None


def list_checkpoints(run_dir: Path) -> list[Path]:
    """All checkpoint folders of a run, newest first, good or not."""
    folders = [path for path in (run_dir / "checkpoints").glob("step_*") if path.name[5:].isdigit() and path.is_dir()]
    return sorted(folders, key=lambda path: int(path.name[5:]), reverse=True)


def find(config: Config) -> tuple[Path | None, list[str]]:
    """The checkpoint to resume from, by `checkpoint.resume`, and a line for each one passed over.

    Raises ConfigError for a path that is no checkpoint.
    """
    resume = config.checkpoint.resume
    if resume == "never":
        return None, []
    if resume == "auto":
        passed_over = []
        for folder in list_checkpoints(Path(config.run_dir)):
            problem = problem_with(folder)
            if problem is None:
                return folder, passed_over
            passed_over.append(f"passed over {folder}: {problem}")
        return None, passed_over
    folder = Path(resume)
    if problem_with(folder) is not None and (folder / "checkpoints").is_dir():  # a run folder stands for its newest
        good = [candidate for candidate in list_checkpoints(folder) if problem_with(candidate) is None]
        if good:
            return good[0], []
    problem = problem_with(folder)
    if problem is not None:
        raise ConfigError(
            f"checkpoint.resume ({resume}) is no checkpoint: {problem}. Give a folder .../checkpoints/step_XXXXXXX, a run folder that "
            "holds one, auto (the newest good one in run_dir, or a fresh start) or never."
        )
    return folder, []


def check_same_model(config: Config, vocab_size: int, folder: Path) -> None:
    """Raise ConfigError when the checkpoint is of another model than the config's."""
    saved = json.loads((folder / STATE).read_text())
    checks = [(f"model.{key}", saved["config"]["model"].get(key), getattr(config.model, key)) for key in MODEL_KEYS if key != "vocab_size"]
    checks += [(f"moe.{key}", saved["config"]["moe"].get(key), getattr(config.moe, key)) for key in MOE_KEYS]
    checks.append(("vocabulary size", saved["vocab_size"], vocab_size))
    for key, theirs, ours in checks:
        if theirs != ours:
            raise ConfigError(
                f"{key} ({ours}) differs from the checkpoint {folder} ({theirs}): it is of another model. "
                f"Try {key}={theirs}, another run_dir or name, or checkpoint.resume=never."
                if key != "vocabulary size"
                else f"the tokenizer's vocabulary ({ours}) differs from that of the checkpoint {folder} ({theirs}). "
                "Use the tokenizer that the run began with (data.tokenizer), another run_dir or name, or checkpoint.resume=never."
            )


def save(model: Model, progress: Progress, folder: Path, vocab_size: int) -> None:
    """Write one checkpoint; a collective call. The folder appears, complete, when it returns.

    Raises OSError on every rank when any rank cannot write.
    """
    temporary = folder.with_name(folder.name + ".tmp")
    with _raised_everywhere(f"checkpoint {folder} cannot be written"):
        if dist.get_rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
    with model.frozen_weights():
        weights = _sharded_weights(model)
        sharded: dict[str, Any] = {
            "optimizer": optimizer_state.sharded_state(model.optimizer, model.chunks, weights, loading=False),
            "random": _sharded_random_state(),
        }
        sharded.update(weights)
        with _quiet_megatron():
            dist_checkpointing.save(sharded, str(temporary))
    with _raised_everywhere(f"checkpoint {folder} cannot be written"):
        if dist.get_rank() == 0:
            state = {
                **asdict(progress),
                "vocab_size": vocab_size,
                "world_size": model.topology.world_size,
                "optimizer_steps": optimizer_state.steps_taken(model.optimizer),
                "loss_scaler": optimizer_state.scaler_state(model.optimizer),
                "config": asdict(model.config),
            }
            _write(temporary / STATE, state)
            files = {str(path.relative_to(temporary)): path.stat().st_size for path in sorted(temporary.rglob("*")) if path.is_file()}
            _write(temporary / MANIFEST, {"format": FORMAT, "step": progress.step, "files": files})
            shutil.rmtree(folder, ignore_errors=True)
            temporary.rename(folder)
            _sync_folder(folder.parent)


def load(model: Model, topology: Topology, folder: Path) -> Progress:
    """Load weights, optimizer and, in the layout that saved them, random number states. A collective call."""
    state = json.loads((folder / STATE).read_text())
    weights = _sharded_weights(model)
    sharded: dict[str, Any] = {"optimizer": optimizer_state.sharded_state(model.optimizer, model.chunks, weights, loading=True)}
    sharded.update(weights)
    same_layout = state["world_size"] == topology.world_size and _layout(state["config"]) == _layout(asdict(model.config))
    if same_layout:
        sharded["random"] = _sharded_random_state()
    with _quiet_megatron():
        loaded = dist_checkpointing.load(sharded, str(folder))
    for i, chunk in enumerate(model.bare_chunks):
        chunk.load_state_dict(loaded[f"model{i}"], strict=True)
    optimizer_state.restore(model.optimizer, model.chunks, loaded["optimizer"], state["optimizer_steps"])
    optimizer_state.restore_scaler(model.optimizer, state["loss_scaler"])
    if same_layout:
        _restore_random_state(loaded["random"])
    return Progress(state["step"], state["consumed_samples"])


def prune(run_dir: Path, keep: int) -> None:
    """Delete all but the newest `keep` good checkpoints (0 keeps all) and what unfinished saves left behind. Rank 0 calls it."""
    for leftover in (run_dir / "checkpoints").glob("step_*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)
    if keep > 0:
        good = [folder for folder in list_checkpoints(run_dir) if problem_with(folder) is None]
        for folder in good[keep:]:
            doomed = folder.with_name(folder.name + ".tmp")  # renamed first: a killed deletion leaves no broken checkpoint
            folder.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)


def _sharded_weights(model: Model) -> dict[str, Any]:
    # A key for each chunk; the sharded tensors inside are named after global layers, so layouts meet in the names.
    return {f"model{i}": chunk.sharded_state_dict() for i, chunk in enumerate(model.bare_chunks)}


def _layout(config: dict[str, Any]) -> dict[str, Any]:
    sizes = "tensor sequence pipeline virtual_pipeline context expert expert_tensor".split()
    return {key: config["parallel"][key] for key in sizes}


def _random_states() -> dict[str, torch.Tensor]:
    states = {"host": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["device"] = torch.cuda.get_rng_state()
    for name, tracked in tensor_parallel.get_cuda_rng_tracker().get_states().items():
        states[f"tracker.{name}"] = tracked
    return states


def _sharded_random_state() -> dict[str, ShardedTensor]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    return {
        name: ShardedTensor.from_rank_offsets(f"random.{name}", value.cpu()[None].clone(), (0, rank, world_size))
        for name, value in _random_states().items()
    }


def _restore_random_state(loaded: dict[str, torch.Tensor]) -> None:
    states = {name: value[0].to(torch.uint8).cpu() for name, value in loaded.items()}
    torch.set_rng_state(states["host"])
    if "device" in states:
        torch.cuda.set_rng_state(states["device"])
    tracker = tensor_parallel.get_cuda_rng_tracker()
    tracker.set_states({name.removeprefix("tracker."): value for name, value in states.items() if name.startswith("tracker.")})


def _write(path: Path, content: dict[str, Any]) -> None:
    with open(path, "w") as stream:
        json.dump(content, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _raised_everywhere(contextlib.AbstractContextManager[None]):
    """What rank 0 raises inside, all ranks raise: nobody waits for a rank that gave up."""

    def __init__(self, what: str):
        self.what = what

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None and not isinstance(error, OSError):
            return
        messages: list[str | None] = [None if error is None else f"{self.what}: {error}"]
        dist.broadcast_object_list(messages, src=0)
        if messages[0] is not None:
            raise OSError(messages[0]) from error


@contextlib.contextmanager
def _quiet_megatron() -> Any:
    # Deprecation notes of torch's and Megatron's internals, once per tensor; nothing a user can act on.
    level = logging.getLogger("megatron").level
    logging.getLogger("megatron").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logging.getLogger("megatron").setLevel(level)
