"""Checkpoints that are whole or not there, and that load into any layout: python -m training.checkpoint ls|verify|show|convert PATH.

A checkpoint is a folder `step_0000100` with a safetensors file per rank that wrote (weights, optimizer state, random number
states: boxes of global tensors, in which layouts meet), `state.json` (step, model, layout), `config.yaml` and, written last,
`manifest.json` (every file with its size and checksum). It is written under a temporary name and renamed when complete, so a
name without `.tmp` was complete once; the manifest tells whether it still is. Nothing in it is ever unpickled.

training/contents.py says what is in it, shards.py how tensors get there, saver.py when, manifest.py whether it is good.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

from configs import command
from training import headers, manifest
from training.state_file import Progress, in_words, read_state

if TYPE_CHECKING:
    from training.saver import Saved, Saver
    from training.step import Model

__all__ = ["Progress", "finish_pending", "load", "read_state", "save", "saver_of"]

_savers: weakref.WeakKeyDictionary[Model, Saver] = weakref.WeakKeyDictionary()


def saver_of(model: Model) -> Saver:
    """What saves this model, one save at a time, in memory that it keeps. The first call is a collective one."""
    from training.saver import Saver  # imports torch, as others below: seconds that people who look at checkpoints need not wait for

    if model not in _savers:
        _savers[model] = Saver(model, model.config.parallel.timeout_seconds)
    return _savers[model]


def save(model: Model, progress: Progress, folder: Path, vocab_size: int) -> None:
    """Write one checkpoint; a collective call. The folder is there, complete, read back and on disk, when it returns.

    Raises SaveError on every rank when any rank cannot write.
    """
    saver_of(model).start(model, progress, folder, vocab_size)
    saver_of(model).finish()


def load(model: Model, folder: Path) -> Progress:
    """Fill a model with a checkpoint: weights, optimizer and, in the layout that saved them, random number states.

    A collective call; the model may have taken other steps since. Raises ConfigError on every rank if any cannot read its part.
    """
    from training import contents

    saver_of(model).last_step = None
    return contents.load(model, folder)


def finish_pending(model: Model) -> Saved | None:
    """Wait for the save under way, if any, and return it. A collective call. Raises SaveError on every rank."""
    return saver_of(model).finish()


# ---------------------------------------------------------------------------------------------------------------------
# For people
# ---------------------------------------------------------------------------------------------------------------------


def show_list(path: Path) -> int:
    """Print step, size, age and state of each checkpoint, with every byte read; 1 if one is not good."""
    print(f"{'step':>9} {'size':>10} {'age':>8}  state")
    bad = 0
    for folder in reversed(manifest.checkpoints_at(path)):
        problem = manifest.verify(folder)
        bad += problem is not None
        files = [file.stat() for file in folder.iterdir() if file.is_file()] if folder.is_dir() else []
        age = _age(time.time() - max(file.st_mtime for file in files)) if files else ""
        step, size = folder.name.removeprefix("step_").lstrip("0"), _size(sum(file.st_size for file in files))
        print(f"{step:>9} {size:>10} {age:>8}  {problem or 'good'}")
    for folder, why in manifest.foreign_checkpoints(path.parent if path.name == "checkpoints" else path):
        print(f"{folder.name.removeprefix('step_').lstrip('0'):>9} {'':>10} {'':>8}  not this run's: {why}")
    return int(bad > 0)


def verify(path: Path) -> int:
    """Print all that is wrong with each checkpoint, with every byte read; 1 if anything is."""
    bad = 0
    for folder in manifest.checkpoints_at(path):
        found = manifest.problems(folder)
        bad += bool(found)
        for problem in found or ["good"]:
            print(f"{folder}: {problem}")
    return int(bad > 0)


def show(path: Path) -> int:
    """Print what the newest good checkpoint of a run, or a given one, holds. Raises ConfigError."""
    folder = manifest.good_checkpoint_at(path)
    state, files = read_state(folder), manifest.read(folder)
    print(f"{folder}: step {state['step']}, {state['consumed_samples']} samples, {_size(sum(entry.size for entry in files.values()))}")
    print(f"precision {state['precision']}, vocabulary {state['vocab_size']}, written by {in_words(state['layout'])}")
    for section, values in state["architecture"].items():
        print(f"{section}: " + ", ".join(f"{key} {value}" for key, value in values.items()))
    print(f"config: {folder / manifest.CONFIG}")
    tensors: dict[str, list[headers.Entry]] = {}
    for name in files:
        if name.endswith(headers.SUFFIX):
            for entry in headers.read(folder / name).values():
                tensors.setdefault(entry.key, []).append(entry)
    width = max(len(key) for key in tensors)
    print(f"{'tensor':<{width}}  {'type':<7} {'parts':>5}  shape")
    for key in sorted(tensors):
        first = tensors[key][0]
        print(f"{key:<{width}}  {first.dtype:<7} {len(tensors[key]):>5}  {' x '.join(map(str, first.global_shape))}")
    return 0


def convert_to(path: Path, target: Path, kind: str, dtype: str | None) -> int:
    """Write the weights of the newest good checkpoint of a run, or of a given one, to a new folder. Raises ConfigError."""
    manifest.checkpoints_at(path)  # a wrong path is told at once
    import torch

    from models import convert
    from models.folder import new_folder
    from training import export

    wanted = None if dtype is None else getattr(torch, dtype)
    if kind == "weights":
        folder = export.export(path, target, wanted)
    else:
        with new_folder(target) as partial:
            between = partial / "weights"
            folder = export.export(path, between, wanted)
            convert.export_into(between, partial)
            shutil.rmtree(between)
    print(f"{folder} -> {target}")
    return 0


def _size(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m training.checkpoint", description="Look at checkpoints of a run.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in {
        "ls": "step, size, age of each checkpoint, and whether it is good",
        "verify": "read every byte and say all that is wrong",
        "show": "model, layout and tensors of a checkpoint",
        "convert": "take the weights out, for checkpoint.weights=FOLDER or for Hugging Face",
    }.items():
        subcommand = commands.add_parser(name, help=text, description=text)
        subcommand.add_argument("path", type=Path, help="a run folder (its newest good checkpoint) or one of its checkpoints/step_XXXXXXX")
        if name == "convert":
            subcommand.add_argument("target", type=Path, help="a new folder")
            subcommand.add_argument("--to", choices=["weights", "huggingface"], default="weights")
            subcommand.add_argument(
                "--dtype", choices=["float32", "bfloat16", "float16"], help="of the weights; default: as the model has them"
            )
    options = parser.parse_args(arguments)

    def body() -> int:
        if options.command == "convert":
            return convert_to(options.path, options.target, options.to, options.dtype)
        return {"ls": show_list, "verify": verify, "show": show}[options.command](options.path)

    return command.run(body)


if __name__ == "__main__":
    sys.exit(main())
