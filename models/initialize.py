"""Initial weights that depend on the seed and the model alone, never on the layout.

Every logical tensor is drawn in full on the host from a generator of its own, seeded by a hash of (seed, name); a rank
then keeps its slice. The distribution is GPT-2's (Radford et al. 2019, section 2.3): normal with `model.init_std`, divided
by sqrt(2 * num_layers) for the layers that write into the residual stream; biases 0, norms 1.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch

from configs.schema import Config
from models.weights import load_logical, logical_tensors


def initialize_weights(chunks: Sequence[torch.nn.Module], config: Config) -> None:
    """Fill this rank's weights for `training.seed`; rows that pad the vocabulary become 0."""
    shapes = {item.name: item.shape for item in logical_tensors(chunks)}
    load_logical(chunks, lambda name: initial_weight(name, shapes[name], config))


def initial_weight(name: str, shape: tuple[int, ...], config: Config) -> torch.Tensor:
    """The initial value of one logical tensor, fp32 on the host."""
    if name.endswith("norm.weight"):
        return torch.ones(shape)
    if name.endswith("bias"):
        return torch.zeros(shape)
    std = config.model.init_std
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        std /= math.sqrt(2 * config.model.num_layers)
    digest = hashlib.sha256(f"{config.training.seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.empty(shape).normal_(0.0, std, generator=generator)
