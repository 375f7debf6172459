"""Which files of a folder are its tokenizer. Imports nothing of Mixtrain: the rooms that read, keep and convert
tokenizers agree on it."""

from __future__ import annotations

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


def core_file(path: Path) -> Path | None:
    """The file that decides what the tokenizer at `path`, a file or a folder, does: tokenizer.json or the one .model
    file; None where there is none, or more than one."""
    if not path.is_dir():
        return path if path.is_file() else None
    if (path / JSON).is_file():
        return path / JSON
    models = sorted(path.glob("*.model"))
    return models[0] if len(models) == 1 else None


def tokenizer_files(path: Path) -> dict[str, Path]:
    """The files of the tokenizer at `path`, a file or a folder, by the names that readers look for, and no others."""
    core = core_file(path)
    folder = path if path.is_dir() else path.parent
    names = SETTINGS if core is not None and core.suffix == ".model" else (*SETTINGS, *VOCABULARIES)
    found = {name: folder / name for name in names if (folder / name).is_file()}
    if core is not None:
        found[MODEL if core.suffix == ".model" else JSON] = core
    return found


def copy_tokenizer(path: Path, folder: Path) -> None:
    """Keep the tokenizer at `path` in `folder`, under the names that readers look for and with the usual file mode.
    Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, file in tokenizer_files(path).items():
        if not ((folder / name).exists() and file.samefile(folder / name)):
            shutil.copyfile(file, folder / name)
