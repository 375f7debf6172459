"""Detection of a tokenizer's files in a folder, for the packages that read, store and convert tokenizers. Imports
nothing of Mixtrain."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

# Files with a tokenizer's settings, in addition to its vocabulary.
SETTINGS = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
# File names of vocabularies of Hugging Face's tokenizers.
VOCABULARIES = (
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
)
# Subfolder of a weights folder, with the files that an export to Hugging Face adds for a format that transformers
# cannot read.
FOR_TRANSFORMERS = "huggingface"
JSON, MODEL = "tokenizer.json", "tokenizer.model"
# Formats, named by the file that defines the tokenizer. In a folder with several the first one is used.
TEKKEN, BYTE_PAIRS, WORD_PIECES, TIKTOKEN = "tekken.json", "vocab.json", "vocab.txt", "tiktoken"
PATTERNS = {
    JSON: ("tokenizer.json",),
    MODEL: ("*.model",),
    TEKKEN: ("tekken.json",),
    BYTE_PAIRS: ("vocab.json", "*-vocab.json", "encoder.json"),
    WORD_PIECES: ("vocab.txt", "*-vocab.txt"),
    TIKTOKEN: ("*.tiktoken",),
}
# Formats that a tokenizer class named in tokenizer_config.json reads, if it is not tokenizer.json.
OF_CLASS = {
    **dict.fromkeys(("GPT2Tokenizer", "GPTNeoXTokenizer", "RobertaTokenizer", "Qwen2Tokenizer"), BYTE_PAIRS),
    **dict.fromkeys(("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer"), WORD_PIECES),
    "QWenTokenizer": TIKTOKEN,
}
# Model types for which transformers 5 always uses this tokenizer class, even if the folder names another
# (models/auto/tokenization_auto.py).
ALWAYS_READ_WITH = {"qwen2": "Qwen2Tokenizer"}
RANK_LINE = re.compile(rb"[A-Za-z0-9+/]+=* \d+\s*")


def format_of(file: Path) -> str:
    """Return the format of a tokenizer's main file, from its name or, for a .model file, from its first line."""
    name = file.name
    if name.endswith((".model", ".tiktoken")):
        return TIKTOKEN if name.endswith(".tiktoken") or _holds_ranks(file) else MODEL
    if name.endswith(".json"):
        if "tekken" in name:
            return TEKKEN
        return BYTE_PAIRS if name.endswith("vocab.json") or name == "encoder.json" else JSON
    return WORD_PIECES if name.endswith(".txt") else MODEL


def formats_in(folder: Path) -> dict[str, list[Path]]:
    """Return the files of a folder that can define a tokenizer, as lists by format with the preferred format first."""
    found = {kind: sorted({file for name in names for file in folder.glob(name)}) for kind, names in PATTERNS.items()}
    found = {kind: [file for file in files if file.is_file()] for kind, files in found.items()}
    # Only with merges: other kinds of files are called vocab.json, too.
    found[BYTE_PAIRS] = [file for file in found[BYTE_PAIRS] if merges_of(file) is not None]
    first = [JSON, OF_CLASS.get(_class_in(folder), JSON)]
    return {kind: found[kind] for kind in [*dict.fromkeys([*first, *PATTERNS])] if found[kind]}


def core_file(path: Path) -> Path | None:
    """Return the file that defines the tokenizer at `path` (a file or a folder); None if there is none, or several."""
    if not path.is_dir():
        return path if path.is_file() else None
    files = next(iter(formats_in(path).values()), [])
    return files[0] if len(files) == 1 else None


def merges_of(file: Path) -> Path | None:
    """Return the merges file that belongs to a vocab.json, NAME-vocab.json or encoder.json, or None."""
    name = "vocab.bpe" if file.name == "encoder.json" else f"{file.name.removesuffix('vocab.json')}merges.txt"
    return file.with_name(name) if file.with_name(name).is_file() else None


def _holds_ranks(file: Path) -> bool:
    """Return whether the first line of a file has tiktoken's format (base64, a space, a rank)."""
    try:
        with file.open("rb") as stream:
            return RANK_LINE.fullmatch(stream.readline(4096)) is not None
    except OSError:
        return False


def _class_in(folder: Path) -> str:
    """Return the tokenizer class that a folder's tokenizer_config.json names, or an empty string."""
    try:
        settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        return str(settings.get("tokenizer_class", "")).removesuffix("Fast")
    except (OSError, ValueError, AttributeError, RecursionError):
        return ""  # opening the tokenizer reports the error


def tokenizer_files(path: Path) -> dict[str, Path]:
    """Return the files of the tokenizer at `path` (a file or a folder), by the standard names under which tokenizers
    are opened, such as vocab.json for NAME-vocab.json."""
    core = core_file(path)
    folder = path if path.is_dir() else path.parent
    kind = JSON if core is None else format_of(core)
    found = {name: folder / name for name in SETTINGS if (folder / name).is_file()}
    if core is None or kind == JSON:
        found |= {name: folder / name for name in VOCABULARIES if (folder / name).is_file()}
    if core is not None:
        found[core.name if kind == TIKTOKEN else kind] = core  # a tiktoken file is recognized by its own name only
        if kind == BYTE_PAIRS and (merges := merges_of(core)) is not None:
            found["merges.txt"] = merges
    return found


def copy_tokenizer(path: Path, folder: Path) -> None:
    """Copy the files of the tokenizer at `path` to `folder`, under the names that readers expect. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, file in tokenizer_files(path).items():
        if not ((folder / name).exists() and file.samefile(folder / name)):
            shutil.copyfile(file, folder / name)
