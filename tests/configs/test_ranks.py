"""Variables of the launcher: read, or refused in one line that names the variable."""

from __future__ import annotations

import sys

import pytest

from base.errors import ConfigError
from base.ranks import Launch, label, launched, use_fewer
from configs.compose import run
from configs.schema import Config

pytestmark = pytest.mark.fast

VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
GOOD = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
}


def _set(monkeypatch: pytest.MonkeyPatch, changed: dict[str, str | None]) -> None:
    for name in VARIABLES:
        value = {**GOOD, **changed}[name]
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)


NONE: dict[str, str | None] = dict.fromkeys(VARIABLES)


def test_a_launcher_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    cases: list[tuple[dict[str, str | None], Launch]] = [
        (NONE, Launch(0, 1)),
        ({**NONE, "WORLD_SIZE": "1"}, Launch(0, 1)),
        ({}, Launch(1, 2, 1, 2)),
        ({"LOCAL_RANK": None, "LOCAL_WORLD_SIZE": None}, Launch(1, 2, None, None)),
        ({**NONE, "LOCAL_RANK": "1"}, Launch(0, 1, 1)),
        ({"RANK": "9", "WORLD_SIZE": "16"}, Launch(9, 16, 1, 2)),
    ]
    for changed, launch in cases:
        _set(monkeypatch, changed)
        assert launched() == launch
        launch.check_meeting()


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"RANK": "2"}, "RANK (2) must be less than WORLD_SIZE (2)"),
        ({"RANK": "-1"}, "RANK (-1) must be an integer of at least 0"),
        ({"RANK": "one"}, "RANK (one) must be an integer"),
        ({"RANK": ""}, "RANK () must be an integer"),
        ({"RANK": None}, "RANK must be set"),
        ({"WORLD_SIZE": None}, "WORLD_SIZE must be set"),
        ({**NONE, "RANK": "0"}, "WORLD_SIZE must be set"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE (0) must be an integer of at least 1"),
        ({"WORLD_SIZE": "2.0"}, "WORLD_SIZE (2.0) must be an integer"),
        ({**NONE, "WORLD_SIZE": "many"}, "WORLD_SIZE (many) must be an integer"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK (2) must be less than LOCAL_WORLD_SIZE (2)"),
        ({"LOCAL_RANK": "4", "LOCAL_WORLD_SIZE": None}, "LOCAL_RANK (4) must be less than WORLD_SIZE (2)"),
        ({"LOCAL_RANK": "x"}, "LOCAL_RANK (x) must be an integer"),
        ({"MASTER_ADDR": None}, "MASTER_ADDR must be set"),
        ({"MASTER_PORT": None}, "MASTER_PORT (unset) must be a port"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT (70000) must be a port"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT (http) must be an integer"),
    ],
)
def test_a_wrong_place_is_one_line(
    changed: dict[str, str | None], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _set(monkeypatch, changed)
    with pytest.raises(ConfigError) as caught:
        launched().check_meeting()
    assert str(caught.value).startswith(says)

    def main(config: Config, given: frozenset[str]) -> int:
        raise AssertionError("a run was started")

    monkeypatch.setattr(sys, "argv", ["train.py"])
    with pytest.raises(SystemExit) as ended:
        run(main)
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_line_names_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    cases: list[tuple[dict[str, str | None], str]] = [
        ({}, "[rank 1] "),
        ({"RANK": "one"}, "[rank one] "),  # what is refused for it says so too
        ({"RANK": "0", "WORLD_SIZE": "1"}, ""),
        ({"RANK": None}, ""),
        (NONE, ""),
    ]
    for changed, text in cases:
        _set(monkeypatch, changed)
        assert label() == text


def test_fewer_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    _set(monkeypatch, {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"})
    use_fewer(2)
    assert launched() == Launch(1, 2, 1, 3)
