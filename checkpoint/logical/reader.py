"""The reader of logical tensors: from a checkpoint of any layout, a folder of logical weights or a Hugging Face folder,
any tensor, a slice of it, or one expert of a stack."""

from __future__ import annotations

from pathlib import Path

from checkpoint import manifest
from checkpoint.logical.sources import ModelSource, of_checkpoint, of_huggingface, of_weights
from configs.schema import Config
from memory.read_only_file import BounceBuffers
from models.folder import Reader
from models.weight_files.expected import logical_shapes
from models.weight_files.logical import LogicalTensors


def open_logical(path: Path, direct: bool = False) -> LogicalReader:
    """Open a trained model's tensors: of a run its newest good checkpoint, with every byte checked.

    direct: read past the kernel's cache where the file systems allow it. Raises ConfigError, before any tensor is read,
    where one is missing, there twice, or of another shape than the model's.
    """
    kind = manifest.kind_of_model(path)
    if kind == "checkpoint":
        return open_checkpoint(manifest.good_checkpoint_at(path), direct)
    return LogicalReader((of_weights if kind == "weights" else of_huggingface)(path, _bounce(direct)))


def open_checkpoint(folder: Path, direct: bool = False) -> LogicalReader:
    """The tensors of a checkpoint that has been checked. Raises ConfigError, as `open_logical`."""
    return LogicalReader(of_checkpoint(folder, _bounce(direct)))


def _bounce(direct: bool) -> BounceBuffers | None:
    return BounceBuffers() if direct else None


class LogicalReader(LogicalTensors):
    """A trained model's tensors, and what its folder says of it. `folder` is where they are read from: of a run, its
    checkpoint."""

    def __init__(self, source: ModelSource) -> None:
        super().__init__(source.folder, source.weights, logical_shapes(source.config, source.vocab_size))
        self._source = source

    @property
    def kind(self) -> str:
        """What the folder is: checkpoint, weights or huggingface."""
        return self._source.kind

    @property
    def config(self) -> Config:
        """What the folder says of its model. `training.precision` is that of most weights."""
        return self._source.config

    @property
    def vocab_size(self) -> int:
        """Tokens of the model, without padding."""
        return self._source.vocab_size

    @property
    def tokenizer(self) -> Path:
        """Where the model's tokenizer lies, if anywhere. Raises ConfigError where another is kept there."""
        return self._source.tokenizer()

    @property
    def end_tokens(self) -> set[int] | None:
        """Tokens that end a text; None: the tokenizer's."""
        return self._source.end_tokens

    @property
    def trained_with(self) -> str | None:
        """The digest of the tokenizer that the model was trained with, where that is known."""
        return self._source.trained_with

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know of the folder, in lines without a full stop."""
        return self._source.notes

    @property
    def model_type(self) -> str | None:
        """The family of a Hugging Face folder."""
        return self._source.model_type

    @property
    def files(self) -> Reader | None:
        """Every tensor of the folder's files as it is stored; None: a checkpoint's are boxes."""
        return self._source.files

    def close(self) -> None:
        """Close the files. Nothing is read any more."""
        self._source.close()
