"""Open a trained model for use, from whatever it lies in: a run, a checkpoint, a folder of logical weights or a Hugging
Face folder."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import parallel.megatron  # noqa: F401  (before anything else of Megatron-core is imported: see parallel/megatron/startup.py)

# isort: split
import torch
import torch.distributed as dist

from checkpoint import kept_tokenizer, manifest
from checkpoint import state as checkpoint_state
from configs import progress
from configs.architecture import for_use
from configs.compose import compose, load
from configs.ranks import world_size
from configs.schema import Config, ConfigError, ParallelConfig
from configs.tokenizer_files import core_file
from configs.validate import validate_for_use
from data.tokenizer import Tokenizer, load_tokenizer
from inference.decoder import Decoder
from models import folder as folders
from models.build import build_model
from models.huggingface import special_tokens, tensors, unknown_keys
from models.weights import load_logical
from parallel import topology
from parallel.dtypes import DTYPES
from parallel.topology import Topology

PRECISIONS = {dtype: name for name, dtype in DTYPES.items()}


@dataclass
class OpenModel:
    """Model chunks of this rank with their weights, in evaluation mode. `source` is the folder that they came from."""

    config: Config
    topology: Topology
    vocab_size: int
    chunks: list[torch.nn.Module]
    tokenizer: Tokenizer | None
    end_tokens: set[int]
    source: Path

    def decoder(self) -> Decoder:
        """The model as a text generator. Raises ConfigError for one that is none."""
        return Decoder(self.chunks, self.config, self.topology, self.vocab_size)

    def needed_tokenizer(self, advice: str) -> Tokenizer:
        """The tokenizer. Raises ConfigError, ending in `advice`, where none lies beside the model."""
        if self.tokenizer is None:
            raise ConfigError(
                f"{self.source} comes without a tokenizer (docs/guide/tokenizers.md has what may be one). {advice}"
            )
        return self.tokenizer


@dataclass(frozen=True)
class _Source:
    """What a folder holds, before anything heavy is loaded."""

    folder: Path
    config: Config
    vocab_size: int
    tokenizer: Path
    load: Callable[[list[torch.nn.Module]], None]
    end_tokens: set[int] | None = None  # None: the tokenizer's
    trained_with: str | None = None  # digest of the tokenizer
    notes: tuple[str, ...] = ()  # what the user should know of the folder
    model_type: str | None = None  # of a Hugging Face folder


@contextlib.contextmanager
def open_model(
    path: Path,
    overrides: list[str] | None = None,
    *,
    precision: str | None = None,
    device: str = "auto",
    tokenizer: Path | None = None,
) -> Iterator[OpenModel]:
    """Load a model in the layout of `overrides` (`parallel.tensor=2`, ...; one rank holds all of it by default) and
    leave the job after.

    `precision` is the stored one by default. A collective call under torchrun. Raises ConfigError.
    """
    source = _find(path, tokenizer is not None)
    config = for_use(source.config)
    config.parallel = _layout(overrides or [])
    validate_for_use(config, world_size())
    config.training.device = device
    config.model.backend = "portable"  # only the weights are used
    if precision is not None:
        config.training.precision = precision
    words = _tokenizer(tokenizer or source.tokenizer, required=tokenizer is not None)
    if words is not None:
        words.as_recorded(source.trained_with)
    end_tokens = source.end_tokens
    if end_tokens is None:
        end_tokens = set() if words is None else {words.eod}
    if words is not None and words.vocab_size > source.vocab_size:
        raise ConfigError(
            f"the tokenizer {words.path} has {words.vocab_size} tokens, but the model of {path} only "
            f"{source.vocab_size}."
        )
    if words is not None and source.trained_with is not None and not words.is_named_by(source.trained_with):
        print(f"the tokenizer {words.path} is not the one that {source.folder} was trained with", file=sys.stderr)
    joined = dist.is_initialized()
    place = topology.initialize(config)
    if place.rank == 0:
        for note in source.notes:
            print(f"note: {note}.", file=sys.stderr)
        if source.model_type is not None:
            unknown_keys.warn(source.config, source.model_type)
        for note in [] if words is None else words.notes():
            print(f"note: {note}", file=sys.stderr, flush=True)
        progress.begin(f"Loading {source.folder}")
    try:
        chunks = build_model(config, place, source.vocab_size, fill=False)
        source.load(chunks)
        for chunk in chunks:
            chunk.eval()
        yield OpenModel(config, place, source.vocab_size, chunks, words, end_tokens, source.folder)
    finally:
        if joined:  # a group that was there before stays
            topology.leave_layout()
        else:
            topology.destroy()


def _find(path: Path, named: bool) -> _Source:
    """`named`: another tokenizer than the one beside the model is asked for."""
    return {"huggingface": _huggingface, "checkpoint": _checkpoint, "weights": _logical}[manifest.kind_of_model(path)](
        path, named
    )


def _checkpoint(path: Path, named: bool) -> _Source:
    newest = manifest.good_checkpoint_at(path)
    config = load(newest / manifest.CONFIG)
    vocab_size = checkpoint_state.read_state(newest)["vocab_size"]
    own = None if named else kept_tokenizer.of_checkpoint(newest)
    return _Source(
        newest,
        config,
        vocab_size,
        own or newest,
        lambda chunks: checkpoint_state.load_weights(chunks, newest),
        trained_with=kept_tokenizer.digest_of(newest),
    )


def _logical(path: Path, named: bool) -> _Source:
    config = folders.config_from(folders.read_config(path))
    vocab_size = config.model.vocab_size
    if vocab_size is None:
        raise ConfigError(f"{path / 'config.yaml'} must say model.vocab_size.")
    reader = folders.Reader(path)
    config.training.precision = PRECISIONS[reader.main_dtype(reader.names())]
    ends = special_tokens.end_tokens(path, special_tokens.kept_in(path, vocab_size))

    def fill(chunks: list[torch.nn.Module]) -> None:
        folders.load_logical_folder(chunks, path, config, vocab_size)

    return _Source(path, config, vocab_size, path, fill, end_tokens=ends)


def _huggingface(path: Path, named: bool) -> _Source:
    hf = tensors.open_folder(path)
    vocab_size = hf.config.model.vocab_size
    assert vocab_size is not None  # every family's config.json has one
    hf.config.training.precision = PRECISIONS[hf.dtype]
    ends = special_tokens.end_tokens(path, special_tokens.of_config(hf.stated, vocab_size))
    return _Source(
        path,
        hf.config,
        vocab_size,
        path,
        lambda chunks: load_logical(chunks, hf.get),
        end_tokens=ends,
        notes=hf.notes,
        model_type=hf.family.model_type,
    )


def _layout(overrides: list[str]) -> ParallelConfig:
    for text in overrides:
        if not text.startswith("parallel."):
            raise ConfigError(
                f"{text} is no key of the layout. Try parallel.tensor=2, with torchrun --nproc-per-node 2."
            )
    layout = compose(overrides).parallel if overrides else ParallelConfig()
    layout.sequence = False  # generation does not split the sequence
    return layout


def _tokenizer(path: Path, required: bool) -> Tokenizer | None:
    return load_tokenizer(path) if required or core_file(path) is not None else None


def open_from(options: argparse.Namespace) -> contextlib.AbstractContextManager[OpenModel]:
    """`open_model` with the arguments of inference/command.py."""
    return open_model(
        options.checkpoint,
        options.layout,
        precision=options.precision,
        device=options.device,
        tokenizer=options.tokenizer,
    )
