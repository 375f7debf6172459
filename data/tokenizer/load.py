"""Open a tokenizer from its file or folder."""

from __future__ import annotations

from pathlib import Path

from configs.schema import ConfigError
from configs.tokenizer_files import JSON, MODEL, core_file, format_of, formats_in
from data.tokenizer.base import Tokenizer
from data.tokenizer.formats.converted import ConvertedTokenizer
from data.tokenizer.huggingface import HuggingFaceTokenizer
from data.tokenizer.sentencepiece_model import SentencePieceTokenizer
from data.tokenizer.settings import first_line

MOST_TOKENS = 1 << 24  # 80 times the largest published vocabulary
EXPECTED = (
    "tokenizer.json, a sentencepiece .model, tiktoken's tokenizer.model or *.tiktoken, tekken.json, vocab.json with "
    "merges.txt, or vocab.txt"
)


def open_tokenizer(path: str | Path) -> Tokenizer:
    """Open a tokenizer's file, or a folder with one: a `tokenizer.json`, a sentencepiece `.model`, or a format that
    data/tokenizer/formats reads. Raises ConfigError naming data.tokenizer."""
    try:
        tokenizer = _opened(path)
    except ConfigError:
        raise
    except BaseException as error:
        if isinstance(error, (KeyboardInterrupt, SystemExit, MemoryError)):
            raise
        raise cannot_be_read(path, error) from error
    if tokenizer.vocab_size > MOST_TOKENS:
        raise ConfigError(
            f"data.tokenizer={path}: its largest token id is {tokenizer.vocab_size - 1}, and must be below "
            f"{MOST_TOKENS}: a model has an embedding for each id up to it"
        )
    return tokenizer


def cannot_be_read(path: str | Path, error: BaseException) -> ConfigError:
    """The mistake that an unexpected error of a reader is."""
    return ConfigError(
        f"data.tokenizer={path}: it cannot be read as a tokenizer: {type(error).__name__}: {first_line(error)[:300]}"
    )


def _opened(path: str | Path) -> Tokenizer:
    place = Path(path)
    if not place.exists():
        raise ConfigError(
            f"data.tokenizer={path}: no such file or folder; give a file or folder with {EXPECTED}, or "
            "data.tokenizer=sentencepiece to train one"
        )
    if not place.is_dir() and not place.is_file():
        raise ConfigError(f"data.tokenizer={path}: it is neither a file nor a folder; give one with {EXPECTED}")
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
