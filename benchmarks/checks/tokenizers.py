"""Published tokenizers read by Mixtrain and by the libraries that they come from, on hard texts.

`python -m benchmarks.checks.tokenizers FOLDER`: each folder in FOLDER holds one tokenizer in a format that
data.tokenizer takes. The libraries are tiktoken, mistral-common, sentencepiece, transformers, and for folders that are
called llama3, llama4 and qwen llama-models and dashscope, most of which Mixtrain does not install.
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
from data.tokenizer.sentencepiece_json import NotConvertible

Encode = Callable[[str], list[int]]
# Texts on which readers of the same vocabulary differ, by name.
TEXTS: dict[str, str] = {
    "empty": "",
    "one space": " ",
    "spaces around": "  two before, three after   ",
    "runs of spaces": "a  b   c    d     e      f       g" + " " * 17 + "h" + " " * 64 + "i" + " " * 131 + "j",
    "tabs and lines": "x\ty\t\tz\n\n\nnext\r\nlast\r\r\n\n \n\t \n",
    "code": "def f(x):\n    if x<3 and x>=-1:\n        return {'a': [x[0]], \"b\": x**2}  # it's\n\n\n",
    "contractions": "I'm WE'LL they'd've o'clock 'tis it\u2019s DON'T 'S 's it'\u017f",
    "numbers": "0 1 12 123 1234 12345 1234567890 3.14159 1e-5 \u00bd \u2167 \u0663\u0664\u0665 \u3007",
    "signs": "!!! ??? ... --- *** ((((a)))) <<<>>> [[[x]]] {}{}{} //// \\\\ ~~~ ### @@@ $$ %% ^^ && ||",
    "control tokens": "</s><s> <|endoftext|> [MASK] [CLS] <pad><unk> <|begin_of_text|> [INST] <mask> </s",
    "byte tokens": "<0x41> <0x0A><0xFF> <0xZZ> <SPECIAL_20> <|reserved_token_1|>",
    "the space mark": "\u2581 a\u2581b \u2581\u2581c\u2581",
    "Chinese": (
        "\u4eba\u5de5\u667a\u80fd\u5728\u4e2d\u56fd\uff0c\u53d1\u5c55\u5f97\u5f88\u5feb\u3002abc\u4e2d\u6587d"
        "ef \u3000 \u7e41\u9ad4"
    ),
    "Japanese": (
        "\u5410\u8f29\u306f\u732b\u3067\u3042\u308b\u3002\u540d\u524d\u306f\u307e\u3060\u7121\u3044\u3002"
        "\u30ab\u30bf\u30ab\u30ca \uff76\uff9e \u30ac\u30d3"
    ),
    "Korean": (
        "\ud55c\uad6d\uc5b4 \ubb38\uc7a5\uc785\ub2c8\ub2e4. \u1112\u1161\u11ab\u1100\u1173\u11af \u314b\u314b\u314b"
    ),
    "Arabic and Hebrew": (
        "\u0627\u0644\u0639\u0631\u0628\u064a\u0629\u064f \u0645\u0650\u0646 \u05e2\u05b4\u05d1\u05b0\u05e8"
        "\u05b4\u05d9\u05ea \u200f(\u0628)\u200e"
    ),
    "Indic and Thai": (
        "\u0939\u093f\u0928\u094d\u0926\u0940 \u0915\u094d\u200d\u0937 \u0ba4\u0bae\u0bbf\u0bb4\u0bcd \u0e44"
        "\u0e17\u0e22\u0e44\u0e21\u0e48\u0e21\u0e35\u0e27\u0e23\u0e23\u0e04"
    ),
    "Cyrillic and Greek": (
        "\u041f\u0440\u0438\u0432\u0435\u0442, \u041c\u0418\u0420! \u0451\u0436\u0438\u043a \u0395\u03bb"
        "\u03bb\u03ac\u03c2 \u03a3\u03c2 \u0130\u0131"
    ),
    "emoji": (
        "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 \U0001f1e9\U0001f1ea\U0001f44d"
        "\U0001f3fd \u2764\ufe0f 1\ufe0f\u20e3"
    ),
    "combining marks": "e\u0301 a\u0323\u0302 o\u0302\u0323 x\u0301\u0327 \u00e9 \u1ed9 Z\u0351\u036b\u0343 \u212b",
    "compatibility": (
        "\ufb01ne \ufb03 \uff21\uff22\uff23 \uff11\uff12 \u2460 \u2122 \u00b2 \u01c4 \u337f \u1e9e \u2075"
        "\u2044\u2086 \u00a8a"
    ),
    "control characters": "a\x00b\x01c\x07d\x1b[0m\x7f\x85e\x9ff\u00adg",
    "odd spaces": "a\u00a0b\u2003c\u2009d\u200be\u202ff\u3000g\u2028h\u2029i\ufeffj\u1680k\u180el\u2060m",
    "rare points": "\ufffd\ufffe\U0010ffff\ue000 \U0001d54f\U0001d4d0 \U00020000 \u0378 \u1885",
    "a long word": "pneumonoultramicroscopicsilicovolcanoconiosis" * 7 + "\u00df" * 99 + "ab" * 200 + "a" * 333,
    "mixed": (
        "\tHTTPServer2Go\u2014na\u00efve caf\u00e9's \u201cquote\u201d... 50% of $1,234.56\u20ac @user #tag h"
        "ttp://x.y/?q=1&r=%20 \u00a9\n"
    ),
}


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
    """Load the library that a tiktoken file was made for."""
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
    """Return the name of the library that a tokenizer's file was made for, and its encoding of plain text."""
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
    """Return the encoding of transformers with the exported tokenizer of a run; None if the export has no tokenizer."""
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
    """Return a row of the table, and whether all texts have equal tokens everywhere, or a note on the difference."""
    core = core_file(folder)
    assert core is not None, folder
    library, theirs = _library(core)
    tokenizer = load_tokenizer(folder)
    expected = {name: theirs(text) for name, text in TEXTS.items()}
    batch = tokenizer.encode_batch(list(TEXTS.values()))
    inner = [_inner(tokenizer, tokenizer.encode_prompt(text)) for text in TEXTS.values()]
    with tempfile.TemporaryDirectory() as temporary:
        exported = _exported(tokenizer, folder, Path(temporary))
        variants = {
            "training": [tokenizer.encode_array(text).tolist() for text in TEXTS.values()],
            "batches": batch,
            "prompts": inner,
            "exported": [] if exported is None else [exported(text) for text in TEXTS.values()],
        }
    cells, good = [], True
    for way, found in variants.items():
        # a tokenizer that is read differently, with a note, is exported as it is read
        wanted = variants["training"] if way == "exported" and tokenizer.notes() else list(expected.values())
        wrong = [name for name, ids, right in zip(TEXTS, found, wanted, strict=False) if ids != right]
        said = "said to differ" if tokenizer.notes() else "not"
        cells.append(f"{len(found) - len(wrong)}" + (f" ({said}: {', '.join(wrong)})" if wrong else ""))
        good &= not wrong or bool(tokenizer.notes())
        if way == "exported" and exported is None:
            cells[-1] = "said to differ"
    return [folder.name, core.name, library, f"{tokenizer.vocab_size}", *cells], good


def _inner(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    """Return a prompt without the special tokens around it."""
    around = tokenizer.encode_prompt("")
    before = next((n for n in range(len(around), -1, -1) if ids[:n] == around[:n]), 0) if around else 0
    if not around:
        return ids
    first = 1 if before else 0
    return ids[first : len(ids) - (len(around) - first)]


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return 1 if a tokenizer differs from its library without a note."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.checks.tokenizers", description=__doc__.partition("\n\n")[0]
    )
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
