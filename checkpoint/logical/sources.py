"""What each kind of folder says of its logical tensors: where they lie, and what else a user of the model asks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from checkpoint import kept_tokenizer, manifest
from checkpoint.logical.boxes import clipped, read_boxes
from checkpoint.state_file import read_state
from configs.compose import load
from configs.schema import Config, ConfigError
from memory.read_only_file import BounceBuffers
from models import folder as folders
from models.huggingface import special_tokens, tensors
from models.weight_files.expected import logical_shapes
from models.weight_files.pieces import RowBlock, whole
from parallel.dtypes import DTYPES

PRECISIONS = {dtype: name for name, dtype in DTYPES.items()}
# Whose rows each layout pads in its own way.
PADDED = ("embedding.word_embeddings.weight", "output_layer.weight", "output_layer.bias")


@dataclass(frozen=True)
class LogicalWeight:
    """One logical tensor: its shape, the type that it is read with, and where it lies."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    blocks: tuple[RowBlock, ...]


@dataclass(frozen=True)
class ModelSource:
    """What a folder holds."""

    kind: str  # checkpoint, weights or huggingface
    folder: Path
    config: Config  # its training.precision is that of the weights
    vocab_size: int
    weights: dict[str, LogicalWeight]  # by logical name, in the order of Megatron-core's modules
    main_dtype: torch.dtype  # of most weights
    tokenizer: Callable[[], Path]  # where it lies; raises ConfigError where it is not the model's
    end_tokens: set[int] | None  # None: the tokenizer's
    trained_with: str | None  # digest of the tokenizer
    notes: tuple[str, ...]  # what the user should know of the folder
    model_type: str | None  # of a Hugging Face folder
    close: Callable[[], None]


def of_checkpoint(path: Path, bounce: BounceBuffers | None) -> ModelSource:
    """A checkpoint that has been checked. Raises ConfigError."""
    config, vocab_size = load(path / manifest.CONFIG), int(read_state(path)["vocab_size"])
    shapes = logical_shapes(config, vocab_size)
    blocks, stored, files = read_boxes(path, shapes, bounce)

    def weight(name: str, shape: tuple[int, ...]) -> LogicalWeight:
        if name not in blocks:
            raise ConfigError(f"checkpoint {path} has no tensor {name}, which its {manifest.CONFIG} calls for.")
        theirs, found = stored[name], tuple(blocks[name])
        if name in PADDED and theirs[1:] == shape[1:] and theirs[0] > shape[0]:
            found = tuple(part for block in found if (part := clipped(block, shape[0])) is not None)
        elif theirs != shape:
            raise ConfigError(f"checkpoint {path} has {name} in shape {list(theirs)}, its model in {list(shape)}.")
        kinds = {block.stored.dtype for block in found}
        if len(kinds) > 1:
            raise ConfigError(f"checkpoint {path} has {name} in several types: {', '.join(map(str, kinds))}.")
        return LogicalWeight(shape, kinds.pop() if kinds else torch.float32, found)

    def close() -> None:
        for file in files:
            file.close()

    return ModelSource(
        "checkpoint",
        path,
        config,
        vocab_size,
        {name: weight(name, shape) for name, shape in shapes.items()},
        DTYPES[config.training.precision],
        lambda: kept_tokenizer.of_checkpoint(path) or path,
        None,
        kept_tokenizer.digest_of(path),
        (),
        None,
        close,
    )


def of_weights(path: Path, bounce: BounceBuffers | None) -> ModelSource:
    """A folder of logical weights. Raises ConfigError."""
    config = folders.config_from(folders.read_config(path))
    vocab_size = config.model.vocab_size
    if vocab_size is None:
        raise ConfigError(f"{path / 'config.yaml'} must say model.vocab_size.")
    reader = folders.Reader(path, bounce=bounce)
    main = reader.main_dtype(reader.names())
    config.training.precision = PRECISIONS[main]

    def weight(name: str, shape: tuple[int, ...]) -> LogicalWeight:
        stored = reader.stored(name)
        if reader.shape(name) != shape:
            raise ConfigError(
                f"weights in {path} do not fit: weight {name} has shape {reader.shape(name)}, but this model needs "
                f"{shape}."
            )
        return LogicalWeight(shape, stored.dtype, (whole(stored),))

    return ModelSource(
        "weights",
        path,
        config,
        vocab_size,
        {name: weight(name, shape) for name, shape in logical_shapes(config, vocab_size).items()},
        main,
        lambda: path,
        special_tokens.end_tokens(path, special_tokens.kept_in(path, vocab_size)),
        None,
        (),
        None,
        reader.close,
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
        {name: LogicalWeight(hf.shape(name), hf.weight_dtype(name), tuple(hf.blocks(name))) for name in hf.names()},
        hf.dtype,
        lambda: path,
        special_tokens.end_tokens(path, special_tokens.of_config(hf.stated, vocab_size)),
        None,
        hf.notes,
        hf.family.model_type,
        hf.close,
    )
