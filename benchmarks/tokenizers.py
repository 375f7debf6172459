"""Published tokenizers read by Mixtrain and by the libraries that they come from, on hard texts.

`python -m benchmarks.tokenizers FOLDER`: each folder in FOLDER holds one tokenizer in a format that data.tokenizer
takes. The libraries are tiktoken, mistral-common, sentencepiece, transformers, and for folders that are called llama3,
llama4 and qwen llama-models and dashscope, most of which Mixtrain does not install.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.tokenizer_texts import TEXTS
from configs.tokenizer_files import (
    BYTE_PAIRS,
    JSON,
    MODEL,
    TEKKEN,
    TIKTOKEN,
    WORD_PIECES,
    copy_tokenizer,
    core_file,
    format_of,
)
from data.tokenizer import Tokenizer, load_tokenizer
from data.tokenizer.pieces import NotConvertible

Encode = Callable[[str], list[int]]


def _transformers(name: str, file: Path) -> Encode:
    tokenizer = getattr(importlib.import_module("transformers"), name).from_pretrained(file.parent)
    return lambda text: list(tokenizer(text, add_special_tokens=False).input_ids)


def _sentencepiece(file: Path) -> Encode:
    model = importlib.import_module("sentencepiece").SentencePieceProcessor(model_file=str(file))
    return lambda text: list(model.encode(text))


def _mistral(file: Path) -> Encode:
    module = importlib.import_module("mistral_common.tokens.tokenizers.tekken")
    tokenizer = module.Tekkenizer.from_file(file)
    return lambda text: list(tokenizer.encode(text, bos=False, eos=False))


def _ranks(file: Path) -> tuple[str, Encode]:
    """The library that a tiktoken file comes from."""
    name = file.parent.name
    if name in ("llama3", "llama4"):
        llama = importlib.import_module(f"llama_models.{name}.tokenizer").Tokenizer(file)
        return "llama-models", lambda text: list(llama.encode(text, bos=False, eos=False))
    if name == "qwen":
        qwen = importlib.import_module("dashscope.tokenizers.qwen_tokenizer").QwenTokenizer(str(file))
        return "dashscope", lambda text: list(qwen.encode(text, allowed_special=set(), disallowed_special=()))
    tiktoken: Any = importlib.import_module("tiktoken")
    public: Any = importlib.import_module("tiktoken_ext.openai_public")
    load = importlib.import_module("tiktoken.load").load_tiktoken_bpe
    public.load_tiktoken_bpe = lambda *_, **__: load(str(file))  # from here instead of from the net
    encoding = tiktoken.Encoding(**public.ENCODING_CONSTRUCTORS[file.stem]())
    return "tiktoken", lambda text: list(encoding.encode_ordinary(text))


def _library(file: Path) -> tuple[str, Encode]:
    """The library that a tokenizer's file comes from, by name, and its encoding of plain text."""
    kind = format_of(file)
    if kind == TIKTOKEN:
        return _ranks(file)
    by_kind: dict[str, tuple[str, Callable[[Path], Encode]]] = {
        MODEL: ("sentencepiece", _sentencepiece),
        TEKKEN: ("mistral-common", _mistral),
        BYTE_PAIRS: ("transformers", functools.partial(_transformers, "GPT2Tokenizer")),
        WORD_PIECES: ("transformers", functools.partial(_transformers, "BertTokenizer")),
        JSON: ("transformers", functools.partial(_transformers, "AutoTokenizer")),
    }
    library, make = by_kind[kind]
    return library, make(file)


def _exported(tokenizer: Tokenizer, source: Path, folder: Path) -> Encode | None:
    """What transformers makes of the tokenizer of a run that is exported; None where the export says that there is none
    to make."""
    kept = tokenizer.kept_files()
    if kept is None:
        copy_tokenizer(source, folder)
        try:
            kept = tokenizer.for_transformers("gpt")
        except NotConvertible:
            return None
    for name, text in kept.items():
        (folder / name).write_text(text, encoding="utf-8")
    return _transformers("AutoTokenizer", folder / JSON)


def compare(folder: Path) -> tuple[list[str], bool]:
    """A row of the table, and whether every text has equal tokens everywhere, or it is said that it has not."""
    core = core_file(folder)
    assert core is not None, folder
    library, theirs = _library(core)
    tokenizer = load_tokenizer(folder)
    expected = {name: theirs(text) for name, text in TEXTS.items()}
    batch = tokenizer.encode_batch(list(TEXTS.values()))
    inner = [_inner(tokenizer, tokenizer.encode_prompt(text)) for text in TEXTS.values()]
    with tempfile.TemporaryDirectory() as temporary:
        exported = _exported(tokenizer, folder, Path(temporary))
        ways = {
            "training": [tokenizer.encode_array(text).tolist() for text in TEXTS.values()],
            "batches": batch,
            "prompts": inner,
            "exported": [] if exported is None else [exported(text) for text in TEXTS.values()],
        }
    cells, good = [], True
    for way, found in ways.items():
        # what is exported of a tokenizer that is read in another way, and said to be, is as it is read
        wanted = ways["training"] if way == "exported" and tokenizer.notes() else list(expected.values())
        wrong = [name for name, ids, right in zip(TEXTS, found, wanted, strict=False) if ids != right]
        said = "said to differ" if tokenizer.notes() else "not"
        cells.append(f"{len(found) - len(wrong)}" + (f" ({said}: {', '.join(wrong)})" if wrong else ""))
        good &= not wrong or bool(tokenizer.notes())
        if way == "exported" and exported is None:
            cells[-1] = "said to differ"
    return [folder.name, core.name, library, f"{tokenizer.vocab_size}", *cells], good


def _inner(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    """A prompt without the special tokens around it."""
    around = tokenizer.encode_prompt("")
    before = next((n for n in range(len(around), -1, -1) if ids[:n] == around[:n]), 0) if around else 0
    if not around:
        return ids
    first = 1 if before else 0
    return ids[first : len(ids) - (len(around) - first)]


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns 1 where a tokenizer comes apart from its library and does not say so."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tokenizers", description=__doc__.partition("\n\n")[0])
    parser.add_argument("folder", type=Path, help="a folder of folders, each with a tokenizer")
    options = parser.parse_args(arguments)
    print(f"| tokenizer | file | library | tokens | {len(TEXTS)} texts: training | batches | prompts | exported |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    results = []
    for folder in sorted(path for path in options.folder.iterdir() if path.is_dir()):
        cells, good = compare(folder)
        print(f"| {' | '.join(cells)} |", flush=True)
        results.append(good)
    print(f"\n{sum(results)} of {len(results)} tokenizers as in their libraries, or said to differ")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
