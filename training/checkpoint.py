"""Checkpoints that are whole or not there, and that load into any layout.

A checkpoint is a folder `step_0000100` in Megatron-core's distributed format (weights, optimizer state, random number
states), with `config.yaml`, `state.json` (step, model, layout) and, written last, `manifest.json` (every file with its size). It is
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

from configs.compose import to_yaml
from configs.schema import Config, ConfigError
from models.folder import architecture
from optim import state as optimizer_state
from training.manifest import FORMAT, MANIFEST, list_checkpoints, problem_with
from training.step import Model

STATE = "state.json"
CONFIG = "config.yaml"


@dataclass
class Progress:
    """How far a run is: finished optimizer steps and the training samples they consumed."""

    step: int = 0
    consumed_samples: int = 0


def check_same_model(config: Config, vocab_size: int, folder: Path) -> None:
    """Raise ConfigError when the checkpoint is of another model than the config's, or in another precision."""
    saved = read_state(folder)
    theirs, ours = saved["architecture"], architecture(config, vocab_size)
    for values in (theirs, ours):
        if values["model"]["position_embedding"] == "rope":  # no weight depends on it
            values["model"].pop("sequence_length", None)
    pairs = [(f"{section}.{key}", theirs[section].get(key), value) for section in ours for key, value in ours[section].items()]
    pairs.append(("training.precision", saved["precision"], config.training.precision))
    for key, their_value, our_value in pairs:
        if their_value != our_value:
            raise ConfigError(
                f"{key} ({our_value}) differs from the checkpoint {folder} ({their_value}), which is of another model. "
                f"Try {key}={their_value}, another name or run_dir, or checkpoint.resume=never."
            )


def read_state(folder: Path) -> dict[str, Any]:
    """What a checkpoint says of itself beside its tensors."""
    return json.loads((folder / STATE).read_text())


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
        weights = sharded_weights(model.bare_chunks)
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
                "architecture": architecture(model.config, vocab_size),
                "precision": model.config.training.precision,
                "layout": _layout(model),
                "optimizer_steps": optimizer_state.steps_taken(model.optimizer),
                "loss_scaler": optimizer_state.scaler_state(model.optimizer),
            }
            (temporary / CONFIG).write_text(to_yaml(model.config))
            _write(temporary / STATE, state)
            files = {str(path.relative_to(temporary)): path.stat().st_size for path in sorted(temporary.rglob("*")) if path.is_file()}
            _write(temporary / MANIFEST, {"format": FORMAT, "step": progress.step, "files": files})
            shutil.rmtree(folder, ignore_errors=True)
            temporary.rename(folder)
            _sync_folder(folder.parent)


def load(model: Model, folder: Path) -> Progress:
    """Load weights, optimizer and, in the layout that saved them, random number states. A collective call."""
    state = read_state(folder)
    weights = sharded_weights(model.bare_chunks)
    sharded: dict[str, Any] = {"optimizer": optimizer_state.sharded_state(model.optimizer, model.chunks, weights, loading=True)}
    sharded.update(weights)
    same_layout = state["layout"] == _layout(model)
    if same_layout:
        sharded["random"] = _sharded_random_state()
    loaded = _load_tensors(sharded, model.bare_chunks, folder)
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


def load_weights(chunks: list[torch.nn.Module], folder: Path) -> None:
    """Fill bare model chunks, in any layout, with a checkpoint's weights alone. A collective call."""
    _load_tensors(sharded_weights(chunks), chunks, folder)


def sharded_weights(chunks: list[torch.nn.Module]) -> dict[str, Any]:
    """The chunks' weights for dist_checkpointing: a key for each chunk, and inside, names by global layer, in which layouts meet."""
    return {f"model{i}": chunk.sharded_state_dict() for i, chunk in enumerate(chunks)}


def _load_tensors(sharded: dict[str, Any], chunks: list[torch.nn.Module], folder: Path) -> dict[str, Any]:
    with _quiet_megatron():
        loaded = dist_checkpointing.load(sharded, str(folder))
    for i, chunk in enumerate(chunks):
        chunk.load_state_dict(loaded[f"model{i}"], strict=True)
    return loaded


def _layout(model: Model) -> dict[str, Any]:
    return {"world_size": model.topology.world_size, **asdict(model.config.parallel)}


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
