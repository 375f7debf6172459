"""Folders of safetensors files: a reader of single tensors, and functions that read and write folders of logical
weights.

Both Hugging Face folders and folders of logical weights contain `model.safetensors`, or several files of at most
MAX_FILE_BYTES with an index. Tensors are read and written one at a time (models/weight_files/writer.py).
"""

from __future__ import annotations

import json
import math
import os
import shutil
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml

from base.checksums import write_folder_sums
from base.errors import ConfigError
from configs.architecture import architecture, description
from configs.schema import Config
from configs.weights import FORMAT, means_nothing, read_config
from configs.weights import config_from as config_from
from memory.read_only_file import BounceBuffers
from models.weight_files.choice import INDEX_NAME as INDEX_NAME
from models.weight_files.choice import SINGLE_NAME as SINGLE_NAME
from models.weight_files.choice import choose
from models.weight_files.expected import FP32_NAMES, logical_shapes
from models.weight_files.logical import LogicalWeight
from models.weight_files.stored_tensors import StoredMatrix, as_matrix, bands_of, fill, whole
from models.weight_files.tensor_files import HeldFile, PickledFile, SafetensorsFile, TensorType, one_line
from models.weight_files.writer import MAX_FILE_BYTES as MAX_FILE_BYTES
from models.weight_files.writer import TensorSpec as TensorSpec
from models.weight_files.writer import Writer as Writer
from parallel.dtypes import DTYPES, SAFETENSORS_NAMES

WEIGHT_DTYPES = {SAFETENSORS_NAMES[dtype]: dtype for dtype in DTYPES.values()}


@dataclass(frozen=True)
class _ReadableTensor:
    """A tensor that can be read by name: a whole tensor of a file, or consecutive rows of one."""

    file: SafetensorsFile | PickledFile
    name: str  # in the file
    kind: TensorType
    first_row: int | None = None  # None: the whole tensor


