"""A rank's shards of a model's logical weights, derived from the blueprint (the model's structure as data) alone.

Weights that are used together form a unit: an attention, a feed-forward block, a block of the output layer's rows, or
an expert.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from configs.schema import Config
from models import blueprint
from models.blueprint.operation import (
    EXPERT,
    EXPERT_TENSOR,
    TENSOR,
    Weight,
    axis_sizes,
    local_runs,
    local_shape,
    transformer_name,
    unknown,
)
from models.weights import EXPERTS as EXPERTS
from parallel.topology import Topology

ATTENTION, FEED_FORWARD, HEAD = "attention", "feed_forward", "head"
WORDS = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
HEAD_BYTES = 32 * 2**20  # size of a block of the output layer's rows, if no layer's unit is larger


@dataclass(frozen=True)
class LocalShard:
    """This rank's shard of a logical weight. `dim`: the dimension in which the weight is split. `runs`: the rank's
    indices of that dimension, as (first in the shard, first in the weight, length)."""

    name: str
    shape: tuple[int, ...]
    dim: int = 0
    runs: tuple[tuple[int, int, int], ...] = ()  # empty: all of it
    first_row: int = 0  # for a block of rows: its first row in this rank's shard

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def row_slice(self, start: int, count: int) -> LocalShard:
        """Return `count` rows from row `start` on. The shard must be unsplit, or split by rows in one run."""
        runs = self.runs or ((0, 0, self.shape[0]),)
        (here, there, length), *others = runs
        assert self.dim == 0 and not others and here == 0, self
        held = max(0, min(start + count, length) - start)
        return LocalShard(self.name, (count, *self.shape[1:]), 0, ((0, there + start if held else 0, held),), start)


@dataclass(frozen=True)
class WeightUnit:
    """Weights that are used, loaded and evicted together, such as a layer's attention or an expert."""

    key: str
    shards: tuple[LocalShard, ...]

    @property
    def numel(self) -> int:
        """Number of elements of all weights of this unit."""
        return sum(shard.numel for shard in self.shards)


@dataclass(frozen=True)
class RankWeights:
    """All weights of a rank, grouped by how inference loads them.

    small: weights that always stay in memory: vectors, routers, tables of positions and token types. units: matrices,
    in the order of use. experts: by (layer, expert), all of equal size. words: the token embedding, if this rank uses
    it as input.
    """

    small: tuple[LocalShard, ...]
    units: tuple[WeightUnit, ...]
    experts: dict[tuple[int, int], WeightUnit]
    words: LocalShard | None
    layers: tuple[int, ...]

    @property
    def head(self) -> list[WeightUnit]:
        """Units of the output layer, in the order of their rows."""
        return [unit for unit in self.units if unit.key.startswith(HEAD)]


def layer_key(layer: int, kind: str) -> str:
    """Return the key of the weights of a layer's attention or feed-forward block."""
    return f"layers.{layer}.{kind}"


def expert_unit_key(layer: int, expert: int) -> str:
    """Return the key of an expert's weights."""
    return f"layers.{layer}.experts.{expert}"


def rank_weights(config: Config, topology: Topology, vocab_size: int, itemsize: int) -> RankWeights:
    """Return this rank's weights, grouped in units. itemsize: bytes per element, for the output layer's block size."""
    axes = {TENSOR: topology.tensor, EXPERT: topology.expert, EXPERT_TENSOR: topology.expert_tensor}
    ranks = {name: axis.rank for name, axis in axes.items()}
    sizes, prefix = axis_sizes(config), f"{transformer_name(config)}.layers."
    small, experts, found = list[LocalShard](), dict[tuple[int, int], list[LocalShard]](), dict[str, list[LocalShard]]()
    table: LocalShard | None = None
    output: LocalShard | None = None
    layers = list[int]()
    held = blueprint.model_chunks(config)[topology.pipeline.rank]
    for chunk in held:
        layers += range(chunk.first_layer, chunk.first_layer + len(chunk.layers))
        for name, weight in blueprint.weights(config, vocab_size, chunk):
            local = _local_shard(name, weight, sizes, ranks)
            layer, _, rest = name.removeprefix(prefix).partition(".") if name.startswith(prefix) else ("", "", name)
            if weight.is_expert:
                count = weight.shape[0] // sizes[EXPERT]
                for expert in range(ranks[EXPERT] * count, (ranks[EXPERT] + 1) * count):
                    full = f"{prefix}{layer}.{EXPERTS}{expert}.{rest.removeprefix(EXPERTS)}"
                    of_expert = LocalShard(full, local.shape[1:], local.dim - 1 if local.runs else 0, local.runs)
                    experts.setdefault((int(layer), expert), []).append(of_expert)
            elif name == WORDS:
                table = local if table is None else table
            elif name == OUTPUT:
                output = local
            elif not layer or len(local.shape) < 2 or rest.startswith("mlp.router."):
                small.append(local)  # outside the layers are embeddings and BERT's head
            else:
                kind = ATTENTION if rest.startswith("self_attention.") else FEED_FORWARD
                found.setdefault(layer_key(int(layer), kind), []).append(local)
    units = [
        WeightUnit(key, tuple(found[key]))
        for layer in layers
        for key in (layer_key(layer, ATTENTION), layer_key(layer, FEED_FORWARD))
        if key in found
    ]
    if any(chunk.is_last for chunk in held):
        matrix = table if output is None else output
        assert matrix is not None
        units += _head_blocks(matrix, max([HEAD_BYTES // itemsize, *(unit.numel for unit in units)]))
    words = table if any(chunk.is_first for chunk in held) else None
    of_experts = {key: WeightUnit(expert_unit_key(*key), tuple(shards)) for key, shards in experts.items()}
    return RankWeights(tuple(small), tuple(units), of_experts, words, tuple(layers))


def _local_shard(name: str, weight: Weight, sizes: dict[str, int], ranks: dict[str, int]) -> LocalShard:
    shape, dim, runs = list(local_shape(weight, sizes)), 0, list[tuple[int, int, int]]()
    for split in weight.splits:
        if split.axis not in ranks:
            unknown("rank_weights", f"axis of {name}", split.axis)
        if split.axis == EXPERT:
            continue
        whole = weight.shape[split.dim]
        if sizes[split.axis] == 1:
            shape[split.dim] = whole  # unsplit, the vocabulary needs no padding
        else:
            dim, runs = split.dim, local_runs(whole, shape[split.dim], ranks[split.axis], weight.gated)
    return LocalShard(name, tuple(shape), dim, tuple(runs))


def _head_blocks(matrix: LocalShard, most: int) -> Iterator[WeightUnit]:
    """Yield the output layer's matrix in blocks of rows, each of at most `most` elements.

    The blocks, and so the bits of the logits, depend only on the model and the layout.
    """
    num_rows, width = matrix.shape
    count = max(1, -(-num_rows * width // most))
    size = -(-num_rows // count)
    for number, start in enumerate(range(0, num_rows, size)):
        yield WeightUnit(f"{HEAD}.{number}", (matrix.row_slice(start, min(size, num_rows - start)),))
