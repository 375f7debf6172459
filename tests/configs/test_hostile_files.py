"""Files and arguments that would hang a command or end it with a traceback: one line, or silence for a closed pipe."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from base import files
from base.errors import ConfigError
from configs.compose import compose, load, run
from configs.validate import validate
from inference import generate
from simulator.clock.hardware import load_hardware
from training import status

pytestmark = pytest.mark.fast

NAMES = "abcdefghij"
BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{','.join([f'*{before}'] * 9)}]\n" for before, name in zip(NAMES, NAMES[1:], strict=False)
)


@pytest.mark.parametrize("content", [BOMB, "a: &a [*a]\n", "[" * 1200], ids=["aliases", "circle", "deep"])
def test_a_yaml_file_that_grows_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(content)
    for read in (load, lambda path: load_hardware(str(path))):
        with pytest.raises(ConfigError, match=f"{path}[^\n]*$"):
            read(path)
    assert files.parse_yaml(b"a: &a [1, 2]\nb: *a\n") == {"a": [1, 2], "b": [1, 2]}


def test_a_pipe_is_no_file(tmp_path: Path) -> None:
    for name in ("config.yaml", status.STATUS):
        os.mkfifo(tmp_path / name)
    with pytest.raises(ConfigError, match="it is not a regular file"):
        load(tmp_path / "config.yaml")
    assert status.read(tmp_path) == {}


def test_more_experts_than_any_model_has_are_refused() -> None:
    with pytest.raises(ConfigError, match="moe.num_experts .*at most 65536"):
        validate(compose(["model=gpt_moe_tiny", "moe.num_experts=1000000000"]), 1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--prompt", "\udcff\udcfe"], "--prompt (b'\\xff\\xfe') must be UTF-8"), (["--top-p", "0"], "must be above 0")],
)
def test_arguments_of_generate(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = generate.main(["--checkpoint", ".", *arguments])
    except SystemExit as error:  # argparse's
        code = int(str(error.code))
    assert code == 2 and words in capsys.readouterr().err.splitlines()[-1]


def test_marks_of_direction_are_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = {"state": "failed", "step": 3, "text": "no \u202egood\x1b[0m"}
    (tmp_path / status.STATUS).write_text(json.dumps(content))
    assert status.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == "failed after step 3: no \\u202egood\\x1b[0m\n"


def test_help_into_a_closed_pipe_is_silent(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as output, pytest.raises(SystemExit) as end:
        monkeypatch.setattr(sys, "stdout", output)
        monkeypatch.setattr(sys, "argv", ["train.py", "--help", "model=gpt_tiny"])
        run(lambda config, given: 1)
    assert (end.value.code, capsys.readouterr().err) == (0, "")
