"""The reader of logical tensors, from a checkpoint of any layout, a folder of logical weights or a Hugging Face folder.

It returns any tensor, a slice of it, or one expert of a stack, and what the folder says of its model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from base.errors import ConfigError
from checkpoint import kept_tokenizer, manifest, safetensors_header
from checkpoint.logical.names import WeightBlock, blocks_of, without_padding
from checkpoint.state_file import read_state
from configs.compose import load
from configs.schema import Config
from memory.read_only_file import BounceBuffers, ReadOnlyFile
from models import folder as folders
from models.huggingface import special_tokens, tensors
from models.weight_files.expected import logical_shapes
from models.weight_files.logical import LogicalTensors, LogicalWeight
from models.weight_files.stored_tensors import RowBlock, StoredMatrix
from models.weight_files.tensor_files import TORCH_DTYPES
from parallel.dtypes import DTYPES

PRECISIONS = {dtype: name for name, dtype in DTYPES.items()}


def open_logical(path: Path, direct: bool = False) -> LogicalReader:
    """Open a trained model's tensors; for a run those of its newest good checkpoint, with every byte checked.

    direct: bypass the kernel's page cache if the file system allows it. Raises ConfigError, before any tensor is read,
    if one is missing, duplicate, or of another shape than the model's.
    """
    kind = manifest.kind_of_model(path)
    if kind == "checkpoint":
        return open_checkpoint(manifest.good_checkpoint_at(path), direct)
    return LogicalReader((of_weights if kind == "weights" else of_huggingface)(path, _bounce(direct)))


def open_checkpoint(folder: Path, direct: bool = False) -> LogicalReader:
    """Open the tensors of a checkpoint that has been checked. Raises ConfigError, as `open_logical`."""
    return LogicalReader(of_checkpoint(folder, _bounce(direct)))


def _bounce(direct: bool) -> BounceBuffers | None:
    return BounceBuffers() if direct else None


class LogicalReader(LogicalTensors):
    """Reader of a trained model's tensors and of the model's description. `folder`: the folder that is read; for a run,
    the folder of its checkpoint."""

    def __init__(self, source: ModelSource) -> None:
        super().__init__(source.folder, source.weights, logical_shapes(source.config, source.vocab_size))
        self._source = source

    @property
    def kind(self) -> str:
        """The kind of the folder: checkpoint, weights or huggingface."""
        return self._source.kind

    @property
    def config(self) -> Config:
        """The model's config. `training.precision` is that of most weights."""
        return self._source.config

    @property
    def vocab_size(self) -> int:
        """Size of the model's vocabulary, without padding."""
        return self._source.vocab_size

    @property
    def tokenizer(self) -> Path:
        """The folder of the model's tokenizer, if it has one. Raises ConfigError if another tokenizer is stored
        there."""
        return self._source.tokenizer()

    @property
    def end_tokens(self) -> set[int] | None:
        """Tokens that end a text; None: the tokenizer's."""
        return self._source.end_tokens

    @property
    def trained_with(self) -> str | None:
        """The digest of the tokenizer that the model was trained with, if known."""
        return self._source.trained_with

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on the folder for the user, in lines without a full stop."""
        return self._source.notes

    @property
    def model_type(self) -> str | None:
        """The family of a Hugging Face folder."""
        return self._source.model_type

    @property
    def files(self) -> folders.Reader | None:
        """The reader of the folder's tensors as they are stored; None for a checkpoint, whose tensors are boxes."""
        return self._source.files

    def close(self) -> None:
        """Close the files."""
        self._source.close()


@dataclass(frozen=True)
class ModelSource:
    """A model's folder: its logical weights, and the rest that a user of the model needs."""

    kind: str  # checkpoint, weights or huggingface
    folder: Path
    config: Config  # its training.precision is that of the weights
    vocab_size: int
    weights: dict[str, LogicalWeight]  # by logical name, in the order of Megatron-core's modules
    tokenizer: Callable[[], Path]  # its folder; raises ConfigError if it is not the model's
    end_tokens: set[int] | None  # None: the tokenizer's
    trained_with: str | None  # digest of the tokenizer
    notes: tuple[str, ...]  # on the folder, for the user
    model_type: str | None  # of a Hugging Face folder
    files: folders.Reader | None  # every tensor as it is stored; None: a checkpoint's are boxes
    close: Callable[[], None]


