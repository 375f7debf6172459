"""The decoder over the pages of a folder of logical weights: nothing is read before it is used, nothing copied, and the
kernel keeps what it likes. What generation of a model larger than memory is compared with.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from safetensors import safe_open

from configs.architecture import for_use
from inference import open_model
from inference.decoder import Decoder, run
from models import folder as folders
from models.huggingface import special_tokens
from parallel import topology


def mapped_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Logical name -> tensor whose storage is the file's pages, of every weight of a folder."""
    weights: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            weights.update((name, file.get_tensor(name)) for name in file.keys())
    return weights


class MappedModel(open_model.OpenModel):
    """What `open_model` yields, with weights that are pages of files."""

    def decoder(self) -> Decoder:
        weights = [SimpleNamespace(name=name, local=tensor) for name, tensor in mapped_weights(self.source).items()]
        with mock.patch.object(run, "logical_tensors", lambda chunks: weights):
            return Decoder([], self.config, self.topology, self.vocab_size)


@contextlib.contextmanager
def open_mapped(options: argparse.Namespace) -> Iterator[MappedModel]:
    """In the place of `inference.open_model.open_from`: a folder of logical weights in one process, on the host."""
    folder: Path = options.checkpoint
    stated: Any = folders.config_from(folders.read_config(folder))
    config = for_use(stated)
    config.training.device = "cpu"
    config.model.backend = "portable"
    vocab_size = stated.model.vocab_size
    ends = special_tokens.end_tokens(folder, special_tokens.kept_in(folder, vocab_size))
    place = topology.initialize(config)
    try:
        yield MappedModel(config, place, vocab_size, [], None, ends or set(), folder)
    finally:
        topology.destroy()
