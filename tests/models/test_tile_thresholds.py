"""The loss on both sides of where its tiles change, against full logits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from models.loss import tiles, token_loss
from models.loss.tiles import FEW_TOKENS, HALF_GROUP, LEAST_TILE, MOST_TILES, WIDE_GROUP
from tests.models.helpers import relative_error
from tests.models.test_token_loss import HIDDEN, NO_FURTHER, NUM_ROWS, SAMPLES, Made, full_logits, in_tiles, inputs
from tests.tolerances import TOKEN_LOSS

pytestmark = pytest.mark.fast

FEW = 8  # replaces MOST_TILES where that many tiles would take too long


class _Alone:
    """A group of one rank."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def made_in_tiles(made: Made, tile: int, old: bool) -> Made:
    made = {name: each.detach().clone() for name, each in made.items()}
    topology = SimpleNamespace(tensor=SimpleNamespace(rank=0, size=1, group=_Alone()))
    return in_tiles(made, {"tile": tile, "bias": False, "known": True, "old": old}, cast(Any, topology))


def check(made: Made, ours: Made, dtype: torch.dtype) -> None:
    """Compare with full logits in fp64; in half precision the error is at most that of full logits of that kind."""
    exact = full_logits(made, False)
    if dtype == torch.float32:
        for name, value in exact.items():
            assert relative_error(ours[name].double(), value.double()) < TOKEN_LOSS, name
        return
    theirs = full_logits(made, False, dtype)
    assert relative_error(ours["loss"], theirs["loss"]) < TOKEN_LOSS  # of the same rounded logits
    for name in ("hidden", "weight"):
        error, allowed = (
            ((each[name].double() - exact[name]).norm() / exact[name].norm()).item() for each in (ours, theirs)
        )
        assert error <= NO_FURTHER * allowed, (name, error, allowed)


@pytest.mark.parametrize(
    ("tokens", "tile"),
    [
        (FEW_TOKENS, FEW_TOKENS),
        (FEW_TOKENS + SAMPLES, LEAST_TILE),
        (FEW * LEAST_TILE, LEAST_TILE),
        (FEW * (LEAST_TILE + 1) + SAMPLES, LEAST_TILE + 1),
    ],
)
def test_tiles_of_so_many_tokens(tokens: int, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tiles.token_tile(MOST_TILES * LEAST_TILE) == LEAST_TILE
    assert tiles.token_tile(MOST_TILES * (LEAST_TILE + 1)) == LEAST_TILE + 1
    monkeypatch.setattr(tiles, "MOST_TILES", FEW)
    assert tiles.token_tile(tokens) == tile
    made = inputs(torch.float32, 2.6, tokens // SAMPLES)
    check(made, made_in_tiles(made, tile, False), torch.float32)


@pytest.mark.parametrize("rest", [0, 1])
@pytest.mark.parametrize(
    ("dtype", "number"),
    [
        *((torch.float32, number) for number in (1, WIDE_GROUP, WIDE_GROUP + 1)),
        *((torch.bfloat16, number) for number in (1, HALF_GROUP, HALF_GROUP + 1)),
        *((torch.float16, number) for number in (HALF_GROUP, HALF_GROUP + 1)),
    ],
)
def test_tiles_that_share_a_product(dtype: torch.dtype, number: int, rest: int) -> None:
    """Several whole tiles are followed by one of `rest` rows: the last group is full, or holds a tile or less."""
    tile = 31
    made = inputs(dtype, 0.0, 90)  # a tile is fewer than all tokens, also where it has all rows that predict
    made["mask"].view(-1)[: number * tile + rest] = 1
    check(made, made_in_tiles(made, tile, old=rest == 1), dtype)


@pytest.mark.parametrize("num_rows", [NUM_ROWS, NUM_ROWS - 1, 100, 1])
def test_blocks_of_a_weights_gradient(num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows of the weight at once, or some after the others; one where a block's numbers are fewer than a row's."""
    monkeypatch.setattr(token_loss, "BLOCK_NUMBERS", num_rows * HIDDEN if num_rows > 1 else HIDDEN - 1)
    for old in (False, True):
        made = inputs(torch.bfloat16, 2.6, 150)
        check(made, made_in_tiles(made, 64, old), torch.bfloat16)
