"""The choice of the weight files to read in a folder, in transformers' order of preference."""

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
    """The weight file or index to read, and a note for the user if the folder has others that are ignored."""

    name: str
    note: str | None = None

    @property
    def suffix(self) -> str:
        """File name suffix of the files that hold the tensors: .bin or .safetensors."""
        return ".bin" if self.name in (PICKLED_SINGLE_NAME, PICKLED_INDEX_NAME) else ".safetensors"


def choose(folder: Path, pickled: bool) -> WeightFileChoice:
    """Return the weight file or index to read in a folder. `pickled`: accept a file of torch.save if the folder has no
    safetensors file. Raises ConfigError if there is no such file, or if two files of one format could be the model."""
    formats = [(SINGLE_NAME, INDEX_NAME), *([(PICKLED_SINGLE_NAME, PICKLED_INDEX_NAME)] if pickled else [])]
    found = [[name for name in names if os.path.lexists(folder / name)] for names in formats]
    there = [names for names in found if names]
    if not there:
        *names, last = [name for pair in formats for name in pair]
        raise ConfigError(f"folder {folder} must hold {', '.join(names)} or {last}{_instead(folder)}.")
    if len(there[0]) > 1:
        single, index = there[0]
        raise ConfigError(f"folder {folder} holds {single} and {index}: keep only the file that belongs to the model.")
    name = there[0][0]
    others = [other for names in there[1:] for other in names]
    note = f"{folder} holds {name} and {' and '.join(others)}: {name} is read, as transformers does"
    return WeightFileChoice(name, note if others else None)


def _instead(folder: Path) -> str:
    """Return the end of an error message: the weight files that a folder has instead, and what to do."""
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    variants = [(name, match) for name in names if (match := VARIANT.fullmatch(name)) is not None]
    if variants:
        # An index is preferred: the files that it names keep their names.
        name, match = min(variants, key=lambda item: item[1]["index"] is None)
        plain = f"{match['index']}.json" if match["index"] else f"{match['stem']}.{match['suffix']}"
        variant = match["variant"] or match["of_index"]
        return f"; it has {name}, the variant {variant}: rename it to {plain}"
    like = [name for name in names if LIKE_WEIGHTS.fullmatch(name)]
    instead = f"; it holds {', '.join(like[:3])}{' and others' if len(like) > 3 else ''}" if like else ""
    return f"{instead}. Copy the model's weight file into it"
