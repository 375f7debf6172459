"""Inspect the checkpoints of a run: python -m checkpoint ls|verify|show|convert PATH.

A checkpoint is either complete or absent, and loads into any layout.

A checkpoint is a folder `step_0000100` with a safetensors file from each rank that wrote (weights, optimizer state and
random number states, as boxes of global tensors, which do not depend on the layout), `state.json` (step, model,
layout), `config.yaml` and, written last, `manifest.json` (every file with its size and checksum). It is written under a
temporary name and renamed when complete: a folder whose name has no `.tmp` was complete once, and the manifest shows
whether it still is. Nothing in it is ever unpickled.

checkpoint/state.py has its content, shards.py the tensor files, saver.py the saving, manifest.py the checks.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from base import command
from base.checksums import FOLDER_SUMS
from base.errors import ConfigError
from checkpoint import manifest, safetensors_header
from checkpoint.logical.names import lacking_weights
from checkpoint.state_file import describe_layout, read_state
from configs.compose import load
from configs.weights import check_files
from models.weight_files.choice import INDEX_NAME, SINGLE_NAME
from models.weight_files.expected import logical_shapes

if TYPE_CHECKING:
    from models.folder import Reader


def show_list(path: Path) -> int:
    """Print step, size, age and state of each checkpoint, after reading every byte; return 1 if one is not good."""
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
    """Print all problems of each checkpoint, or of a folder of logical weights or a Hugging Face folder, after reading
    every byte; return 1 if there is a problem."""
    bad = 0
    of_weights = is_folder_of_weights(path)
    also = ", or a folder of weights or of Hugging Face"
    for folder in [path] if of_weights else manifest.checkpoints_at(path, also):
        found = problems_in(folder) if of_weights else manifest.problems(folder) or lacking_in(folder)
        bad += bool(found)
        for problem in found or ["good"]:
            print(f"{folder}: {problem}")
    return int(bad > 0)


def lacking_in(folder: Path) -> list[str]:
    """Return a line for each weight that is missing or incomplete in a checkpoint whose files match its manifest."""
    try:
        shapes = logical_shapes(load(folder / manifest.CONFIG), read_state(folder)["vocab_size"])
        entries = safetensors_header.read_folder(folder, manifest.read(folder))
    except (OSError, ValueError) as error:
        return [" ".join(str(error).split())]
    return lacking_weights(entries, shapes)


def is_folder_of_weights(path: Path) -> bool:
    """Return whether a path is a Hugging Face folder or a folder of logical weights, not a run or a checkpoint."""
    try:
        kind = manifest.kind_of_model(path)
    except ConfigError:
        return False
    return kind == "huggingface" or (
        kind == "weights" and any((path / name).exists() for name in (SINGLE_NAME, INDEX_NAME, FOLDER_SUMS))
    )


def problems_in(path: Path) -> list[str]:
    """Read every byte of a folder of weights, and return a line for each damaged file, missing tensor, NaN or Inf."""
    from checkpoint.logical.reader import open_logical  # imports torch

    try:
        if manifest.kind_of_model(path) == "weights":
            check_files(path, slice(None))
        reader = open_logical(path)
    except ConfigError as error:
        return [str(error)]
    assert reader.files is not None
    found = [problem for name in reader.files.all_names() if (problem := _problem_with(reader.files, name))]
    reader.close()
    return found


def _problem_with(files: Reader, name: str) -> str | None:
    import torch

    from models.weight_files.stored_tensors import bands_of

    try:
        for band in bands_of(files.stored(name)):
            if band.is_floating_point() and band.numel() > 0:
                low, high = (band if band.dtype.itemsize > 1 else band.float()).aminmax()  # NaN if any is
                if not torch.isfinite(low) or not torch.isfinite(high):
                    return f"tensor {name} holds NaN or Inf."
    except ConfigError as error:
        return str(error)
    return None


def show(path: Path) -> int:
    """Print the content of a checkpoint, or of a run's newest good checkpoint. Raises ConfigError."""
    folder = manifest.good_checkpoint_at(path)
    state, files = read_state(folder), manifest.read(folder)
    size, layout = _size(sum(entry.size for entry in files.values())), describe_layout(state["layout"])
    print(f"{folder}: step {state['step']}, {state['consumed_samples']} samples, {size}")
    print(f"precision {state['precision']}, vocabulary {state['vocab_size']}, written by {layout}")
    for section, values in state["architecture"].items():
        print(f"{section}: " + ", ".join(f"{key} {value}" for key, value in values.items()))
    print(f"config: {folder / manifest.CONFIG}")
    tensors: dict[str, list[safetensors_header.Entry]] = {}
    for entry in safetensors_header.read_folder(folder, files):
        tensors.setdefault(entry.key, []).append(entry)
    width = max(len(key) for key in tensors)
    print(f"{'tensor':<{width}}  {'type':<7} {'parts':>5}  shape")
    for key in sorted(tensors):
        first = tensors[key][0]
        print(f"{key:<{width}}  {first.dtype:<7} {len(tensors[key]):>5}  {' x '.join(map(str, first.global_shape))}")
    return 0


def convert_to(path: Path, target: Path, kind: str, dtype: str | None) -> int:
    """Write the weights of a checkpoint, or of a run's newest good checkpoint, to a new folder. Raises ConfigError."""
    manifest.checkpoints_at(path)  # a wrong path is an error at once
    import torch  # imported here, because the other commands must not wait for it

    from checkpoint import export

    wanted = None if dtype is None else getattr(torch, dtype)
    folder = (export.export if kind == "weights" else export.export_huggingface)(path, target, wanted)
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
    """Run the command line and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m checkpoint", description="Inspect the checkpoints of a run.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in {
        "ls": "print step, size and age of each checkpoint, and whether it is good",
        "verify": "read every byte and print all problems",
        "show": "print model, layout and tensors of a checkpoint",
        "convert": "write the weights to a folder, for checkpoint.weights=FOLDER or for Hugging Face",
    }.items():
        subcommand = commands.add_parser(name, help=text, description=text)
        or_weights = "; or a folder of weights or of Hugging Face" if name == "verify" else ""
        subcommand.add_argument(
            "path",
            type=Path,
            help=f"a run folder (its newest good checkpoint) or one of its checkpoints/step_XXXXXXX{or_weights}",
        )
        if name == "convert":
            subcommand.add_argument("target", type=Path, help="a new folder")
            subcommand.add_argument("--to", choices=["weights", "huggingface"], default="weights")
            subcommand.add_argument(
                "--dtype",
                choices=["float32", "bfloat16", "float16"],
                help="data type of the weights, except routers' biases, which stay fp32 (default: the model's)",
            )
    options = parser.parse_args(arguments)

    def body() -> int:
        if options.command == "convert":
            return convert_to(options.path, options.target, options.to, options.dtype)
        return {"ls": show_list, "verify": verify, "show": show}[options.command](options.path)

    return command.run(body)


if __name__ == "__main__":
    sys.exit(main())
