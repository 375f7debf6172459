"""Opening of a tokenizer from a file or folder, in any supported format."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from base.errors import ConfigError
from configs import tokenizer_files
from data.tokenizer.base import OTHER, Tokenizer
from data.tokenizer.formats.rank_files import tekken, tiktoken
from data.tokenizer.formats.spec import Converted
from data.tokenizer.formats.word_lists import byte_pairs, word_pieces
from data.tokenizer.huggingface import HuggingFaceTokenizer
from data.tokenizer.sentencepiece_model import SentencePieceTokenizer
from data.tokenizer.settings import CONFIG, Settings, first_line, read_settings

MOST_TOKENS = 1 << 24  # 80 times the largest published vocabulary
EXPECTED = (
    "tokenizer.json, a sentencepiece .model, tiktoken's tokenizer.model or *.tiktoken, tekken.json, vocab.json with "
    "merges.txt, or vocab.txt"
)


def open_tokenizer(path: str | Path) -> Tokenizer:
    """Open a tokenizer from a file, or from a folder with such a file: tokenizer.json, a sentencepiece .model, or a
    format of data/tokenizer/formats. Raises ConfigError."""
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
            f"data.tokenizer={path}: its largest token id ({tokenizer.vocab_size - 1}) must be below {MOST_TOKENS}, "
            f"because a model has an embedding for each id up to it. {OTHER}"
        )
    return tokenizer


def cannot_be_read(path: str | Path, error: BaseException) -> ConfigError:
    """Return the ConfigError for an unexpected error of the library that reads the tokenizer at `path`."""
    reason = f"{type(error).__name__}: {first_line(error)[:300]}"
    return ConfigError(f"data.tokenizer={path} cannot be read as a tokenizer: {reason}. {OTHER}")


def _opened(path: str | Path) -> Tokenizer:
    full = Path(path)
    if not full.exists():
        raise ConfigError(
            f"data.tokenizer={path} does not exist. Give a file or folder with {EXPECTED}, or "
            "data.tokenizer=sentencepiece to train one"
        )
    if not full.is_dir() and not full.is_file():
        raise ConfigError(
            f"data.tokenizer={path} is neither a file nor a folder. Give a file or folder with {EXPECTED}"
        )
    core = tokenizer_files.core_file(full)
    if core is None:
        several = next(iter(tokenizer_files.formats_in(full).values()), [])
        there = ", ".join(file.name for file in several or sorted(full.iterdir())[:8]) or "nothing"
        raise ConfigError(
            f"data.tokenizer={path}: the folder contains {there}. "
            + ("Name one of these files instead of the folder" if several else f"It must contain {EXPECTED}")
        )
    kind = tokenizer_files.format_of(core)
    if kind == tokenizer_files.JSON:
        return HuggingFaceTokenizer(full)
    tokenizer = SentencePieceTokenizer(core) if kind == tokenizer_files.MODEL else ConvertedTokenizer(core)
    others = [file.name for files in tokenizer_files.formats_in(full).values() for file in files if file != core]
    if full.is_dir() and others:
        note = f"{core} is the tokenizer; {', '.join(others)} in the same folder is ignored"
        tokenizer.reading_notes = [note, *tokenizer.reading_notes]
    return tokenizer


READERS: dict[str, Callable[[Path, dict[str, Any]], Converted]] = {
    tokenizer_files.BYTE_PAIRS: byte_pairs,
    tokenizer_files.WORD_PIECES: word_pieces,
    tokenizer_files.TEKKEN: tekken,
    tokenizer_files.TIKTOKEN: tiktoken,
}


class ConvertedTokenizer(HuggingFaceTokenizer):
    """A tokenizer from a file in a further format (tiktoken, tekken.json, vocab.json, vocab.txt), converted to a
    tokenizer.json in memory."""

    def _read(self, path: str | Path) -> tuple[Path, str, Settings]:
        file = Path(path)
        converted = READERS[tokenizer_files.format_of(file)](file, read_settings(file.parent).values)
        # transformers would apply the rules of a class that the settings name
        settings = {**converted.settings, "tokenizer_class": "PreTrainedTokenizerFast"}
        for key in ("added_tokens_decoder", "add_bos_token", "add_eos_token", "auto_map"):  # they are in the spec
            settings.pop(key, None)
        self.reading_notes = converted.notes
        files = dict.fromkeys(settings, CONFIG)
        return file, json.dumps(converted.spec, ensure_ascii=False), Settings(settings, files)

    def kept_files(self) -> dict[str, str]:
        text = json.dumps(self._spec, ensure_ascii=False)
        return {tokenizer_files.JSON: text, CONFIG: json.dumps(self._settings.values, indent=2) + "\n"}