class Reader:
    """Reader of single tensors by name, from a folder's model.safetensors or the files of its index. Raises ConfigError
    if files are missing, damaged, or differ from the index."""

    def __init__(self, folder: Path, pickled: bool = False, bounce: BounceBuffers | None = None) -> None:
        """Open the weight files of a folder. `pickled`: accept pytorch_model.bin if there is no safetensors file.
        `bounce`: buffers for direct reads, which bypass the kernel's page cache."""
        # Folders may hold the model a second time in another format (consolidated.safetensors).
        choice = choose(folder, pickled)
        index = folder / choice.name
        files: Mapping[str, set[str] | None]  # the tensors that each file must hold; None without an index
        files = _read_index(index, choice.suffix) if choice.name.endswith(".json") else {choice.name: None}
        self.folder = folder
        self.notes = [] if choice.note is None else [choice.note]  # for the user
        self._tensors: dict[str, _ReadableTensor] = {}
        held = HeldFile()
        for file_name, expected in sorted(files.items()):
            path = folder / file_name
            file = SafetensorsFile(path, bounce) if choice.suffix == ".safetensors" else PickledFile(path, held)
            found = file.types.keys()
            for name in sorted(found & self._tensors.keys()):
                raise ConfigError(
                    f"folder {folder} has tensor {name} twice: in {file_name} and in another file. Copy the folder "
                    "again."
                )
            if expected is not None and expected != found:
                name = min(expected ^ found)
                says, has = ("lists", "lacks it") if name in expected else ("does not list", "contains it")
                raise ConfigError(f"{index} {says} tensor {name} of {file_name}, which {has}. Copy the folder again.")
            self._tensors |= {name: _ReadableTensor(file, name, kind) for name, kind in file.types.items()}

    def names(self) -> set[str]:
        """Return the names of all tensors that can be read."""
        return set(self._tensors)

    def dtype(self, name: str) -> str:
        """Return a tensor's type as safetensors spells it (F32, BF16, I64, ...), without reading the tensor."""
        return self._tensors[name].kind.dtype

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape, without reading the tensor."""
        return self._tensors[name].kind.shape

    def main_dtype(self, names: Iterable[str]) -> torch.dtype:
        """Return the dtype of most of these weights, counted in elements. Others may be fp32, such as a router's bias;
        raises ConfigError for a weight of any other type."""
        dtypes = {name: self.dtype(name) for name in sorted(names)}
        sizes: Counter[str] = Counter()
        for name, dtype in dtypes.items():
            if dtype not in WEIGHT_DTYPES:
                raise ConfigError(
                    f"tensor {name} of folder {self.folder} has type {dtype}: it must be F32, BF16 or F16. Use weight "
                    "files of one of these types."
                )
            sizes[dtype] += math.prod(self.shape(name))
        main = max(sorted(sizes), key=lambda dtype: sizes[dtype], default="F32")
        for name, dtype in dtypes.items():
            if dtype not in (main, "F32"):
                raise ConfigError(
                    f"tensor {name} of folder {self.folder} has type {dtype}, but must have F32 or the type of most "
                    f"weights, {main}. Save the model again with all weights in {main}."
                )
        return WEIGHT_DTYPES[main]

    def stored(self, name: str) -> StoredMatrix:
        """Return the location of a tensor in its file, without reading the tensor. Raises ConfigError if the tensor is
        missing."""
        if name not in self._tensors:
            raise ConfigError(
                f"folder {self.folder} has no tensor {name}, which its config calls for: weights and config "
                "belong to different models. Copy the folder again."
            )
        tensor = self._tensors[name]
        stored = tensor.file.stored(tensor.name)
        if tensor.first_row is None:
            return stored
        return stored.rows_from(tensor.first_row, as_matrix(tensor.kind.shape)[0])

    def split_rows(self, name: str, named_shapes: Sequence[tuple[str, tuple[int, ...]]]) -> None:
        """Replace a tensor by several tensors that hold its rows in order. `named_shapes`: their names and shapes.
        Raises ConfigError if a name is already in use."""
        tensor, first = self._tensors.pop(name), 0
        assert tensor.first_row is None
        for new, shape in named_shapes:
            if new in self._tensors:
                raise ConfigError(
                    f"folder {self.folder} has tensor {new} twice: as a separate tensor, and as rows of {name}. Save "
                    "the model again with only one of them."
                )
            self._tensors[new] = _ReadableTensor(tensor.file, name, TensorType(tensor.kind.dtype, shape), first)
            first += as_matrix(shape)[0]

    def get(self, name: str) -> torch.Tensor:
        """Read a tensor into host memory. Raises ConfigError if the folder has no such tensor."""
        stored = self.stored(name)
        result = torch.empty(self.shape(name), dtype=stored.read_as)
        fill(result.view(stored.num_rows, stored.num_columns), [whole(stored)])
        return result

    def equal(self, one: str, other: str) -> bool:
        """Return whether two tensors have equal shapes, types and values. Reads a few rows at a time. Raises
        ConfigError if a tensor cannot be read."""
        if self.shape(one) != self.shape(other):
            return False
        both = zip(bands_of(self.stored(one)), bands_of(self.stored(other)))
        return self.dtype(one) == self.dtype(other) and all(mine.equal(theirs) for mine, theirs in both)

    def all_names(self) -> list[str]:
        """Return the sorted names of all tensors in the files, including those that a subclass hides from `names`."""
        return sorted(self._tensors)

    def close(self) -> None:
        """Close the files. No tensor can be read afterwards."""
        for tensor in self._tensors.values():
            tensor.file.close()


def _read_index(path: Path, suffix: str) -> dict[str, set[str]]:
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(
            f"{path} weight_map ({show_json(weight_map)}) must be an object that maps the name of each tensor to the "
            "name of its file. Copy the file again."
        )
    files: dict[str, set[str]] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or not file.endswith(suffix) or Path(file).name != file:
            raise ConfigError(
                f"{path} weight_map.{name} ({show_json(file)}) must be the name of a {suffix} file in the same folder. "
                "Correct it, or copy the file again."
            )
        files.setdefault(file, set()).add(name)
    return files


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises ConfigError if the file cannot be read, has no object, or has a key
    twice."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        twice = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
        if twice:
            raise ConfigError(f"{path} has the key {twice[0]} twice. Remove one of the two entries.")
        return dict(pairs)

    try:
        content = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=unique)
    except ConfigError:
        raise
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}. Check the path and its permissions.") from error
    except (ValueError, RecursionError) as error:  # also UnicodeDecodeError, and numbers of too many digits
        raise ConfigError(f"{path} is not JSON: {one_line(error)}. Correct it, or copy it again.") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must contain a JSON object, not {show_json(content)}. Correct it, or copy it again.")
    return content


def read_token_ids(path: Path, key: str) -> set[int]:
    """Return the token ids at `key` of a JSON file, whose value is null, an id or a list of ids. Raises ConfigError for
    any other value."""
    value = read_json(path).get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token) is int for token in ids):
        raise ConfigError(
            f"{path} {key} ({show_json(value)}) must be a token id, a list of token ids, or null. Correct the value."
        )
    return set(ids)


def show_json(value: Any) -> str:
    """Return a value as JSON text, shortened for an error message."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else f"{text[:70]}..."


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Context manager that yields a temporary folder to write into. The folder is renamed to `folder` on success and
    deleted on failure. Raises ConfigError if `folder` is not empty or cannot be created."""
    if os.path.lexists(folder) and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"output folder {folder} is already in use: it must be new or empty. Try another name.")
    target = folder.resolve()  # an empty folder may be a link: its target is replaced
    # a name that neither the user nor another process has
    partial = target.with_name(f"{target.name}.partial-{uuid.uuid4().hex}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir()
    except OSError as error:
        raise ConfigError(
            f"output folder {folder} cannot be created: {error.strerror} ({error.filename}). "
            "Give a folder that you can write to."
        ) from error
    try:
        yield partial
        partial.replace(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def save_logical_folder(
    chunks: Sequence[torch.nn.Module],
    folder: str | Path,
    config: Config,
    vocab_size: int,
    dtype: torch.dtype | None = None,
) -> None:
    """Gather the logical weights of all ranks, and write them with config.yaml to a new folder. `dtype`: type of the
    written weights, except those that stay fp32 (None: unchanged types). Every rank must call this; rank 0 writes.
    Raises OSError."""
    from models.weights import gather_logical, logical_tensors  # imports Megatron-core: seconds that readers can save

    held: list[list[TensorSpec]] = [[] for _ in range(dist.get_world_size())]
    mine = [
        TensorSpec(item.name, dtype if dtype and not item.name.endswith(FP32_NAMES) else item.local.dtype, item.shape)
        for item in logical_tensors(chunks)
    ]
    dist.all_gather_object(held, mine)
    if dist.get_rank() != 0:
        for _ in gather_logical(chunks):
            pass
        dist.barrier()
        return
    specs = {spec.name: spec for specs in reversed(held) for spec in specs}  # of the first rank that holds it
    with new_folder(Path(folder)) as partial:
        writer = Writer(partial, [specs[name] for name in sorted(specs)], shown=True)
        for name, tensor in gather_logical(chunks):
            writer.add(name, tensor.to(specs[name].dtype))
        writer.close()
        write_config(partial, description(config, vocab_size))
        write_folder_sums(partial)
    dist.barrier()


@dataclass(frozen=True)
class LogicalFolder:
    """An open folder of logical weights (whole weights under Megatron's names): its configuration, the location of each
    weight, and a reader of its files."""

    config: Config
    vocab_size: int
    main_dtype: torch.dtype  # of most weights
    weights: dict[str, LogicalWeight]
    reader: Reader


def open_logical_folder(folder: Path, bounce: BounceBuffers | None = None) -> LogicalFolder:
    """Open a folder of logical weights, and ignore tensors that its model does not have. `bounce`: buffers for direct
    reads, which bypass the kernel's page cache. Raises ConfigError, also if a weight is missing."""
    config = config_from(read_config(folder))
    vocab_size = config.model.vocab_size
    if vocab_size is None:
        raise ConfigError(
            f"{folder / 'config.yaml'} must contain model.vocab_size (the number of tokens). Import or export the "
            "folder again."
        )
    reader = Reader(folder, bounce=bounce)
    weights = {}
    for name in logical_shapes(config, vocab_size):
        stored = reader.stored(name)
        weights[name] = LogicalWeight(reader.shape(name), stored.read_as, (whole(stored),))
    return LogicalFolder(config, vocab_size, reader.main_dtype(reader.names()), weights, reader)


def load_logical_folder(
    chunks: Sequence[torch.nn.Module],
    folder: str | Path,
    config: Config,
    vocab_size: int,
    off_device: Iterable[AbstractContextManager[None]] = (),
) -> None:
    """Load the weights of this rank's model chunks, in any layout, from a folder of logical weights. `off_device`:
    contexts that make offloaded weights accessible (see models/weights.py). Raises ConfigError if the folder belongs to
    a different model."""
    folder = Path(folder)
    theirs = read_config(folder)
    wrong = [
        f"{section}.{key} is {value} in this run and {theirs[section].get(key)} in the folder"
        for section, values in architecture(config, vocab_size).items()
        for key, value in values.items()
        if theirs[section].get(key) != value
        and not means_nothing(config, f"{section}.{key}", value, theirs[section].get(key))
    ]
    if wrong:
        raise ConfigError(
            f"weights in {folder} belong to another model: {'; '.join(wrong)}. Use the values of "
            f"{folder / 'config.yaml'}."
        )
    from models.weights import load_logical  # imports Megatron-core: seconds that readers can save

    reader = Reader(folder)
    try:
        load_logical(chunks, reader.get, off_device)
    except ValueError as error:
        raise ConfigError(
            f"weights in {folder} do not fit this model: {error}. Import or export the folder again."
        ) from error


def write_config(
    folder: Path, overrides: dict[str, dict[str, Any]], special_tokens: dict[str, Any] | None = None
) -> None:
    """Write config.yaml of a folder of logical weights: the overrides of `model` and `moe`, and the special tokens if
    they are known."""
    known = {} if special_tokens is None else {"special_tokens": special_tokens}
    (folder / "config.yaml").write_text(yaml.safe_dump({"format": FORMAT, **overrides, **known}, sort_keys=False))
