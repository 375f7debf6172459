"""Wrong values of every key, of five kinds and more: each ends in one line that names key, value and rule, with advice
that works."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Callable
from typing import Any

import pytest

from base.errors import ConfigError
from configs.keys import get
from configs.schema import KEYS, Config
from configs.values import as_typed
from tests.configs import advice, wrong_values

pytestmark = pytest.mark.fast

Take = Callable[..., Config]


@pytest.fixture(scope="module")
def take() -> Take:
    presets = wrong_values.presets_of("gpt_moe_tiny")
    # many mistakes have the same advice
    return functools.cache(lambda *overrides: wrong_values.take(presets, overrides))


@pytest.mark.parametrize("name", KEYS)
def test_a_wrong_value_ends_in_one_right_line(name: str, take: Take) -> None:
    """Two of the five kinds, in turn from key to key, and of a third of the keys all others too;
    `python -m benchmarks.checks.wrong_values` has everything of all."""
    number, num_kinds = list(KEYS).index(name), len(wrong_values.KINDS)
    sampled = {wrong_values.KINDS[number % num_kinds], wrong_values.KINDS[(number + 2) % num_kinds]}
    for wrong in wrong_values.wrong_values(KEYS[name]):
        if wrong.kind not in sampled and (wrong.kind in wrong_values.KINDS or number % 3 > 0):
            continue
        with pytest.raises(ConfigError) as caught:
            take(f"{name}={wrong.written}")
        message = str(caught.value)
        assert not wrong_values.fault(wrong, message), (wrong, message)
        for fixes in advice.split(message)[1]:
            take(*fixes)


VALUES: dict[str, Any] = {
    "name": "a 'quoted' \"name\" with $HOME, = and [brackets]",
    "run_dir": "runs/${name}",
    "sample.prompts": ["def run(", "a, b", ""],
    "training.profile.steps": [1, 20],
    "data.corpus": [{"path": "my books/", "weight": 0.5}, "code.jsonl"],
    "checkpoint.weights": None,
    "optimizer.lr": 1e-5,
    "parallel.sequence": False,
    "data.tokenizer": "1e3",
}


@pytest.mark.parametrize("name", VALUES)
def test_advice_is_read_back_by_a_shell_and_by_hydra(name: str, take: Take) -> None:
    (typed,) = shlex.split(as_typed(name, VALUES[name]))
    expected = "runs/gpt_moe_tiny" if name == "run_dir" else VALUES[name]
    assert get(take(typed), name) == expected
