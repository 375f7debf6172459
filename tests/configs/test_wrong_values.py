"""Every key takes five kinds of wrong value and more, and each ends in one line that names key, value and rule, with advice that works."""

from __future__ import annotations

import copy
import functools
import shlex
from collections.abc import Callable
from typing import Any

import pytest

from configs.compose import compose_groups
from configs.mistakes import check_override
from configs.schema import KEYS, Config, ConfigError
from configs.validate import get, validate
from configs.values import as_typed, set_values, to_config
from tests.configs import advice
from tests.configs.wrong_values import wrong_values

Take = Callable[..., Config]


@pytest.fixture(scope="module")
def take() -> Take:
    """The command line's path from overrides to a checked config of the tiny MoE model, presets composed once."""
    presets = compose_groups([check_override("model=gpt_moe_tiny", None)])
    fresh = [copy.deepcopy(presets)]

    @functools.cache  # many mistakes have the same advice
    def take(*overrides: str) -> Config:
        composed = fresh.pop() if fresh else copy.deepcopy(presets)
        read = [check_override(text, None) for text in overrides]
        try:
            before = set_values(composed, read)
        except ConfigError:
            if len(read) == 1:
                fresh.append(composed)  # nothing was set
            raise
        config = to_config(composed, before)
        validate(config, 1)
        return config

    return take


@pytest.mark.parametrize("name", KEYS)
def test_a_wrong_value_ends_in_one_right_line(name: str, take: Take) -> None:
    for wrong in wrong_values(KEYS[name]):
        with pytest.raises(ConfigError) as caught:
            take(f"{name}={wrong.written}")
        message = str(caught.value)
        start = f"{name} ({wrong.written.replace(chr(39), '')})"
        assert message.startswith(name if wrong.kind in ("range", "huge", "nan") else start) and "\n" not in message, (wrong, message)
        assert " must " in message, (wrong, message)
        if wrong.kind == "unset variable":
            assert wrong.written[9:-1] in message.partition("must be")[2], (wrong, message)
        alternatives = advice.split(message)[1]
        assert alternatives, (wrong, message)
        for fixes in alternatives:
            assert any(advice.key_of(fix) == name for fix in fixes), (wrong, message)
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
