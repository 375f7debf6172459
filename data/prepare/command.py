"""The command line of `python -m data.prepare`, which tokenizes a corpus ahead of training."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict

from base import command
from base.errors import ConfigError
from base.exit_handler import FAILED, INTERRUPTED
from configs.schema import DataConfig
from data.document_lengths import describe_lengths
from data.prepare.run import prepare

HELP = """\
Tokenize a corpus ahead of training: python -m data.prepare [key=value ...]

Training with the same data settings finds the result in data.cache_dir and starts at once. The command may be repeated
at any time: it skips finished work, continues interrupted work, and writes damaged files again.

keys (as for train.py):
  data.corpus=stdlib        the standard library's sources, about 30 MB
  data.corpus=PATH          .txt .raw .tokens .jsonl .ndjson .json .md .rst .py (also .gz .zst .xz .bz2), .parquet,
                            a folder of those or of Megatron .bin/.idx files, or one pair of them
  data.corpus='[A,B]'       several, mixed by size
  data.corpus='[{path: A, weight: 0.7}, {path: B, weight: 0.3}]'   a blend
  data.text_key=text        field of .jsonl, .ndjson and .json, column of .parquet
  data.documents_in_text=file    extent of a document in .txt, .raw and .tokens: file, blank_line or line
  data.tokenizer=sentencepiece   trained on the corpus (data.vocab_size=4096 pieces); or a .model file, or a folder
                                 from Hugging Face
  data.cache_dir=cache      folder for the results
  data.validation_fraction=0.02  share of the tokens for validation
  data.validation_corpora='{wiki: A, code: [B,C]}'   additional texts, for validation only
  data.num_workers=null     processes; null: all cores
  model.family=gpt          gpt, or bert, for which documents are stored as sentences
  model.sequence_length=null     gpt: tokens per sample, to print the effect of data.documents=separate on attention
"""


def parse_arguments(arguments: list[str]) -> tuple[DataConfig, str, int | None]:
    """Parse `key=value` arguments, and return data settings, model family and sequence length (None if not given).
    Raises ConfigError."""
    import difflib

    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    model = {"family": "gpt", "sequence_length": None}
    defaults = OmegaConf.create({"data": OmegaConf.structured(DataConfig), "model": model})
    known = [f"data.{key}" for key in asdict(DataConfig())] + [f"model.{key}" for key in model]
    for argument in arguments:
        key, equals, _ = argument.partition("=")
        if not equals:
            raise ConfigError(f"argument {argument!r} must have the form key=value, for example data.corpus=stdlib")
        if key not in known:
            near = difflib.get_close_matches(key, known, 1) or difflib.get_close_matches(f"data.{key}", known, 1)
            raise ConfigError(
                f"{key} is not a known key. "
                + (f"Did you mean {near[0]}?" if near else f"Use one of {', '.join(known)}")
            )
    try:
        merged = OmegaConf.merge(defaults, OmegaConf.from_dotlist(arguments))
        data = OmegaConf.to_object(merged.data)
    except (OmegaConfBaseException, YAMLError) as error:
        raise ConfigError(
            f"the arguments ({' '.join(arguments)}) cannot be used: {str(error).splitlines()[0]}. `python -m "
            "data.prepare --help` lists the keys with values that work"
        ) from error
    assert isinstance(data, DataConfig)
    length = merged.model.sequence_length
    if length is not None and (type(length) is not int or length < 1):
        raise ConfigError(f"model.sequence_length={length} must be an integer of at least 1, for example 1024")
    return data, str(merged.model.family), length


def main(arguments: list[str] | None = None) -> int:
    """Prepare data as the command-line arguments request, and return the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if {"-h", "--help", "help"} & set(arguments):
        print(HELP)
        return 0
    return command.run(lambda: _prepare(arguments))


def _prepare(arguments: list[str]) -> int:
    config, family, sequence_length = parse_arguments(arguments)
    begin = time.monotonic()
    try:
        prepared = prepare(config, family, show_progress=True, rebuild_damaged=True)
    except RuntimeError as error:  # a worker died
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("interrupted; repeat the command to continue", file=sys.stderr)
        return INTERRUPTED
    print(f"tokenizer   {prepared.tokenizer_path} ({prepared.vocab_size} tokens)")
    print(f"documents   {prepared.num_documents:,} ({prepared.num_bytes / 1e6:,.1f} MB of text)")
    print(f"bad lines   {prepared.num_bad_lines:,}" + "".join(f"\n            {line}" for line in prepared.bad_lines))
    if prepared.bad_lines_files:
        print("            all bad lines are listed in " + ", ".join(prepared.bad_lines_files))
    for note in prepared.notes:
        print(f"note        {note}")
    validation = ((f"valid/{name}", files) for name, files in prepared.validation.items())
    for name, files in (("train", prepared.train), ("validation", prepared.valid), *validation):
        for file in files:
            print(f"{name:<11} {file.num_tokens:,} tokens, weight {file.weight:.3f}, {file.prefix}.bin")
    if family == "gpt":
        for line in describe_lengths(prepared.train, sequence_length):
            print(line)
    print(f"seconds     {time.monotonic() - begin:.1f}")
    return 0
