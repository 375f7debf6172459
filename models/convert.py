"""Convert model folders: `python -m models.convert import HF_FOLDER OUT_FOLDER`, `python -m models.convert export
IN_FOLDER HF_FOLDER`.

import: reads config.json and *.safetensors or pytorch_model.bin of GPT-2, Llama, Mistral, Qwen2, Qwen3, Phi-3, Mixtral,
Qwen3-MoE, OLMoE, DeepSeek-V2, DeepSeek-V3, Kimi K2 or BERT; writes config.yaml and logical weights. export: the
reverse, to *.safetensors. Tokenizer files are copied. Only one tensor is in memory at a time.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from base import command
from base.checksums import write_folder_sums
from base.errors import ConfigError
from configs.architecture import description
from configs.schema import Config
from configs.tokenizer_files import ALWAYS_READ_WITH, FOR_TRANSFORMERS, SETTINGS, VOCABULARIES, tokenizer_files

if TYPE_CHECKING:
    import torch

    from models.weight_files.logical import LogicalTensors

SOURCES = {
    "import": "a Hugging Face folder, with config.json and *.safetensors or pytorch_model.bin",
    "export": "a folder of `python -m checkpoint.export` or of `python -m models.convert import`",
}


def import_folder(source: Path, target: Path, max_file_bytes: int | None = None, head_seed: int | None = None) -> None:
    """Convert a Hugging Face folder to a folder of logical weights (whole weights under Megatron's names), in files of
    at most `max_file_bytes` (None: 2 GB). With `head_seed`, a model without an output layer gets a random one. Raises
    ConfigError."""
    from models import folder as folders  # imports torch, which takes seconds that --help need not wait for
    from models.huggingface import special_tokens, tensors, unknown_keys

    hf = tensors.open_folder(source, head_seed)
    vocab_size = hf.config.model.vocab_size
    assert vocab_size is not None  # every family's config.json has one
    carried = _carried_files(source)
    special = special_tokens.of_config(hf.stated, vocab_size)
    with folders.new_folder(target) as partial:
        for note in hf.notes:
            _note(f"{note}.")
        weights = {name: hf.weight(name) for name in hf.names()}
        specs = [folders.TensorSpec(name, weight.dtype, weight.shape) for name, weight in weights.items()]
        writer = folders.Writer(partial, specs, max_file_bytes or folders.MAX_FILE_BYTES, shown=True)
        for name in weights:
            writer.add(name, hf.get(name))
        writer.close()
        folders.write_config(partial, description(hf.config, vocab_size), special)
        for name, path in carried.items():
            shutil.copyfile(path, partial / name)
        write_folder_sums(partial)
    unknown_keys.warn(hf.config, hf.family.model_type)


def export_folder(source: Path, target: Path, max_file_bytes: int | None = None) -> None:
    """Convert a folder of logical weights (whole weights under Megatron's names) to a Hugging Face folder, in files of
    at most `max_file_bytes` (None: 2 GB). Raises ConfigError if no Hugging Face family fits the model."""
    from models import folder as folders
    from models.huggingface import special_tokens, translate
    from models.weight_files.expected import logical_shapes
    from models.weight_files.logical import LogicalTensors

    with folders.new_folder(target) as partial:
        config = folders.config_from(folders.read_config(source))
        translate.write_config(config)  # raises if no family has the model, before anything is opened
        held = folders.open_logical_folder(source)
        weights = LogicalTensors(source, held.weights, logical_shapes(held.config, held.vocab_size))
        special = special_tokens.kept_in(source, held.vocab_size)
        files = {**_carried_files(source), **tokenizer_files(source / FOR_TRANSFORMERS)}
        if special is None:
            _note(
                f"{source} does not say which tokens begin and end a text, so the Hugging Face folder will not say so "
                f"either. Export or import {source} again to add them."
            )
        export_model(ExportedModel(config, weights, files, special), partial, max_file_bytes)


@dataclass(frozen=True)
class ExportedModel:
    """Content of a Hugging Face folder to write: configuration, weights, special tokens, and files to copy."""

    config: Config  # with its vocab_size
    weights: LogicalTensors
    files: dict[str, Path]  # to copy, by name
    special: dict[str, Any] | None  # the tokens that begin, end and pad a text, if they are known
    dtype: torch.dtype | None = None  # of all weights but FP32_NAMES; None: their own types


def export_model(model: ExportedModel, target: Path, max_file_bytes: int | None = None) -> None:
    """Write the files of a Hugging Face folder into an existing folder, one tensor at a time. Raises ConfigError,
    OSError."""
    from models import folder as folders
    from models.huggingface import special_tokens, tensors, translate, unknown_keys

    config, special = model.config, model.special
    family, hf_config = translate.write_config(config)
    others, left_out = unknown_keys.of_family(config, family)
    if special is None:
        special = dict.fromkeys(special_tokens.KEYS)
    if left_out:
        _note(
            f"the model is exported as {family.model_type}, where these keys of its old config.json mean something "
            f"else: {unknown_keys.listed(left_out)}. They are left out."
        )
    dtype = str(model.dtype or model.weights.main_dtype).removeprefix("torch.")
    plan = list(tensors.export_plan(family, config))
    specs = [folders.TensorSpec(each.name, model.weights.dtype(each.ours, model.dtype), each.shape) for each in plan]
    writer = folders.Writer(target, specs, max_file_bytes or folders.MAX_FILE_BYTES, shown=True)
    for each, spec in zip(plan, specs, strict=True):
        writer.add(each.name, each.make(model.weights.fill, spec.dtype))
    writer.close()
    for name, path in model.files.items():
        shutil.copyfile(path, target / name)
    # AutoTokenizer of transformers ignores the tokenizer class of some families' folders.
    tokenizer, always = target / "tokenizer_config.json", ALWAYS_READ_WITH.get(family.model_type)
    if always is not None and (target / "tokenizer.json").exists():
        stated = str(folders.read_json(tokenizer).get("tokenizer_class")) if tokenizer.exists() else "none"
        if stated.removesuffix("Fast") != always:
            _note(
                f"the model is exported as {family.model_type}, for which AutoTokenizer of transformers 5 always "
                f"uses the class {always}; the folder names {stated}. Load this tokenizer with "
                "PreTrainedTokenizerFast.from_pretrained."
            )
    generation = {key: value for key, value in special.items() if value is not None}
    if special_tokens.GENERATION_CONFIG not in model.files and config.model.family == "gpt" and generation:
        (target / special_tokens.GENERATION_CONFIG).write_text(json.dumps(generation, indent=2) + "\n")
    content = {**hf_config, **special, "dtype": dtype, "torch_dtype": dtype, **others}
    (target / "config.json").write_text(json.dumps(content, indent=2) + "\n")


def _carried_files(source: Path) -> dict[str, Path]:
    """Return the tokenizer and generation files to copy, as a dict from name to path. Raises ConfigError if one is not
    a regular file, or if generation_config.json has invalid token ids."""
    from models import folder as folders
    from models.huggingface.special_tokens import GENERATION_CONFIG, KEYS

    generation = source / GENERATION_CONFIG
    for path in (source / name for name in (*SETTINGS, *VOCABULARIES, GENERATION_CONFIG)):
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path} is not a regular file. Delete it, or copy the file again.")
    if not generation.exists():
        return tokenizer_files(source)
    for key in KEYS:
        folders.read_token_ids(generation, key)
    return {**tokenizer_files(source), GENERATION_CONFIG: generation}


def _note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr, flush=True)


def _parse_size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kMGT]?)B", text)
    if match is None or float(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text} is not a size. Try 5GB or 500MB.")
    return max(1, int(float(match[1]) * 1000 ** " kMGT".index(match[2] or " ")))


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m models.convert", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("direction", choices=["import", "export"])
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--max-shard-size", type=_parse_size, metavar="2GB", help="greatest size of a weight file")
    parser.add_argument(
        "--new-head",
        type=int,
        metavar="SEED",
        help="draw a random output layer for an imported model that has none, with this seed",
    )
    options = parser.parse_args(arguments)
    if options.new_head is not None and options.direction != "import":
        parser.error("--new-head is only for import: a model to export has an output layer. Leave it out")

    def convert() -> None:
        if not options.source.is_dir():
            raise ConfigError(f"{options.source} is not a folder. Give {SOURCES[options.direction]}.")
        if options.direction == "import":
            import_folder(options.source, options.target, options.max_shard_size, options.new_head)
        else:
            export_folder(options.source, options.target, options.max_shard_size)
        print(f"wrote {options.target}")

    return command.run(convert)


if __name__ == "__main__":
    sys.exit(main())
