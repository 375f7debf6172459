"""Take the model out of a run: `python -m training.export RUN_OR_CHECKPOINT OUT_FOLDER`.

Writes a folder of logical weights with its config and the tokenizer, from a checkpoint of any layout, on one process.
`checkpoint.weights=OUT_FOLDER` starts another run from it; `python -m models.convert export` makes a Hugging Face folder of it.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from configs import command
from configs.compose import load
from configs.schema import ParallelConfig
from training import manifest

if TYPE_CHECKING:
    import torch


def export(source: Path, target: Path, dtype: torch.dtype | None = None) -> Path:
    """Write the logical weights of a run's newest good checkpoint, or of a given one, to a new folder, as `dtype` (None: as the
    model has them). Returns the checkpoint. Raises ConfigError."""
    good = manifest.good_checkpoint_at(source)
    from models.build import build_model  # imports torch, as the next three: seconds that --help and a wrong folder need not wait for
    from models.folder import save_logical_folder
    from parallel import topology
    from training import contents

    config = load(good / manifest.CONFIG)
    config.parallel = ParallelConfig()
    config.training.device = "cpu"
    vocab_size = contents.read_state(good)["vocab_size"]
    topology.initialize(config)
    try:
        chunks = build_model(config, vocab_size, fill=False)
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.absolute().parent, prefix=".export-") as folder:
            _keep_on_disk(chunks, Path(folder))
            contents.load_weights(chunks, good)
            save_logical_folder(chunks, target, config, vocab_size, dtype)
    finally:
        topology.destroy()
    run_tokenizer = good.parent.parent / "tokenizer"
    if run_tokenizer.is_dir():
        shutil.copytree(run_tokenizer, target, dirs_exist_ok=True)
    print(f"{good} -> {target}")
    return good


def _keep_on_disk(chunks: list[torch.nn.Module], folder: Path) -> None:
    """Put the weights into files of `folder` instead of memory, so that a model may be larger than that. Nothing has been written to
    the memory that they had so far, so it never existed."""
    import torch

    for i, parameter in enumerate(parameter for chunk in chunks for parameter in chunk.parameters()):
        path = folder / str(i)
        stored = torch.from_file(str(path), shared=True, size=parameter.numel(), dtype=parameter.dtype)
        parameter.data = stored.view(parameter.shape)


def copy_tokenizer(path: Path, folder: Path) -> None:
    """Keep a tokenizer file, or a folder's tokenizer files, under the names that converters look for."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in [path] if path.is_file() else [file for file in path.iterdir() if file.suffix in (".json", ".model", ".txt", ".jinja")]:
        shutil.copyfile(file, folder / ("tokenizer.model" if file.suffix == ".model" else file.name))


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m training.export", description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, help="a run folder, or one of its checkpoints/step_XXXXXXX")
    parser.add_argument("target", type=Path, help="a new folder")
    options = parser.parse_args(arguments)

    def body() -> None:
        export(options.source, options.target)

    return command.run(body)


if __name__ == "__main__":
    sys.exit(main())
