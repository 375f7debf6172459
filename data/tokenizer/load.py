"""Open a tokenizer from its file or folder."""

from __future__ import annotations

from pathlib import Path

from configs.schema import ConfigError
from configs.tokenizer_files import JSON, MODEL, core_file, format_of, formats_in
from data.tokenizer.base import Tokenizer
from data.tokenizer.formats.converted import ConvertedTokenizer
from data.tokenizer.huggingface import HuggingFaceTokenizer
from data.tokenizer.sentencepiece_model import SentencePieceTokenizer

EXPECTED = (
    "tokenizer.json, a sentencepiece .model, tiktoken's tokenizer.model or *.tiktoken, tekken.json, vocab.json with "
    "merges.txt, or vocab.txt"
)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Open a tokenizer's file, or a folder with one: a `tokenizer.json`, a sentencepiece `.model`, or a format that
    data/tokenizer/formats reads. Raises ConfigError naming data.tokenizer."""
    place = Path(path)
    if not place.exists():
        raise ConfigError(
            f"data.tokenizer={path}: no such file or folder; give a file or folder with {EXPECTED}, or "
            "data.tokenizer=sentencepiece to train one"
        )
    core = core_file(place)
    if core is None:
        several = next(iter(formats_in(place).values()), [])
        there = ", ".join(file.name for file in several or sorted(place.iterdir())[:8]) or "nothing"
        raise ConfigError(
            f"data.tokenizer={path}: the folder holds {there}, "
            + ("of which one must be named" if several else f"and a tokenizer is one of {EXPECTED}")
        )
    kind = format_of(core)
    if kind == JSON:
        return HuggingFaceTokenizer(place)
    tokenizer = SentencePieceTokenizer(core) if kind == MODEL else ConvertedTokenizer(core)
    others = [file.name for files in formats_in(place).values() for file in files if file != core]
    if place.is_dir() and others:
        tokenizer.said = [f"{core} is the tokenizer, and {', '.join(others)} beside it is not read", *tokenizer.said]
    return tokenizer


def tokenizer_digest(path: str | Path) -> str:
    """The content of the tokenizer at `path` (as load_tokenizer takes it) in 32 hexadecimal digits. Raises
    ConfigError."""
    return load_tokenizer(path).digest


def is_tokenizer(path: str | Path, digest: str) -> bool:
    """Whether the tokenizer at `path` is the one that a run recorded as `digest`, today or by an earlier version.
    Raises ConfigError."""
    return load_tokenizer(path).is_named_by(digest)
