"""The reader of logical tensors: from a checkpoint of any layout, a folder of logical weights or a Hugging Face folder,
any tensor, a slice of it, or one expert of a stack."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch

from checkpoint import manifest
from checkpoint.logical.sources import ModelSource, of_checkpoint, of_huggingface, of_weights
from configs.schema import Config, ConfigError
from memory.read_only_file import BounceBuffers, ReadOnlyFile
from models.weight_files.expected import logical_shapes
from models.weight_files.pieces import fill, wrong_cover
from models.weight_files.stored import as_matrix


def open_logical(path: Path, direct: bool = False) -> LogicalReader:
    """Open a trained model's tensors: of a run its newest good checkpoint, with every byte checked.

    direct: read past the kernel's cache where the file systems allow it. Raises ConfigError, before any tensor is read,
    where one is missing, there twice, or of another shape than the model's.
    """
    kind, bounce = manifest.kind_of_model(path), BounceBuffers() if direct else None
    if kind == "checkpoint":
        return LogicalReader(of_checkpoint(manifest.good_checkpoint_at(path), bounce))
    return LogicalReader((of_weights if kind == "weights" else of_huggingface)(path, bounce))


class LogicalReader:
    """A model's tensors by their logical names (models/weights.py), without a model. Several threads may read at
    once; the files stay open, so that one that is deleted meanwhile still reads."""

    def __init__(self, source: ModelSource) -> None:
        self._source, self._weights = source, source.weights
        expected = logical_shapes(source.config, source.vocab_size)
        for name in [*expected, *(name for name in self._weights if name not in expected)]:
            if name not in self._weights:
                raise ConfigError(f"{source.folder} has no tensor {name}, which its config calls for.")
            weight = self._weights[name]
            if weight.shape != expected.get(name):
                calls_for = (
                    f"its config calls for {list(expected[name])}" if name in expected else "its config has none"
                )
                raise ConfigError(f"tensor {name} of {source.folder} has shape {list(weight.shape)}, but {calls_for}.")
            problem = wrong_cover(weight.blocks, *as_matrix(weight.shape))
            if problem is not None:
                raise ConfigError(f"tensor {name} of {source.folder} is not whole: {problem}.")

    @property
    def kind(self) -> str:
        """What the folder is: checkpoint, weights or huggingface."""
        return self._source.kind

    @property
    def folder(self) -> Path:
        """The folder that the tensors are read from: of a run, its checkpoint."""
        return self._source.folder

    @property
    def config(self) -> Config:
        """What the folder says of its model. `training.precision` is that of most weights."""
        return self._source.config

    @property
    def vocab_size(self) -> int:
        """Tokens of the model, without padding."""
        return self._source.vocab_size

    @property
    def main_dtype(self) -> torch.dtype:
        """The type of most weights."""
        return self._source.main_dtype

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

    def names(self) -> tuple[str, ...]:
        """The logical names of all tensors, in the order of Megatron-core's modules or the family's rules."""
        return tuple(self._weights)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return self._weights[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """The type that a tensor is read with; a quantised one is read as a plain one."""
        return self._weights[name].dtype

    def num_bytes(self, name: str) -> int:
        """Bytes of a tensor of that type."""
        return math.prod(self.shape(name)) * self.dtype(name).itemsize

    def file_of(self, name: str) -> Path:
        """The file that a tensor lies in, or its first part; the folder where that is not known."""
        stored = self._weights[name].blocks[0].stored.source
        return stored.path if isinstance(stored, ReadOnlyFile) else self.folder

    def fill(self, name: str, target: torch.Tensor, at: Sequence[int] | None = None) -> None:
        """Fill a tensor of the host, which may be strided and of any float type, with the box of the logical tensor
        that begins at `at` (its first number by default) and has the target's shape.

        Raises ConfigError, in a line with file and tensor, where a file cannot be read; ValueError for a box that does
        not lie inside.
        """
        shape = self.shape(name)
        first = tuple(at) if at is not None else (0,) * len(shape)
        if not len(shape) == len(first) == target.dim() or not all(
            0 <= o and o + n <= size for o, n, size in zip(first, target.shape, shape)
        ):
            raise ValueError(f"a box {list(target.shape)} at {list(first)} lies outside {name} {list(shape)}")
        matrix = target if target.dim() == 2 else target.unsqueeze(-1)
        fill(matrix, self._weights[name].blocks, (first[0], first[1] if len(first) == 2 else 0))

    def get(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A whole tensor, as `dtype` (None: as it is read). Raises ConfigError."""
        result = torch.empty(self.shape(name), dtype=dtype or self.dtype(name))
        self.fill(name, result)
        return result

    def close(self) -> None:
        """Close the files. Nothing is read any more."""
        self._source.close()
