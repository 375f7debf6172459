"""Open a trained model for use, from a run, a checkpoint, a folder of logical weights or a Hugging Face folder.

No training model is built: weights are read from the files as they are used, and stay in memory if they fit.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import parallel.megatron  # noqa: F401  (before anything else of Megatron-core is imported: see parallel/megatron/startup.py)

# isort: split
import torch.distributed as dist

from base import progress
from base.errors import ConfigError
from base.ranks import world_size
from checkpoint.logical.reader import LogicalReader, open_logical
from configs.architecture import for_use
from configs.compose import compose
from configs.schema import Config, ParallelConfig
from configs.tokenizer_files import core_file
from configs.validate import validate_for_use
from data.tokenizer import Tokenizer, load_tokenizer
from inference.decoder import Decoder, Encoder
from inference.weights.budget import memory_budget
from inference.weights.file_weights import FileWeights
from models.huggingface import unknown_keys
from parallel import topology
from parallel.dtypes import DTYPES
from parallel.topology import Topology


@dataclass
class OpenModel:
    """This rank's weights, and the config, layout and tokenizer of the model. `source`: the folder of the weights."""

    config: Config
    topology: Topology
    vocab_size: int
    weights: FileWeights
    tokenizer: Tokenizer | None
    end_tokens: set[int]
    source: Path

    def decoder(self) -> Decoder:
        """Return the model as a text generator. Raises ConfigError for a model that is not one."""
        return Decoder(self.weights, self.config, self.topology, self.vocab_size)

    def encoder(self) -> Encoder:
        """Return the model as one that fills in masked words. Raises ConfigError for a model that does not."""
        return Encoder(self.weights, self.config, self.topology, self.vocab_size)

    def needed_tokenizer(self, advice: str) -> Tokenizer:
        """Return the tokenizer. Raises ConfigError, ending in `advice`, if the model has none."""
        if self.tokenizer is None:
            raise ConfigError(
                f"{self.source} comes without a tokenizer (docs/guide/tokenizers.md lists the formats). {advice}"
            )
        return self.tokenizer


@contextlib.contextmanager
def open_model(
    path: Path,
    overrides: list[str] | None = None,
    *,
    precision: str | None = None,
    device: str = "auto",
    tokenizer: Path | None = None,
    budget: float | None = None,
) -> Iterator[OpenModel]:
    """Open a model in the layout of `overrides` (`parallel.tensor=2`, ...; by default one rank holds all of it), and
    close it and the layout afterwards.

    `precision` is the stored one by default. `budget`: MiB for weights, keys and values, and what a pass computes
    (None: what is left of the memory). A collective call under torchrun. Raises ConfigError.
    """
    reader = open_logical(path, direct=True)
    try:
        with _opened(reader, path, overrides or [], precision, device, tokenizer, budget) as model:
            yield model
    finally:
        reader.close()


@contextlib.contextmanager
def _opened(
    reader: LogicalReader,
    path: Path,
    overrides: list[str],
    precision: str | None,
    device: str,
    tokenizer: Path | None,
    budget: float | None,
) -> Iterator[OpenModel]:
    config = for_use(reader.config)
    config.parallel = _layout(overrides)
    validate_for_use(config, world_size())
    config.training.device = device
    if precision is not None:
        config.training.precision = precision
    path_of_tokenizer = tokenizer or reader.tokenizer
    words = None
    if tokenizer is not None or core_file(path_of_tokenizer) is not None:
        words = load_tokenizer(path_of_tokenizer)
    end_tokens = reader.end_tokens
    if end_tokens is None:
        end_tokens = set() if words is None else {words.eod}
    if words is not None and words.vocab_size > reader.vocab_size:
        raise ConfigError(
            f"the tokenizer {words.path} has {words.vocab_size} tokens, but the model of {path} only "
            f"{reader.vocab_size}."
        )
    if words is not None and reader.trained_with not in (None, words.digest):
        print(f"the tokenizer {words.path} is not the one that {reader.folder} was trained with", file=sys.stderr)
    joined = dist.is_initialized()
    layout = topology.initialize(config)
    if layout.rank == 0:
        for note in reader.notes:
            print(f"note: {note}.", file=sys.stderr)
        if reader.model_type is not None:
            unknown_keys.warn(reader.config, reader.model_type)
        for note in [] if words is None else words.notes():
            print(f"note: {note}", file=sys.stderr, flush=True)
        progress.begin(f"Loading {reader.folder}")
    weights: FileWeights | None = None
    try:
        weights = FileWeights(
            reader,
            config,
            layout,
            reader.vocab_size,
            DTYPES[config.training.precision],
            memory_budget(budget, layout.device),
            budget,
        )
        yield OpenModel(config, layout, reader.vocab_size, weights, words, end_tokens, reader.folder)
    finally:
        if weights is not None:
            weights.close()
        if joined:  # a group that was there before stays
            topology.leave_layout()
        else:
            topology.destroy()


def _layout(overrides: list[str]) -> ParallelConfig:
    for text in overrides:
        if not text.startswith("parallel."):
            raise ConfigError(f"{text} is not a layout key. Try parallel.tensor=2, with torchrun --nproc-per-node 2.")
    layout = compose(overrides).parallel if overrides else ParallelConfig()
    layout.sequence = False  # generation does not split the sequence
    return layout


def open_from(options: argparse.Namespace) -> contextlib.AbstractContextManager[OpenModel]:
    """Open the model that the arguments of inference/command.py name."""
    return open_model(
        options.checkpoint,
        options.layout,
        precision=options.precision,
        device=options.device,
        tokenizer=options.tokenizer,
        budget=options.memory_budget,
    )
