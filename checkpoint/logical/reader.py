"""The reader of logical tensors, from a checkpoint of any layout, a folder of logical weights or a Hugging Face folder.
It returns any tensor, a slice of a tensor or one expert of a stack, and the model's config and tokenizer."""

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
    """Open the tensors of a trained model; of a run, those in its newest good checkpoint, after checking every byte.
    `direct`: bypass the kernel's page cache if the file system allows it. Raises ConfigError, before any tensor is
    read, if a tensor is missing, is stored twice or has a wrong shape."""
    kind = manifest.kind_of_model(path)
    if kind == "checkpoint":
        return open_checkpoint(manifest.good_checkpoint_at(path), direct)
    bounce = BounceBuffers() if direct else None
    return LogicalReader((of_weights if kind == "weights" else of_huggingface)(path, bounce))


def open_checkpoint(folder: Path, direct: bool = False) -> LogicalReader:
    """Open the tensors of a verified checkpoint. `direct`: bypass the kernel's page cache. Raises ConfigError."""
    return LogicalReader(of_checkpoint(folder, BounceBuffers() if direct else None))


class LogicalReader(LogicalTensors):
    """Reader of the tensors, config, tokenizer and end tokens of a trained model. `folder`: the folder with the
    tensors; for a run, the folder of its checkpoint."""

    def __init__(self, source: ModelSource) -> None:
        super().__init__(source.folder, source.weights, logical_shapes(source.config, source.vocab_size))
        self.kind, self.config, self.vocab_size = source.kind, source.config, source.vocab_size
        self._tokenizer = source.tokenizer
        self.end_tokens, self.trained_with, self.notes = source.end_tokens, source.trained_with, source.notes
        self.model_type, self.files, self.close = source.model_type, source.files, source.close

    @property
    def tokenizer(self) -> Path:
        """The folder of the model's tokenizer, if any. Raises ConfigError if the folder contains a different one."""
        return self._tokenizer()


@dataclass(frozen=True)
class ModelSource:
    """An open folder of a trained model: its logical weights, config, tokenizer and end tokens."""

    kind: str  # checkpoint, weights or huggingface
    folder: Path
    config: Config  # its training.precision is that of most weights
    vocab_size: int  # without padding
    weights: dict[str, LogicalWeight]  # by logical name, in the order of Megatron-core's modules
    close: Callable[[], None]
    tokenizer: Callable[[], Path]  # its folder; raises ConfigError if it is not the model's
    end_tokens: set[int] | None = None  # ids of tokens that end a text; None: the tokenizer's own
    trained_with: str | None = None  # digest of the tokenizer; None: unknown
    notes: tuple[str, ...] = ()  # about the folder, to print for the user; without a full stop
    model_type: str | None = None  # the family of a Hugging Face folder
    files: folders.Reader | None = None  # reads tensors as they are stored; None for a checkpoint, which stores boxes


def of_checkpoint(path: Path, bounce: BounceBuffers | None) -> ModelSource:
    """Open a verified checkpoint. Raises ConfigError."""
    config, vocab_size = load(path / manifest.CONFIG), int(read_state(path)["vocab_size"])
    boxes = BoxFiles(path, logical_shapes(config, vocab_size), bounce)
    return ModelSource(
        "checkpoint",
        path,
        config,
        vocab_size,
        boxes.weights,
        boxes.close,
        lambda: kept_tokenizer.of_checkpoint(path) or path,
        trained_with=kept_tokenizer.digest_of(path),
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
        held.reader.close,
        lambda: path,
        end_tokens=special_tokens.end_tokens(path, special_tokens.kept_in(path, vocab_size)),
        files=held.reader,
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
        hf.reader.close,
        lambda: path,
        end_tokens=special_tokens.end_tokens(path, special_tokens.of_config(hf.stated, vocab_size)),
        notes=hf.notes,
        model_type=hf.family.model_type,
        files=hf.reader,
    )


class BoxFiles:
    """Opens the files of a checkpoint, and finds the row blocks of logical weights in them. Raises ConfigError."""

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
            raise ConfigError(f"checkpoint {folder} cannot be read: {error}. {manifest.ADVICE}.") from error
        self.weights: dict[str, LogicalWeight] = {}
        for name, shape in shapes.items():
            found = blocks.get(name, [])
            kinds = {block.stored.dtype for block in found}
            if len(kinds) > 1:
                several = " and ".join(sorted(map(str, kinds)))
                raise ConfigError(
                    f"checkpoint {folder} has parts of {name} in different types ({several}), but all must have the "
                    f"same type. {manifest.ADVICE}."
                )
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
