"""Initial weights, which depend only on the seed and the model, not on the layout.

A logical tensor is drawn in blocks of 256 rows. Each block has its own generator, seeded by a hash of (seed, name,
block). So a rank draws only the blocks that its slice needs, and every layout gets the same bits. If tensor parallelism
splits the columns of a matrix, its blocks are 256 columns. The kind of a weight in the blueprint decides its
distribution, as in GPT-2 (Radford et al. 2019, section 2.3): normal with `model.init_std`, divided by sqrt(2 *
num_layers) for layers that write into the residual stream; biases 0, norms 1.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager

import torch

from configs.schema import Config
from models.blueprint.operation import Weight, unknown
from models.weights import LogicalTensor, logical_tensors, tensors_off_device

DRAWN_ROWS = 256  # a block of a large model is about a million numbers: 10 ms to draw


def initialize_weights(chunks: Sequence[torch.nn.Module], config: Config) -> None:
    """Fill this rank's weights with initial values, and the padding rows of the vocabulary with 0. Offloaded weights
    are skipped."""
    with torch.no_grad():
        for item in logical_tensors(chunks):
            if not item.off_device:
                fill(item, config)


def fill_off_device(
    chunks: Sequence[torch.nn.Module], config: Config, off_device: Iterable[AbstractContextManager[None]]
) -> None:
    """Fill the offloaded weights with initial values. Each context of `off_device` makes some of them accessible."""
    with torch.no_grad():
        for item in tensors_off_device(chunks, off_device):
            fill(item, config)


def fill(item: LogicalTensor, config: Config) -> None:
    """Fill this rank's slice of a logical tensor with initial values, and padding rows of the vocabulary with 0. Raises
    ValueError for an unknown kind of weight."""
    mean, std = distribution(item.name, item.kind, config)
    dim = item.dim or 0
    if sum(length for _, _, length in item.segments()) < item.local.size(dim):
        item.local.zero_()
    for here, start, length in item.segments():
        target = item.local.narrow(dim, here, length)
        if std == 0.0:
            target.fill_(mean)
            continue
        for first, block in blocks(item.name, item.shape, dim, start, start + length, std, config.training.seed):
            low, high = max(first, start), min(first + block.size(dim), start + length)
            target.narrow(dim, low - start, high - low).copy_(block.narrow(dim, low - first, high - low))


def initial_weight(name: str, weight: Weight, config: Config) -> torch.Tensor:
    """Return the initial values of a full weight, fp32 on the host. No layout may split the columns of this weight."""
    assert not weight.is_expert and all(split.dim == 0 for split in weight.splits)
    mean, std = distribution(name, weight.kind, config)
    full = torch.full(weight.shape, mean)
    if std > 0.0:
        for first, block in blocks(name, weight.shape, 0, 0, weight.shape[0], std, config.training.seed):
            full.narrow(0, first, block.size(0)).copy_(block)
    return full


def distribution(name: str, kind: str, config: Config) -> tuple[float, float]:
    """Return the mean and the standard deviation of a weight's initial values, according to its kind. One of the two is
    0."""
    std = config.model.init_std
    of_kind = {
        "matrix": (0.0, std),
        "output_matrix": (0.0, std / math.sqrt(2 * config.model.num_layers)),
        "norm": (1.0, 0.0),
        "bias": (0.0, 0.0),
        "router_bias": (0.0, 0.0),
    }
    if kind not in of_kind:
        unknown("initial_weights", f"kind of weight of {name}", kind)
    return of_kind[kind]


def blocks(
    name: str, shape: Sequence[int], dim: int, start: int, end: int, std: float, seed: int
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the blocks of initial values that overlap indices `start` to `end` of dimension `dim`, as (first index,
    fp32 values on the host). All blocks use the same memory, so each overwrites the previous one."""
    generator = torch.Generator()
    memory = torch.empty(math.prod(shape) // shape[dim] * min(DRAWN_ROWS, shape[dim]))
    for number in range(start // DRAWN_ROWS, -(-end // DRAWN_ROWS)):
        first = number * DRAWN_ROWS
        sizes = list(shape)
        sizes[dim] = min(DRAWN_ROWS, shape[dim] - first)
        block = memory[: math.prod(sizes)].view(sizes)
        digest = hashlib.blake2b(f"{seed} {name} {number}".encode(), digest_size=8).digest()
        yield first, block.normal_(0.0, std, generator=generator.manual_seed(int.from_bytes(digest, "little") >> 1))
