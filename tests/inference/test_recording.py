"""--record-routing: what it refuses, before a weight is read, and that the advised layout records the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.checks.ring_parity import EP2, PP2, make_folder
from inference import generate
from tests import distributed
from tests.inference.test_evaluate import command


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small mixture."""
    return make_folder("mixtral", tmp_path_factory.mktemp("models") / "mixtral", [])


def _line(model: Path, path: Path, *layout: str) -> list[str]:
    ids = ["--ids", "--prompt", "1 2 3", "--prompt", "5", "--max-tokens", "4", "--ignore-end", "--device", "cpu"]
    return ["--checkpoint", str(model), *ids, "--record-routing", str(path), *layout]


def test_the_advised_layout_records_what_one_rank_does(model: Path, tmp_path: Path) -> None:
    (status, out, _) = distributed.run(command, 1, generate.main, _line(model, tmp_path / "one"))[0]
    assert status == 0
    for status, said, errors in distributed.run(command, 2, generate.main, _line(model, tmp_path / "two", PP2)):
        assert (status, said) == (2, "") and "Traceback" not in errors
        assert f"parallel.pipeline (2) must be 1 with --record-routing. Try parallel.pipeline=1 {EP2}." in errors
    assert not (tmp_path / "two").exists()
    answers = distributed.run(command, 2, generate.main, _line(model, tmp_path / "two", "parallel.pipeline=1", EP2))
    assert [(status, text) for status, text, _ in answers] == [(0, out), (0, "")]
    one, two = ((tmp_path / name).read_text().splitlines() for name in ("one", "two"))
    assert one == two and len(one) > 8


def test_what_cannot_be_recorded_is_refused(model: Path, tmp_path: Path) -> None:
    dense, there = make_folder("llama", tmp_path / "dense", []), tmp_path / "there"
    there.write_text("mine")
    for line, said in (
        (_line(dense, tmp_path / "new"), "needs a model with experts"),
        (_line(model, there), "must be a new file, but this file exists"),
        (_line(model, tmp_path / "nowhere" / "new"), "cannot be created: No such file or directory"),
    ):
        status, out, errors = distributed.run(command, 1, generate.main, line)[0]
        assert (status, out) == (2, "") and "Traceback" not in errors and said in errors.splitlines()[-1]
    assert there.read_text() == "mine" and not (tmp_path / "new").exists()
