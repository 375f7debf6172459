"""Logical tensors follow the blueprint's weights; weights that it does not know raise an error with their name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from models.blueprint.operation import EXPERT, TENSOR, Split, Weight
from models.weights import logical_tensors

pytestmark = pytest.mark.fast


class _Chunk(torch.nn.Module):
    """A model chunk of one weight."""

    def __init__(self, **weights: Weight) -> None:
        super().__init__()
        self.side = torch.nn.Linear(3, 4, bias=False)
        self.blueprint_weights = weights
        self.share_embeddings_and_output_weights = False
        self.pg_collection: Any = SimpleNamespace(tp="tensor ranks", expt_tp="expert tensor ranks")


def _of(*splits: Split) -> Any:
    (item,) = logical_tensors([_Chunk(**{"side.weight": Weight("side.weight", (8, 3), "matrix", splits)})])
    return item


def test_shape_kind_and_split_are_the_blueprints() -> None:
    item = _of(Split(0, TENSOR))
    assert (item.name, item.shape, item.kind, item.dim, item.group) == (
        "side.weight",
        (8, 3),
        "matrix",
        0,
        "tensor ranks",
    )
    stacked = _of(Split(0, EXPERT))
    assert (stacked.shape, stacked.dim, stacked.group) == ((3,), None, "expert tensor ranks")


def test_what_is_unknown_is_named() -> None:
    with pytest.raises(ValueError, match="logical_tensors does not know 'sideways', the axis of side.weight"):
        _of(Split(0, "sideways"))
    with pytest.raises(ValueError, match="'side.weight', which its blueprint does not have"):
        logical_tensors([_Chunk()])
