"""The decoder over the pages of a folder of logical weights: nothing is read before it is used, nothing copied, and the
kernel keeps what it likes. What generation of a model larger than memory is compared with.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from configs.architecture import for_use
from inference.open_model import OpenModel
from inference.weights.source import TensorWeights
from models import folder as folders
from models.huggingface import special_tokens
from parallel import topology


def mapped_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return every weight of a folder by its logical name; its storage is the file's pages."""
    weights: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            weights.update((name, file.get_tensor(name)) for name in file.keys())
    return weights


@contextlib.contextmanager
def open_mapped(options: argparse.Namespace) -> Iterator[OpenModel]:
    """Replacement of `inference.open_model.open_from` for a folder of logical weights in one process, on the host."""
    folder: Path = options.checkpoint
    stated: Any = folders.config_from(folders.read_config(folder))
    config = for_use(stated)
    config.training.device = "cpu"
    config.model.backend = "portable"
    vocab_size = stated.model.vocab_size
    ends = special_tokens.end_tokens(folder, special_tokens.kept_in(folder, vocab_size))
    run_topology = topology.initialize(config)
    try:
        weights: Any = TensorWeights(mapped_weights(folder), config, run_topology, vocab_size)
        yield OpenModel(config, run_topology, vocab_size, weights, None, ends or set(), folder)
    finally:
        topology.destroy()
