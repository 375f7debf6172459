"""The choice of a folder's weight files: those that transformers would read, by name and in its order."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from base.errors import ConfigError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
PICKLED_INDEX_NAME = "pytorch_model.bin.index.json"
PICKLED_SINGLE_NAME = "pytorch_model.bin"
# Files that look like weights, but that transformers does not read unasked.
LIKE_WEIGHTS = re.compile(r".+\.(safetensors|bin|index(\.\w+)?\.json|pt|pth|ckpt|ckpt\.index|h5|msgpack|gguf|npz|onnx)")
VARIANT = re.compile(
    r"(?P<stem>model|pytorch_model)\.(?P<variant>\w+)\.(?P<suffix>safetensors|bin)"
    r"|(?P<index>(model\.safetensors|pytorch_model\.bin)\.index)\.(?P<of_index>\w+)\.json"
)


@dataclass(frozen=True)
class WeightFileChoice:
    """The single file or the index to read, and a note for the user if other files are ignored."""

    name: str
    note: str | None = None

    @property
    def suffix(self) -> str:
        """The ending of the names of files that hold tensors."""
        return ".bin" if self.name in (PICKLED_SINGLE_NAME, PICKLED_INDEX_NAME) else ".safetensors"


def choose(folder: Path, pickled: bool) -> WeightFileChoice:
    """Return the file or index of a folder to read; with `pickled` torch.save's files too, if there are no safetensors.

    Raises ConfigError if there is none, or if two files of one format could be the model.
    """
    formats = [(SINGLE_NAME, INDEX_NAME), *([(PICKLED_SINGLE_NAME, PICKLED_INDEX_NAME)] if pickled else [])]
    found = [[name for name in names if os.path.lexists(folder / name)] for names in formats]
    there = [names for names in found if names]
    if not there:
        *names, last = [name for pair in formats for name in pair]
        raise ConfigError(f"folder {folder} must hold {', '.join(names)} or {last}{_instead(folder)}.")
    if len(there[0]) > 1:
        single, index = there[0]
        raise ConfigError(f"folder {folder} holds {single} and {index}: keep only the one that belongs to the model.")
    name = there[0][0]
    others = [other for names in there[1:] for other in names]
    if others:
        return WeightFileChoice(
            name, f"{folder} holds {name} and {' and '.join(others)}: {name} is read, as transformers does"
        )
    return WeightFileChoice(name)


def _instead(folder: Path) -> str:
    """Return what a folder without readable weights holds instead, and the way out, as the end of a message."""
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    variants = [(name, match) for name in names if (match := VARIANT.fullmatch(name)) is not None]
    if variants:
        # An index is preferred: the files that it names keep their names.
        name, match = min(variants, key=lambda item: item[1]["index"] is None)
        plain = f"{match['index']}.json" if match["index"] else f"{match['stem']}.{match['suffix']}"
        variant = match["variant"] or match["of_index"]
        return f"; it holds {name}, the variant {variant}, which is read under the name {plain}: rename it"
    like = [name for name in names if LIKE_WEIGHTS.fullmatch(name)]
    return f"; it holds {', '.join(like[:3])}{' and others' if len(like) > 3 else ''}" if like else ""
