"""Convert folders: `python -m models.convert import HF_FOLDER OUT_FOLDER`, `python -m models.convert export IN_FOLDER
HF_FOLDER`.

import: config.json + *.safetensors or pytorch_model.bin of GPT-2, Llama, Mistral, Qwen2, Qwen3, Phi-3, Mixtral,
Qwen3-MoE, OLMoE, DeepSeek-V2, DeepSeek-V3, Kimi K2 or BERT -> config.yaml + logical weights. export: the reverse, to
*.safetensors. Tokenizer files go along. Tensors are streamed: memory holds one part of a file at a time.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

from configs import command
from configs.architecture import description
from configs.schema import ConfigError
from configs.tokenizer_files import ALWAYS_READ_WITH, FOR_TRANSFORMERS, SETTINGS, VOCABULARIES, tokenizer_files

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
        writer = folders.Writer(partial, part_bytes or folders.PART_BYTES, hf.num_bytes, shown=True)
        for name in hf.names():
            writer.add(name, hf.get(name))
        writer.close()
        folders.write_config(partial, description(hf.config, vocab_size), special)
        _copy(carried, partial)
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
    from models.huggingface import special_tokens, tensors, translate, unknown_keys

    config = folders.config_from(folders.read_config(source))
    family, hf_config = translate.write_config(config)
    others, left_out = unknown_keys.of_family(config, family)
    reader = folders.Reader(source)
    carried = {**_carried_files(source), **tokenizer_files(source / FOR_TRANSFORMERS)}
    assert config.model.vocab_size is not None  # write_config has seen to it
    special = special_tokens.kept_in(source, config.model.vocab_size)
    if special is None:
        _say(
            f"{source} does not say which tokens begin and end a text, so the Hugging Face folder does not. Export or "
            "import it again."
        )
        special = dict.fromkeys(special_tokens.KEYS)
    if left_out:
        _say(
            f"the model is exported as {family.model_type}, where these keys that it came with mean something else: "
            f"{unknown_keys.listed(left_out)}. They are left out."
        )
    main_dtype = reader.main_dtype(reader.names())
    dtype = str(main_dtype).removeprefix("torch.")
    writer = folders.Writer(target, part_bytes or folders.PART_BYTES, reader.num_bytes(main_dtype), shown=True)
    for planned in tensors.export_plan(family, config):
        writer.add(planned.name, planned.make(reader.fill_rows, reader.stored(planned.ours).read_as))
    writer.close()
    _copy(carried, target)
    _warn_of_class(family.model_type, target)
    generation = special_tokens.generation_config(special)
    if special_tokens.GENERATION_CONFIG not in carried and config.model.family == "gpt" and generation:
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
    parser.add_argument("--max-shard-size", type=_size, metavar="2GB", help="of a file; also bounds the memory")
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
