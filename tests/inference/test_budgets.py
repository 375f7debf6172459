"""Weights that come from the files in every pass give the same bits as weights that stay, whatever the budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from inference.generation import Sampling, generate
from inference.open_model import OpenModel, open_model
from inference.scoring import log_likelihoods
from inference.weights.plan import MIB
from tests import distributed
from tests.inference.test_generate import GPT_FAMILIES, _save

PROMPTS = [[5, 7, 9, 11], [3], [8, 1, 2, 3, 4, 5, 6, 7, 8], [90, 91], [17] * 6]
TEXT = [(7 * i) % 97 for i in range(50)]
SAMPLED = Sampling(1.5, top_k=40, top_p=0.9, seed=7)


def _results(model: OpenModel) -> tuple[Any, ...]:
    decoder = model.decoder()
    greedy = generate(decoder, PROMPTS, 6, batch_size=2)
    drawn = generate(decoder, PROMPTS[:2], 6, SAMPLED, batch_size=1)
    return greedy, drawn, log_likelihoods(decoder, TEXT, 16, 8, 2).tolist()


def _by_budget(folder: Path, shares: list[float], precision: str) -> dict[float, tuple[Any, ...]]:
    with open_model(folder, device="cpu", precision=precision) as model:
        found = {1.0: _results(model)}
        plan, sizes, other = model.weights.plan, model.weights.sizes, model.weights._other
        assert plan is not None and not model.weights.streams
    largest = max(size for _, size in sizes.units) + sizes.expert
    for share in shares:
        room = sizes.small + largest + share * (sizes.total - sizes.small - largest)
        with open_model(folder, device="cpu", precision=precision, budget=(other + room) / MIB) as model:
            found[share] = _results(model)
            assert model.weights.counts.bytes_read > 0
            assert model.weights.bytes_held <= room
    return found


@pytest.mark.parametrize("name", GPT_FAMILIES)
def test_the_same_bits_with_every_budget(name: str, tmp_path: Path) -> None:
    _save(name, tmp_path)
    precision = "bf16" if GPT_FAMILIES.index(name) % 2 else "fp32"
    (found,) = distributed.run(_by_budget, 1, tmp_path, [0.0, 0.25, 0.6, 0.95], precision)
    for share, results in found.items():
        assert results == found[1.0], share