def of_checkpoint(path: Path, bounce: BounceBuffers | None) -> ModelSource:
    """Open a checkpoint that has been checked. Raises ConfigError."""
    config, vocab_size = load(path / manifest.CONFIG), int(read_state(path)["vocab_size"])
    boxes = BoxFiles(path, logical_shapes(config, vocab_size), bounce)
    return ModelSource(
        "checkpoint",
        path,
        config,
        vocab_size,
        boxes.weights,
        lambda: kept_tokenizer.of_checkpoint(path) or path,
        None,
        kept_tokenizer.digest_of(path),
        (),
        None,
        None,
        boxes.close,
    )


def of_weights(path: Path, bounce: BounceBuffers | None) -> ModelSource:
    """Open a folder of logical weights. Raises ConfigError."""
    held = folders.open_logical_folder(path, bounce)
    held.config.training.precision = PRECISIONS[held.main_dtype]
    vocab_size = held.vocab_size
    return ModelSource(
        "weights",
        path,
        held.config,
        vocab_size,
        held.weights,
        lambda: path,
        special_tokens.end_tokens(path, special_tokens.kept_in(path, vocab_size)),
        None,
        (),
        None,
        held.reader,
        held.reader.close,
    )


def of_huggingface(path: Path, bounce: BounceBuffers | None) -> ModelSource:
    """Open a Hugging Face folder. Raises ConfigError."""
    hf = tensors.open_folder(path, bounce=bounce)
    vocab_size = hf.config.model.vocab_size
    assert vocab_size is not None  # every family's config.json has one
    hf.config.training.precision = PRECISIONS[hf.dtype]
    return ModelSource(
        "huggingface",
        path,
        hf.config,
        vocab_size,
        {name: hf.weight(name) for name in hf.names()},
        lambda: path,
        special_tokens.end_tokens(path, special_tokens.of_config(hf.stated, vocab_size)),
        None,
        hf.notes,
        hf.family.model_type,
        hf.reader,
        hf.reader.close,
    )


class BoxFiles:
    """A checkpoint's files, and the row blocks of the logical weights of `shapes` in them. Raises ConfigError."""

    def __init__(self, folder: Path, shapes: Mapping[str, tuple[int, ...]], bounce: BounceBuffers | None) -> None:
        self._files: list[ReadOnlyFile] = []
        blocks: dict[str, list[RowBlock]] = {}
        try:
            for path in (folder / name for name in manifest.read(folder) if name.endswith(safetensors_header.SUFFIX)):
                header, entries = safetensors_header.read_all(path)
                held = [
                    (block, entry.dtype, header.body + entry.start + block.start)
                    for entry in entries.values()
                    for block in blocks_of(entry)
                    if block.name in shapes
                ]
                if not held:
                    continue
                self._files.append(ReadOnlyFile(path, bounce))
                for block, dtype, start in held:
                    kept = without_padding(block, shapes[block.name])
                    if kept is not None:
                        blocks.setdefault(block.name, []).append(_row_block(kept, dtype, start, self._files[-1]))
        except (OSError, ValueError) as error:
            raise ConfigError(f"checkpoint {folder} cannot be read: {error}") from error
        self.weights: dict[str, LogicalWeight] = {}
        for name, shape in shapes.items():
            found = blocks.get(name, [])
            kinds = {block.stored.dtype for block in found}
            if len(kinds) > 1:
                raise ConfigError(f"checkpoint {folder} has {name} in several types: {sorted(map(str, kinds))}.")
            if found:
                self.weights[name] = LogicalWeight(shape, kinds.pop(), tuple(found))

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            file.close()


def _row_block(block: WeightBlock, dtype: str, start: int, file: ReadOnlyFile) -> RowBlock:
    row, column, end_row, end_column = block.box
    num_rows, num_columns = end_row - row, end_column - column
    stored = StoredMatrix(block.name, file, start, TORCH_DTYPES[dtype], num_rows, num_columns)
    return RowBlock(stored, 0, num_rows, row, ((0, column, num_columns),))
