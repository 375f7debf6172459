"""Convert folders: `python -m models.convert import HF_FOLDER OUT_FOLDER`, `python -m models.convert export IN_FOLDER
HF_FOLDER`.

import: config.json + *.safetensors or pytorch_model.bin of GPT-2, Llama, Mistral, Qwen2, Qwen3, Phi-3, Mixtral,
Qwen3-MoE, OLMoE, DeepSeek-V2, DeepSeek-V3, Kimi K2 or BERT -> config.yaml + logical weights. export: the reverse, to
*.safetensors. Tokenizer files go along. Tensors are streamed: memory holds one at a time.
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

from configs import command
from configs.architecture import description
from configs.checksums import write_folder_sums
from configs.schema import Config, ConfigError
from configs.tokenizer_files import ALWAYS_READ_WITH, FOR_TRANSFORMERS, SETTINGS, VOCABULARIES, tokenizer_files

if TYPE_CHECKING:
    import torch

    from models.weight_files.logical import LogicalTensors

SOURCES = {
    "import": "a Hugging Face folder, with config.json and *.safetensors or pytorch_model.bin",
    "export": "a folder of `python -m checkpoint.export` or of `python -m models.convert import`",
}


def import_folder(source: Path, target: Path, part_bytes: int | None = None, head_seed: int | None = None) -> None:
    """Hugging Face folder -> folder of logical weights, in files of at most `part_bytes` (2 GB). With a `head_seed` a
    model without an output layer gets a new one. Raises ConfigError."""
    from models import folder as folders  # imports torch, seconds that --help need not wait for
    from models.huggingface import special_tokens, tensors, unknown_keys

    hf = tensors.open_folder(source, head_seed)
    vocab_size = hf.config.model.vocab_size
    assert vocab_size is not None  # every family's config.json has one
    carried = _carried_files(source)
    special = special_tokens.of_config(hf.stated, vocab_size)
    with folders.new_folder(target) as partial:
        for note in hf.notes:
            _say(f"{note}.")
        weights = {name: hf.weight(name) for name in hf.names()}
        specs = [folders.TensorSpec(name, weight.dtype, weight.shape) for name, weight in weights.items()]
        writer = folders.Writer(partial, specs, part_bytes or folders.PART_BYTES, shown=True)
        for name in weights:
            writer.add(name, hf.get(name))
        writer.close()
        folders.write_config(partial, description(hf.config, vocab_size), special)
        _copy(carried, partial)
        write_folder_sums(partial)
    unknown_keys.warn(hf.config, hf.family.model_type)


def export_folder(source: Path, target: Path, part_bytes: int | None = None) -> None:
    """Folder of logical weights -> Hugging Face folder, in files of at most `part_bytes` (2 GB). Raises ConfigError if
    no family has such a model."""
    from models import folder as folders

    with folders.new_folder(target) as partial:
        export_into(source, partial, part_bytes)


def export_into(source: Path, target: Path, part_bytes: int | None = None) -> None:
    """Write the files of `export_folder` into a folder that is there. Raises ConfigError."""
    from models import folder as folders
    from models.huggingface import special_tokens, translate
    from models.weight_files.expected import logical_shapes
    from models.weight_files.logical import LogicalTensors

    config = folders.config_from(folders.read_config(source))
    translate.write_config(config)  # whether a family has it, before anything is opened
    held = folders.open_logical_folder(source)
    weights = LogicalTensors(source, held.weights, logical_shapes(held.config, held.vocab_size))
    special = special_tokens.kept_in(source, held.vocab_size)
    files = {**_carried_files(source), **tokenizer_files(source / FOR_TRANSFORMERS)}
    if special is None:
        _say(
            f"{source} does not say which tokens begin and end a text, so the Hugging Face folder does not. Export or "
            "import it again."
        )
    export_model(LeavingModel(config, weights, files, special), target, part_bytes)


@dataclass(frozen=True)
class LeavingModel:
    """What becomes a Hugging Face folder."""

    config: Config  # with its vocab_size
    weights: LogicalTensors
    files: dict[str, Path]  # that go along, by name
    special: dict[str, Any] | None  # which tokens begin, end and fill up a text, where that is known
    dtype: torch.dtype | None = None  # of all weights but FP32_NAMES; None: as they are


def export_model(model: LeavingModel, target: Path, part_bytes: int | None = None) -> None:
    """Write a Hugging Face folder's files into a folder that is there, a tensor at a time. Raises ConfigError, and
    OSError where the disk fails."""
    from models import folder as folders
    from models.huggingface import special_tokens, tensors, translate, unknown_keys

    config, special = model.config, model.special
    family, hf_config = translate.write_config(config)
    others, left_out = unknown_keys.of_family(config, family)
    if special is None:
        special = dict.fromkeys(special_tokens.KEYS)
    if left_out:
        _say(
            f"the model is exported as {family.model_type}, where these keys that it came with mean something else: "
            f"{unknown_keys.listed(left_out)}. They are left out."
        )
    dtype = str(model.dtype or model.weights.main_dtype).removeprefix("torch.")
    plan = list(tensors.export_plan(family, config))
    specs = [folders.TensorSpec(each.name, model.weights.dtype(each.ours, model.dtype), each.shape) for each in plan]
    writer = folders.Writer(target, specs, part_bytes or folders.PART_BYTES, shown=True)
    for each, spec in zip(plan, specs, strict=True):
        writer.add(each.name, each.make(model.weights.fill, spec.dtype))
    writer.close()
    _copy(model.files, target)
    _warn_of_class(family.model_type, target)
    generation = special_tokens.generation_config(special)
    if special_tokens.GENERATION_CONFIG not in model.files and config.model.family == "gpt" and generation:
        _write_json(target / special_tokens.GENERATION_CONFIG, generation)
    _write_json(target / "config.json", {**hf_config, **special, "dtype": dtype, "torch_dtype": dtype, **others})


def _warn_of_class(model_type: str, target: Path) -> None:
    """Say where transformers' AutoTokenizer reads the tokenizer of a family with a class of its own, whatever the
    folder says."""
    from models import folder as folders

    path, always = target / "tokenizer_config.json", ALWAYS_READ_WITH.get(model_type)
    if always is None or not (target / "tokenizer.json").exists():
        return
    said = str(folders.read_json(path).get("tokenizer_class")) if path.exists() else "no class"
    if said.removesuffix("Fast") != always:
        _say(
            f"the model is exported as {model_type}, whose tokenizers AutoTokenizer of transformers 5 reads as "
            f"{always}, not as {said}. Read this one with PreTrainedTokenizerFast.from_pretrained."
        )


def _carried_files(source: Path) -> dict[str, Path]:
    """The files that go along, by name. Raises ConfigError for one that is none, or a generation config that generation
    could not use."""
    from models import folder as folders
    from models.huggingface.special_tokens import GENERATION_CONFIG, KEYS

    generation = source / GENERATION_CONFIG
    for path in (source / name for name in (*SETTINGS, *VOCABULARIES, GENERATION_CONFIG)):
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path} must be a file.")
    if not generation.exists():
        return tokenizer_files(source)
    for key in KEYS:
        folders.read_token_ids(generation, key)
    return {**tokenizer_files(source), GENERATION_CONFIG: generation}


def _copy(files: dict[str, Path], folder: Path) -> None:
    for name, path in files.items():
        shutil.copyfile(path, folder / name)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def _say(text: str) -> None:
    print(f"note: {text}", file=sys.stderr, flush=True)


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kMGT]?)B", text)
    if match is None or float(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text} is no size. Try 5GB or 500MB.")
    return max(1, int(float(match[1]) * 1000 ** " kMGT".index(match[2] or " ")))


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m models.convert", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("direction", choices=["import", "export"])
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--max-shard-size", type=_size, metavar="2GB", help="of a file")
    parser.add_argument(
        "--new-head", type=int, metavar="SEED", help="import a model that has no output layer, with a random one"
    )
    options = parser.parse_args(arguments)
    if options.new_head is not None and options.direction != "import":
        parser.error("--new-head is for import: what is exported has an output layer")

    def convert() -> None:
        if not options.source.is_dir():
            raise ConfigError(f"{options.source} is no folder. Give {SOURCES[options.direction]}.")
        if options.direction == "import":
            import_folder(options.source, options.target, options.max_shard_size, options.new_head)
        else:
            export_folder(options.source, options.target, options.max_shard_size)
        print(f"wrote {options.target}")

    return command.run(convert)


if __name__ == "__main__":
    sys.exit(main())
