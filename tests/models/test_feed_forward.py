"""Dense feed-forward layers in tiles of rows: what they compute whole, gradients included."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed import run
from tests.models.helpers import make_config, random_batch, run_model
from tests.models.test_layouts import BERT, Overrides

VOCAB_SIZE = 90
FULL: Overrides = {"training": {"recompute": "full"}}
TILES: Overrides = {"training": {"token_tile": 7}}  # does not divide the rows
MODELS: dict[str, list[Overrides]] = {
    "swiglu": [],
    "gelu with biases": [{"model": {"activation": "gelu", "linear_bias": True}}],
    "bert": [BERT],
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "tp2 and sp": (2, {"tensor": 2, "sequence": True}),
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tiles_are_the_whole(layout: str, model: str) -> None:
    ranks, parallel = LAYOUTS[layout]
    batch = random_batch(VOCAB_SIZE, 4, 24)
    base = make_config({"model": {"sequence_length": 24, "num_layers": 2}}, *MODELS[model], FULL)
    tiled = make_config(
        {"model": {"sequence_length": 24, "num_layers": 2}}, *MODELS[model], FULL, TILES, {"parallel": parallel}
    )
    whole = run(run_model, 1, base, VOCAB_SIZE, batch)[0]
    results = run(run_model, ranks, tiled, VOCAB_SIZE, batch)
    assert results[0]["loss"] == pytest.approx(whole["loss"], rel=1e-6)
    found = {name: grad for result in results for name, grad in result["gradients"].items()}
    for name, grad in whole["gradients"].items():
        torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=1e-6)
