"""The plans of a million tokens at published widths, and the comparison with the article's figures."""

from __future__ import annotations

import pytest

from benchmarks.speed.long_context import (
    EXCHANGE_THEIRS,
    GIB,
    LOSS_THEIRS,
    SHAPES,
    TOKENS,
    figures,
    one_layer,
    one_loss,
)

PUBLISHED = {7: 120e9, 14: 241e9, 39: 667e9}  # parameters


@pytest.mark.parametrize("layers", SHAPES)
def test_a_million_tokens_fit(layers: int) -> None:
    found = figures(layers, SHAPES[layers])
    assert found.fits and found.parameters == pytest.approx(PUBLISHED[layers], rel=0.02)
    assert found.tokens == TOKENS // found.ranks and sum(found.kinds.values()) == found.total
    assert found.bound == 2 * found.ranks * 8 * 4096 * 7168 * 2 == found.ranks * found.even
    assert (
        found.inputs_host == layers * found.tokens * 7168 * 2 and found.inputs_device * layers == 2 * found.inputs_host
    )


def test_components_take_no_more_than_the_articles() -> None:
    assert one_layer() < EXCHANGE_THEIRS[1] * GIB
    for tokens, (_, theirs) in LOSS_THEIRS.items():
        assert one_loss(tokens) < theirs * GIB
