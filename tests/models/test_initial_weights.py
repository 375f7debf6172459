"""Initial weights: every slice that a layout can need is a slice of the same draw, bit for bit."""

from __future__ import annotations

import hashlib
import itertools
import math
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from configs.schema import Config
from models.blueprint.operation import TENSOR, Split, Weight
from models.initial_weights import DRAWN_ROWS, fill, initial_weight
from models.weights import LogicalTensor

pytestmark = pytest.mark.fast

COLUMN, ROW, WHOLE, EXPERT, NORM = (
    "decoder.layers.1.self_attention.linear_qkv.weight",
    "decoder.layers.1.self_attention.linear_proj.weight",
    "decoder.layers.1.mlp.router.weight",
    "decoder.layers.1.mlp.experts.3.linear_fc1.weight",
    "decoder.layers.1.input_layernorm.weight",
)
VOCABULARY, BIAS = "embedding.word_embeddings.weight", COLUMN.replace(".weight", ".bias")
KINDS = {
    **dict.fromkeys((COLUMN, WHOLE, EXPERT, VOCABULARY), "matrix"),
    ROW: "output_matrix",
    NORM: "norm",
    BIAS: "bias",
}
# name, logical shape, split dimension, gated, rows of a rank's storage when tensor ranks pad it
CASES: list[tuple[str, tuple[int, ...], int | None, bool, int | None]] = [
    (COLUMN, (1200, 24), 0, False, None),
    (BIAS, (1200,), 0, False, None),
    (ROW, (24, 1200), 1, False, None),
    (ROW, (600, 720), 1, False, None),
    (WHOLE, (700, 24), None, False, None),
    (EXPERT, (2 * 600, 24), 0, True, None),
    (EXPERT, (2 * 24, 24), 0, True, None),  # halves smaller than a block
    (NORM, (700,), None, False, None),
    (VOCABULARY, (131, 24), 0, False, 128),  # the second rank's storage is padding but for three rows
    (VOCABULARY, (1000, 24), 0, False, 256),
    (VOCABULARY, (513, 24), 0, False, 384),  # a rank whose storage is all padding
]


class _Group:
    """The methods of a process group that a slice needs."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def _tensor(
    name: str,
    shape: tuple[int, ...],
    dim: int | None,
    gated: bool,
    rank: int,
    size: int,
    num_rows: int | None,
    *,
    dtype: torch.dtype,
) -> LogicalTensor:
    local = list(shape)
    if dim is not None:
        local[dim] = num_rows or shape[dim] // size
    storage = torch.full(local, math.nan, dtype=dtype)
    return LogicalTensor(name, storage, shape, KINDS[name], dim, gated, cast(Any, _Group(rank, size)))


def _drawn(*arguments: Any, seed: int = 1, dtype: torch.dtype = torch.float32) -> LogicalTensor:
    config = Config()
    config.training.seed = seed
    item = _tensor(*arguments, dtype=dtype)
    fill(item, config)
    return item


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "shape", "dim", "gated", "num_rows"), CASES)
def test_each_part_is_a_slice_of_the_whole_draw(
    name: str, shape: tuple[int, ...], dim: int | None, gated: bool, num_rows: int | None, *, dtype: torch.dtype
) -> None:
    whole = _drawn(name, shape, dim, gated, 0, 1, None).local.to(dtype)
    assert whole.isfinite().all()
    for size in (1, 2, 3, 4):
        if num_rows is not None and num_rows * size < shape[0]:
            continue
        slices = [_drawn(name, shape, dim, gated, rank, size, num_rows, dtype=dtype) for rank in range(size)]
        for item in slices:
            assert torch.equal(item.local, item.cut(whole)), (size, item.group.rank())
        assert torch.equal(slices[0].join([item.local for item in slices]), whole)
        if num_rows is not None:  # padding is zero
            assert torch.cat([item.local for item in slices])[shape[0] :].count_nonzero() == 0


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("length", [1, DRAWN_ROWS - 1, DRAWN_ROWS, DRAWN_ROWS + 1, 2 * DRAWN_ROWS + 3])
def test_numbers_are_those_of_a_generator_for_each_block(length: int, dim: int) -> None:
    config, name, blocks = Config(), COLUMN if dim == 0 else ROW, []
    std = config.model.init_std / (math.sqrt(2 * config.model.num_layers) if dim == 1 else 1)
    for number, start in enumerate(range(0, length, 256)):
        digest = hashlib.blake2b(f"3 {name} {number}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        num_rows = min(256, length - start)
        blocks.append(torch.empty((num_rows, 8) if dim == 0 else (8, num_rows)).normal_(0.0, std, generator=generator))
    shape = (length, 8) if dim == 0 else (8, length)
    assert torch.equal(_drawn(name, shape, dim, False, 0, 1, None, seed=3).local, torch.cat(blocks, dim))


def test_a_weight_drawn_alone_is_the_same() -> None:
    config = Config()
    config.training.seed = 5
    for name, shape, dim, *_ in CASES:
        if dim != 1 and name != EXPERT:
            weight = Weight(name, shape, KINDS[name], (Split(0, TENSOR),) if dim == 0 else ())
            expected = _drawn(name, shape, dim, False, 0, 1, None, seed=5).local
            assert torch.equal(initial_weight(name, weight, config), expected)


def test_blocks_names_and_seeds_differ() -> None:
    shape = (3 * DRAWN_ROWS, 16)
    draws = [_drawn(name, shape, 0, False, 0, 1, None, seed=seed).local for name in (COLUMN, EXPERT) for seed in (1, 2)]
    slices = [block for draw in draws for block in draw.split(DRAWN_ROWS)]
    for one, other in itertools.combinations(slices, 2):
        assert not torch.equal(one, other)
    # Rows that a model with more of them has too: a block depends on nothing outside of it.
    longer = _drawn(COLUMN, (4 * DRAWN_ROWS, 16), 0, False, 0, 1, None).local
    assert torch.equal(longer[: shape[0]], draws[0])


@pytest.mark.parametrize("dim", [0, 1])
def test_distribution_is_gpt2s(dim: int) -> None:
    config, size = Config(), 600
    expected = config.model.init_std
    weight = _drawn(COLUMN if dim == 0 else ROW, (size, size), dim, False, 0, 1, None).local
    if dim == 1:
        expected /= math.sqrt(2 * config.model.num_layers)
    assert weight.std().item() == pytest.approx(expected, rel=0.01)
    assert abs(weight.mean().item()) < 5 * expected / size
    kept = torch.corrcoef(torch.stack([block.flatten() for block in weight.split(DRAWN_ROWS, dim)[:2]]))[0, 1]
    assert abs(kept.item()) < 5 / math.sqrt(size * DRAWN_ROWS)


def test_norms_begin_at_one_and_biases_at_zero() -> None:
    assert torch.equal(_drawn(NORM, (40,), None, False, 0, 1, None).local, torch.ones(40))
    assert torch.equal(_drawn(BIAS, (40,), 0, True, 1, 2, None).local, torch.zeros(20))


def test_an_unknown_kind_of_weight_is_named() -> None:
    item = _tensor(COLUMN, (40, 8), 0, False, 0, 1, None, dtype=torch.float32)
    with pytest.raises(ValueError, match="initial_weights does not know 'sieve', the kind of weight of .*linear_qkv"):
        fill(replace(item, kind="sieve"), Config())
