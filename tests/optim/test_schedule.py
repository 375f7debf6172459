"""Learning rates of known steps."""

from __future__ import annotations

import pytest

from configs.schema import OptimizerConfig
from optim.optimizer import learning_rate

pytestmark = pytest.mark.fast

TOTAL = 100


def rates(steps: list[int], **settings: object) -> list[float]:
    config = OptimizerConfig(lr=1.0, min_lr=0.1)
    for key, value in settings.items():
        setattr(config, key, value)
    return [learning_rate(config, TOTAL, step) for step in steps]


def test_warmup_is_linear_and_ends_at_the_peak() -> None:
    for schedule in ("cosine", "linear", "constant", "wsd"):
        assert rates([1, 5, 10], schedule=schedule, warmup_steps=10, wsd_decay_steps=20) == [0.1, 0.5, 1.0]


def test_cosine() -> None:
    found = rates([20, 60, 100, 150], schedule="cosine", warmup_steps=20)
    assert found == pytest.approx([1.0, 0.55, 0.1, 0.1])
    assert rates([40], schedule="cosine", warmup_steps=20) == pytest.approx([0.1 + 0.9 * 0.5 * (1 + 2**-0.5)])


def test_linear() -> None:
    assert rates([50, 75, 100, 101], schedule="linear", warmup_steps=50) == pytest.approx([1.0, 0.55, 0.1, 0.1])


def test_constant() -> None:
    assert rates([1, 50, 100, 1000], schedule="constant") == [1.0] * 4


def test_wsd() -> None:
    found = rates([10, 80, 90, 100, 120], schedule="wsd", warmup_steps=10, wsd_decay_steps=20)
    assert found == pytest.approx([1.0, 1.0, 0.55, 0.1, 0.1])


def test_decay_steps_replace_the_steps_of_the_run() -> None:
    assert rates([25, 50, 100], schedule="linear", decay_steps=50) == pytest.approx([0.55, 0.1, 0.1])
