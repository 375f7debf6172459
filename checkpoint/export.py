"""Take the model out of a run: `python -m checkpoint.export RUN_OR_CHECKPOINT OUT_FOLDER`.

Writes a folder of logical weights with its config and the tokenizer, from a checkpoint of any layout, on one process.
`checkpoint.weights=OUT_FOLDER` starts another run from it; `python -m models.convert export` makes a Hugging Face
folder of it.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from checkpoint import kept_tokenizer, manifest
from configs import command, progress
from configs.architecture import for_use
from configs.compose import load
from configs.tokenizer_files import FOR_TRANSFORMERS, copy_tokenizer
from data.tokenizer import Tokenizer, load_tokenizer
from data.tokenizer.pieces import NotConvertible

if TYPE_CHECKING:
    import torch


def export(source: Path, target: Path, dtype: torch.dtype | None = None) -> Path:
    """Write the logical weights of a run's newest good checkpoint, or of a given one, to a new folder, as `dtype`
    (None: as the model has them), with the run's tokenizer. Returns the checkpoint. Raises ConfigError, and OSError
    where the disk fails."""
    progress.begin(f"Checking {source}")
    good = manifest.good_checkpoint_at(source)
    tokenizer = kept_tokenizer.of_checkpoint(good)
    from checkpoint import state as checkpoint_state
    from models import (
        folder as folders,  # imports torch, as the next three: seconds that --help and a wrong folder need not wait for
    )
    from models.build import build_model
    from parallel import topology

    trained = load(good / manifest.CONFIG)
    config = for_use(trained)
    config.training.device = "cpu"
    vocab_size = checkpoint_state.read_state(good)["vocab_size"]
    with folders.new_folder(target) as partial:
        special = None
        if tokenizer is not None:
            words = load_tokenizer(tokenizer).as_recorded(kept_tokenizer.digest_of(good))
            copy_tokenizer(tokenizer, partial)
            _write_for_transformers(words, config.model.family, partial)
            special = _special_tokens(words, config.model.family)
        place = topology.initialize(config)
        try:
            chunks = build_model(config, place, vocab_size, fill=False)
            _keep_on_disk(chunks, partial)
            progress.begin(f"Reading {good}")
            checkpoint_state.load_weights(chunks, good)
            folders.write_logical(chunks, partial, trained, vocab_size, dtype, special)
        finally:
            topology.destroy()
    return good


def _write_for_transformers(tokenizer: Tokenizer, family: str, folder: Path) -> None:
    """Beside a tokenizer that transformers cannot read: one that it can, or a line on why there is none."""
    try:
        files = tokenizer.for_transformers(family)
    except NotConvertible as reason:
        text = f"transformers may treat texts in another way: {tokenizer.path} has no equal tokenizer.json, as {reason}"
        print(f"note: {text}.", file=sys.stderr, flush=True)
        return
    for name, text in files.items():
        (folder / FOR_TRANSFORMERS).mkdir(exist_ok=True)
        (folder / FOR_TRANSFORMERS / name).write_text(text, encoding="utf-8")


def _special_tokens(tokenizer: Tokenizer, family: str) -> dict[str, int | None]:
    """What the run was trained with, under Hugging Face's names: each document ends with the tokenizer's `eod`, and the
    next follows."""
    if family == "bert":
        return {"bos_token_id": None, "eos_token_id": None, "pad_token_id": tokenizer.pad}
    bos = tokenizer.eod if tokenizer.bos is None else tokenizer.bos
    return {"bos_token_id": bos, "eos_token_id": tokenizer.eod, "pad_token_id": tokenizer.pad}


def _keep_on_disk(chunks: list[torch.nn.Module], folder: Path) -> None:
    """Put the weights on the disk of `folder` instead of in memory, so that a model may be larger than that. Nothing
    has been written to the memory that they had so far, so it never existed. The files lose their names at once, so
    that none is left behind."""
    import torch

    for parameter in (parameter for chunk in chunks for parameter in chunk.parameters()):
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            # A full disk is an error here; later, in the mapped file, it would end the process without a word.
            os.posix_fallocate(file.fileno(), 0, max(1, parameter.nbytes))
            stored = torch.from_file(file.name, shared=True, size=parameter.numel(), dtype=parameter.dtype)
        parameter.data = stored.view(parameter.shape)


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m checkpoint.export", description=__doc__.partition("\n\n")[0].replace("\n", " ")
    )
    parser.add_argument("source", type=Path, help="a run folder, or one of its checkpoints/step_XXXXXXX")
    parser.add_argument("target", type=Path, help="a new folder")
    options = parser.parse_args(arguments)

    def body() -> None:
        print(f"{export(options.source, options.target)} -> {options.target}")

    return command.run(body)


if __name__ == "__main__":
    sys.exit(main())
