"""What this rank holds of a model's logical weights, from the blueprint alone, in units that are used one after the
other: an attention, a feed-forward block, a block of the output layer's rows, an expert."""

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
    unknown,
)
from models.blueprint.pieces import transformer_name
from models.weights import EXPERTS as EXPERTS
from parallel.topology import Topology

ATTENTION, FEED_FORWARD, HEAD = "attention", "feed_forward", "head"
WORDS = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
HEAD_BYTES = 32 * 2**20  # of a block of the output layer's rows, where no layer's unit is larger


@dataclass(frozen=True)
class LocalPart:
    """This rank's part of a logical weight: its shape, and which indices of the split dimension it has, as
    `local_runs`."""

    name: str
    shape: tuple[int, ...]
    dim: int = 0
    runs: tuple[tuple[int, int, int], ...] = ()  # empty: all of it
    first_row: int = 0  # where a block of rows begins in this rank's part

    @property
    def numel(self) -> int:
        """Numbers that it holds."""
        return math.prod(self.shape)

    def rows(self, start: int, count: int) -> LocalPart:
        """Some of its rows, which are not split or split by rows in one run."""
        runs = self.runs or ((0, 0, self.shape[0]),)
        (here, there, length), *others = runs
        assert self.dim == 0 and not others and here == 0, self
        held = max(0, min(start + count, length) - start)
        return LocalPart(self.name, (count, *self.shape[1:]), 0, ((0, there + start if held else 0, held),), start)


@dataclass(frozen=True)
class WeightUnit:
    """Weights that are used together, and come and go together."""

    key: str
    parts: tuple[LocalPart, ...]

    @property
    def numel(self) -> int:
        """Numbers that it holds."""
        return sum(part.numel for part in self.parts)


@dataclass(frozen=True)
class RankWeights:
    """All that a rank holds.

    small: what always stays: vectors, routers, tables of positions and token types. units: matrices, in the order of
    use. experts: by (layer, expert), one size each. words: the table of tokens, where this rank reads it.
    """

    small: tuple[LocalPart, ...]
    units: tuple[WeightUnit, ...]
    experts: dict[tuple[int, int], WeightUnit]
    words: LocalPart | None
    layers: tuple[int, ...]

    @property
    def head(self) -> list[WeightUnit]:
        """Blocks of the output layer's rows, in their order."""
        return [unit for unit in self.units if unit.key.startswith(HEAD)]


def layer_key(layer: int, kind: str) -> str:
    """The unit of a layer's attention or feed-forward block."""
    return f"layers.{layer}.{kind}"


def expert_key(layer: int, expert: int) -> str:
    """The unit of an expert."""
    return f"layers.{layer}.experts.{expert}"


def rank_weights(config: Config, topology: Topology, vocab_size: int, itemsize: int) -> RankWeights:
    """What this rank holds, with numbers of `itemsize` bytes."""
    places = {
        TENSOR: topology.tensor.rank,
        EXPERT: topology.expert.rank,
        EXPERT_TENSOR: topology.expert_tensor.rank,
    }
    sizes, prefix = axis_sizes(config), f"{transformer_name(config)}.layers."
    small, experts, found = list[LocalPart](), dict[tuple[int, int], list[LocalPart]](), dict[str, list[LocalPart]]()
    table: LocalPart | None = None
    output: LocalPart | None = None
    layers = list[int]()
    held = blueprint.parts(config)[topology.pipeline.rank]
    for part in held:
        layers += range(part.first_layer, part.first_layer + len(part.layers))
        for name, weight in blueprint.weights(config, vocab_size, part):
            local = _part(name, weight, sizes, places)
            layer, _, rest = name.removeprefix(prefix).partition(".") if name.startswith(prefix) else ("", "", name)
            if weight.is_expert:
                for expert in _own_experts(weight, sizes[EXPERT], places[EXPERT]):
                    of_expert = LocalPart(
                        f"{prefix}{layer}.{EXPERTS}{expert}.{rest.removeprefix(EXPERTS)}",
                        local.shape[1:],
                        local.dim - 1 if local.runs else 0,
                        local.runs,
                    )
                    experts.setdefault((int(layer), expert), []).append(of_expert)
            elif name == WORDS:
                table = local if table is None else table
            elif name == OUTPUT:
                output = local
            elif len(local.shape) < 2 or name.startswith("embedding.") or rest.startswith("mlp.router."):
                small.append(local)
            elif not layer:
                small.append(local)  # of BERT's head
            else:
                kind = ATTENTION if rest.startswith("self_attention.") else FEED_FORWARD
                found.setdefault(layer_key(int(layer), kind), []).append(local)
    units = [
        WeightUnit(key, tuple(found[key]))
        for layer in layers
        for key in (layer_key(layer, ATTENTION), layer_key(layer, FEED_FORWARD))
        if key in found
    ]
    has_head = any(part.is_last for part in held)
    if has_head:
        matrix = table if output is None else output
        assert matrix is not None
        units += _head_blocks(matrix, max([HEAD_BYTES // itemsize, *(unit.numel for unit in units)]))
    has_words = any(part.is_first for part in held)
    return RankWeights(
        tuple(small),
        tuple(units),
        {place: WeightUnit(expert_key(*place), tuple(parts)) for place, parts in experts.items()},
        table if has_words else None,
        tuple(layers),
    )


def _part(name: str, weight: Weight, sizes: dict[str, int], places: dict[str, int]) -> LocalPart:
    shape, dim, runs = list(local_shape(weight, sizes)), 0, list[tuple[int, int, int]]()
    for split in weight.splits:
        if split.axis not in places:
            unknown("rank_weights", f"axis of {name}", split.axis)
        if split.axis == EXPERT:
            continue
        whole = weight.shape[split.dim]
        if sizes[split.axis] == 1:
            shape[split.dim] = whole  # nothing is to be split alike: the vocabulary needs no padding
        else:
            dim, runs = split.dim, local_runs(whole, shape[split.dim], places[split.axis], weight.gated)
    return LocalPart(name, tuple(shape), dim, tuple(runs))


def _own_experts(weight: Weight, ranks: int, rank: int) -> range:
    count = weight.shape[0] // ranks
    return range(rank * count, (rank + 1) * count)


def _head_blocks(matrix: LocalPart, most: int) -> Iterator[WeightUnit]:
    """The output layer in blocks of at most `most` numbers, so that it passes through the ring like a layer. They
    depend on the model and its layout alone: so do the bits of the logits."""
    rows, width = matrix.shape
    count = max(1, -(-rows * width // most))
    size = -(-rows // count)
    for number, start in enumerate(range(0, rows, size)):
        yield WeightUnit(f"{HEAD}.{number}", (matrix.rows(start, min(size, rows - start)),))
