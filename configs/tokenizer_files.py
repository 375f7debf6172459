"""Which files of a folder are its tokenizer. Imports nothing of Mixtrain: the rooms that read, keep and convert
tokenizers agree on it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

# What says how a tokenizer treats text beside the file that holds its vocabulary.
SETTINGS = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
# Names that Hugging Face's tokenizers give to vocabularies.
VOCABULARIES = (
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
)
# In a folder of logical weights: the folder with what the export to Hugging Face adds to a tokenizer that only we read.
FOR_TRANSFORMERS = "huggingface"
JSON, MODEL = "tokenizer.json", "tokenizer.model"
# Formats, by the file that decides what a tokenizer does. In a folder with several the first one is taken.
TEKKEN, BYTE_PAIRS, WORD_PIECES, TIKTOKEN = "tekken.json", "vocab.json", "vocab.txt", "tiktoken"
PATTERNS = {
    JSON: ("tokenizer.json",),
    MODEL: ("*.model",),
    TEKKEN: ("tekken.json",),
    BYTE_PAIRS: ("vocab.json", "*-vocab.json", "encoder.json"),
    WORD_PIECES: ("vocab.txt", "*-vocab.txt"),
    TIKTOKEN: ("*.tiktoken",),
}
# Classes of tokenizer_config.json that read another format than the first one.
OF_CLASS = {
    **dict.fromkeys(("GPT2Tokenizer", "GPTNeoXTokenizer", "RobertaTokenizer", "Qwen2Tokenizer"), BYTE_PAIRS),
    **dict.fromkeys(("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer"), WORD_PIECES),
    "QWenTokenizer": TIKTOKEN,
}
# Model types whose tokenizers transformers 5 reads with this class, whatever a folder says
# (models/auto/tokenization_auto.py).
ALWAYS_READ_WITH = {"qwen2": "Qwen2Tokenizer"}
RANK_LINE = re.compile(rb"[A-Za-z0-9+/]+=* \d+\s*")


def format_of(file: Path) -> str:
    """The format of a tokenizer's file, by its name, and by the first line of a .model file."""
    name = file.name
    if name.endswith((".model", ".tiktoken")):
        return TIKTOKEN if name.endswith(".tiktoken") or _holds_ranks(file) else MODEL
    if name.endswith(".json"):
        if "tekken" in name:
            return TEKKEN
        return BYTE_PAIRS if name.endswith("vocab.json") or name == "encoder.json" else JSON
    return WORD_PIECES if name.endswith(".txt") else MODEL


def formats_in(folder: Path) -> dict[str, list[Path]]:
    """The files in a folder that each may be a tokenizer, by kind, the kind that is taken first."""
    found = {kind: sorted({file for name in names for file in folder.glob(name)}) for kind, names in PATTERNS.items()}
    found = {kind: [file for file in files if file.is_file()] for kind, files in found.items()}
    # without its merges it is none: other files are called vocab.json, too
    found[BYTE_PAIRS] = [file for file in found[BYTE_PAIRS] if merges_beside(file) is not None]
    first = [JSON, OF_CLASS.get(_class_in(folder), JSON)]
    return {kind: found[kind] for kind in [*dict.fromkeys([*first, *PATTERNS])] if found[kind]}


def core_file(path: Path) -> Path | None:
    """The file that decides what the tokenizer at `path`, a file or a folder, does; None where there is none, or two of
    the kind that would be taken."""
    if not path.is_dir():
        return path if path.is_file() else None
    files = next(iter(formats_in(path).values()), [])
    return files[0] if len(files) == 1 else None


def merges_beside(file: Path) -> Path | None:
    """The merges of a vocab.json, of gpt2-vocab.json, or of encoder.json; None where there are none."""
    name = "vocab.bpe" if file.name == "encoder.json" else f"{file.name.removesuffix('vocab.json')}merges.txt"
    return file.with_name(name) if file.with_name(name).is_file() else None


def _holds_ranks(file: Path) -> bool:
    """Whether a file is one of tiktoken's, by its first line."""
    try:
        with file.open("rb") as stream:
            return RANK_LINE.fullmatch(stream.readline(4096)) is not None
    except OSError:
        return False


def _class_in(folder: Path) -> str:
    """The tokenizer's class that tokenizer_config.json names; "" where it names none."""
    try:
        settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        return str(settings.get("tokenizer_class", "")).removesuffix("Fast")
    except (OSError, ValueError, AttributeError, RecursionError):
        return ""  # whoever opens the tokenizer says what is wrong with it


def tokenizer_files(path: Path) -> dict[str, Path]:
    """The files of the tokenizer at `path`, a file or a folder, by the names that readers look for, and no others."""
    core = core_file(path)
    folder = path if path.is_dir() else path.parent
    kind = JSON if core is None else format_of(core)
    found = {name: folder / name for name in SETTINGS if (folder / name).is_file()}
    if core is None or kind == JSON:
        found |= {name: folder / name for name in VOCABULARIES if (folder / name).is_file()}
    if core is not None:
        found[core.name if kind == TIKTOKEN else kind] = core  # the name of a tiktoken file says what it is
        if kind == BYTE_PAIRS and (merges := merges_beside(core)) is not None:
            found["merges.txt"] = merges
    return found


def copy_tokenizer(path: Path, folder: Path) -> None:
    """Keep the tokenizer at `path` in `folder`, under the names that readers look for and with the usual file mode.
    Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, file in tokenizer_files(path).items():
        if not ((folder / name).exists() and file.samefile(folder / name)):
            shutil.copyfile(file, folder / name)
