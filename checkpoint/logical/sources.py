"""What each kind of folder says of its logical tensors: where they lie, and what else a user of the model asks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from checkpoint import kept_tokenizer, manifest
from checkpoint.logical.boxes import BoxFiles
from checkpoint.state_file import read_state
from configs.compose import load
from configs.schema import Config
from memory.read_only_file import BounceBuffers
from models import folder as folders
from models.huggingface import special_tokens, tensors
from models.weight_files.expected import logical_shapes
from models.weight_files.logical import LogicalWeight
from parallel.dtypes import DTYPES

PRECISIONS = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class ModelSource:
    """What a folder holds."""

    kind: str  # checkpoint, weights or huggingface
    folder: Path
    config: Config  # its training.precision is that of the weights
    vocab_size: int
    weights: dict[str, LogicalWeight]  # by logical name, in the order of Megatron-core's modules
    tokenizer: Callable[[], Path]  # where it lies; raises ConfigError where it is not the model's
    end_tokens: set[int] | None  # None: the tokenizer's
    trained_with: str | None  # digest of the tokenizer
    notes: tuple[str, ...]  # what the user should know of the folder
    model_type: str | None  # of a Hugging Face folder
    files: folders.Reader | None  # every tensor as it is stored; None: a checkpoint's are boxes
    close: Callable[[], None]


def of_checkpoint(path: Path, bounce: BounceBuffers | None) -> ModelSource:
    """A checkpoint that has been checked. Raises ConfigError."""
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
    """A folder of logical weights. Raises ConfigError."""
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
    """A Hugging Face folder. Raises ConfigError."""
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
