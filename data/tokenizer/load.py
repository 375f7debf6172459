"""Open a tokenizer from its file or folder."""

from __future__ import annotations

from pathlib import Path

from configs.schema import ConfigError
from configs.tokenizer_files import core_file
from data.tokenizer.base import Tokenizer
from data.tokenizer.huggingface import HuggingFaceTokenizer
from data.tokenizer.sentencepiece_model import SentencePieceTokenizer


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Open a sentencepiece `.model`, a `tokenizer.json`, or a folder with either. Raises ConfigError naming
    data.tokenizer."""
    place = Path(path)
    if not place.exists():
        raise ConfigError(
            f"data.tokenizer={path}: no such file or folder; give a sentencepiece .model file, a Hugging Face folder "
            "or tokenizer.json, or data.tokenizer=sentencepiece to train one"
        )
    core = core_file(place)
    if core is None:
        count = len(list(place.glob("*.model")))
        raise ConfigError(
            f"data.tokenizer={path}: the folder holds no tokenizer.json and {count} .model files (one is needed)"
        )
    if core.suffix == ".json":
        return HuggingFaceTokenizer(place)
    return SentencePieceTokenizer(core)


def tokenizer_digest(path: str | Path) -> str:
    """The content of the tokenizer at `path` (as load_tokenizer takes it) in 32 hexadecimal digits. Raises
    ConfigError."""
    return load_tokenizer(path).digest


def is_tokenizer(path: str | Path, digest: str) -> bool:
    """Whether the tokenizer at `path` is the one that a run recorded as `digest`, today or by an earlier version.
    Raises ConfigError."""
    return load_tokenizer(path).is_named_by(digest)


def tokenizer_file(path: str | Path) -> Path:
    """The file that decides what the tokenizer at `path` does."""
    return core_file(Path(path)) or Path(path)
