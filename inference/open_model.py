"""Open a trained model for inference, from a run, a checkpoint, a folder of logical weights or a Hugging Face folder.

No training model is built. Weights are read from the files when they are used, and stay in memory if they fit.
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
    """An open model on this rank: its weights, config, layout and tokenizer. `source`: the folder of the weights."""

    config: Config
    topology: Topology
    vocab_size: int
    weights: FileWeights
    tokenizer: Tokenizer | None
    end_tokens: set[int]
    source: Path

    def decoder(self) -> Decoder:
        """Return a decoder, which generates and scores text. Raises ConfigError if the model is not a GPT."""
        return Decoder(self.weights, self.config, self.topology, self.vocab_size)

    def encoder(self) -> Encoder:
        """Return an encoder, which predicts masked tokens. Raises ConfigError if the model is not a BERT."""
        return Encoder(self.weights, self.config, self.topology, self.vocab_size)

    def needed_tokenizer(self, advice: str) -> Tokenizer:
        """Return the tokenizer. Raises ConfigError, whose message ends in `advice`, if there is none."""
        if self.tokenizer is None:
            raise ConfigError(f"{self.source} has no tokenizer (docs/guide/tokenizers.md lists the formats). {advice}")
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
    """Open a model in the layout of `overrides` (`parallel.tensor=2`, ...; default: no model parallelism), and close
    model and layout on exit.

    precision: data type of the weights (None: as stored). budget: MiB for weights, key-value cache and activations
    (None: a share of the free memory). A collective call under torchrun. Raises ConfigError.
    """
    with contextlib.closing(open_logical(path, direct=True)) as reader:
        config = for_use(reader.config)
        config.parallel = _layout(overrides or [])
        validate_for_use(config, world_size())
        config.training.device = device
        if precision is not None:
            config.training.precision = precision
        words = _load_tokenizer(reader, path, tokenizer)
        end_tokens = reader.end_tokens
        if end_tokens is None:
            end_tokens = set() if words is None else {words.eod}
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
            size, dtype = reader.vocab_size, DTYPES[config.training.precision]
            num_bytes = memory_budget(budget, layout.device)
            weights = FileWeights(reader, config, layout, size, dtype, num_bytes, budget)
            yield OpenModel(config, layout, size, weights, words, end_tokens, reader.folder)
        finally:
            if weights is not None:
                weights.close()
            if joined:  # the caller's process group stays
                topology.leave_layout()
            else:
                topology.destroy()


def _load_tokenizer(reader: LogicalReader, path: Path, given: Path | None) -> Tokenizer | None:
    """Load the tokenizer in the folder `given` or, by default, the model's own. Returns None if the model has none.

    Raises ConfigError if it has more tokens than the model's vocabulary.
    """
    folder = given or reader.tokenizer
    if given is None and core_file(folder) is None:
        return None
    words = load_tokenizer(folder)
    if words.vocab_size > reader.vocab_size:
        raise ConfigError(
            f"the tokenizer {words.path} has {words.vocab_size} tokens, but the model of {path} has only "
            f"{reader.vocab_size}. Give the model's own tokenizer with --tokenizer."
        )
    if reader.trained_with not in (None, words.digest):
        print(f"note: {reader.folder} was trained with a different tokenizer than {words.path}", file=sys.stderr)
    return words


def _layout(overrides: list[str]) -> ParallelConfig:
    for text in overrides:
        if not text.startswith("parallel."):
            raise ConfigError(f"{text} is not a layout key. Try parallel.tensor=2, with torchrun --nproc-per-node 2.")
    layout = compose(overrides).parallel if overrides else ParallelConfig()
    layout.sequence = False  # generation does not split the sequence
    return layout


def open_from(options: argparse.Namespace) -> contextlib.AbstractContextManager[OpenModel]:
    """Open the model that the parsed command-line arguments of inference/command.py select."""
    return open_model(
        options.checkpoint,
        options.layout,
        precision=options.precision,
        device=options.device,
        tokenizer=options.tokenizer,
        budget=options.memory_budget,
    )
