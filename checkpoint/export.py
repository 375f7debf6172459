"""Export the model of a run: `python -m checkpoint.export RUN_OR_CHECKPOINT OUT_FOLDER`.

Writes a folder of logical weights with the config and the tokenizer, from a checkpoint of any layout, in one process.
No model is built: tensors are copied one at a time. `checkpoint.weights=OUT_FOLDER` starts another run from this
folder; `python -m models.convert export` converts it to a Hugging Face folder.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from base import command, progress
from base.checksums import write_folder_sums
from checkpoint import kept_tokenizer, manifest
from configs.architecture import description
from configs.compose import load
from configs.tokenizer_files import FOR_TRANSFORMERS, copy_tokenizer, tokenizer_files
from data.tokenizer import Tokenizer, load_tokenizer
from data.tokenizer.sentencepiece_json import NotConvertible

if TYPE_CHECKING:
    import torch


def export(source: Path, target: Path, dtype: torch.dtype | None = None) -> Path:
    """Write the logical weights and the tokenizer of a checkpoint, or of a run's newest good checkpoint, to a new
    folder. Returns the checkpoint's path. `dtype`: of the weights, except routers' biases, which stay in fp32; None
    keeps the model's dtype. Raises ConfigError, and OSError if the disk fails."""
    good, tokenizer = _checked(source)
    from checkpoint.logical.reader import open_checkpoint
    from models import folder as folders  # these import torch: --help must not wait for it

    with folders.new_folder(target) as partial:
        special = _write_tokenizer(tokenizer, good, partial)
        progress.begin(f"Reading {good}")
        reader = open_checkpoint(good)
        specs = [folders.TensorSpec(name, reader.dtype(name, dtype), reader.shape(name)) for name in reader.names()]
        specs.sort(key=lambda spec: spec.name)
        writer = folders.Writer(partial, specs, shown=True)
        for spec in specs:
            writer.add(spec.name, reader.get(spec.name, spec.dtype))
        writer.close()
        reader.close()
        folders.write_config(partial, description(reader.config, reader.vocab_size), special)
        write_folder_sums(partial)
    return good


def export_huggingface(source: Path, target: Path, dtype: torch.dtype | None = None) -> Path:
    """Write the weights of a checkpoint, or of a run's newest good checkpoint, to a new Hugging Face folder. Returns
    the checkpoint's path. Raises ConfigError, also if no Hugging Face family has such a model."""
    good, tokenizer = _checked(source)
    from checkpoint.logical.reader import open_checkpoint
    from models import convert
    from models import folder as folders

    with folders.new_folder(target) as partial, tempfile.TemporaryDirectory(dir=partial) as between:
        special = _write_tokenizer(tokenizer, good, Path(between))
        if special is None:
            _print_note(
                f"{good} has no tokenizer: the Hugging Face folder does not say which tokens begin and end a text."
            )
        files = {**tokenizer_files(Path(between)), **tokenizer_files(Path(between) / FOR_TRANSFORMERS)}
        progress.begin(f"Reading {good}")
        reader = open_checkpoint(good)
        config = folders.config_from(description(reader.config, reader.vocab_size))
        convert.export_model(convert.ExportedModel(config, reader, files, special, dtype), partial)
        reader.close()
    return good


def _checked(source: Path) -> tuple[Path, Path | None]:
    """Return the good checkpoint at a path, and the folder of its tokenizer if it has one. Raises ConfigError."""
    progress.begin(f"Checking {source}")
    good = manifest.good_checkpoint_at(source)
    return good, kept_tokenizer.of_checkpoint(good)


def _write_tokenizer(path: Path | None, good: Path, folder: Path) -> dict[str, int | None] | None:
    """Write the tokenizer at `path` to `folder`, and return its special token ids under Hugging Face's names; None
    without a tokenizer. good: the checkpoint's folder."""
    if path is None:
        return None
    family = load(good / manifest.CONFIG).model.family
    tokenizer = load_tokenizer(path, tried=True)
    copy_tokenizer(path, folder)
    _write_for_transformers(tokenizer, family, folder)
    if family == "bert":
        return {"bos_token_id": None, "eos_token_id": None, "pad_token_id": tokenizer.pad}
    # In training each document ends with the tokenizer's `eod`, and the next follows.
    return {"bos_token_id": tokenizer.before_text, "eos_token_id": tokenizer.eod, "pad_token_id": tokenizer.pad}


def _write_for_transformers(tokenizer: Tokenizer, family: str, folder: Path) -> None:
    """Write files with which transformers tokenizes like `tokenizer`; print the reason if there are none."""
    try:
        files = tokenizer.for_transformers(family)
    except NotConvertible as reason:
        no_file = f"{tokenizer.path} has no equivalent tokenizer.json, because {reason}"
        _print_note(f"transformers may tokenize differently: {no_file}.")
        return
    for name, text in files.items():
        (folder / FOR_TRANSFORMERS).mkdir(exist_ok=True)
        (folder / FOR_TRANSFORMERS / name).write_text(text, encoding="utf-8")


def _print_note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr, flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit status."""
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
