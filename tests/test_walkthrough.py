"""docs/walkthrough.md leads through the code in stops; each `file:function` that it names is in the source."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.distributed import ROOT

pytestmark = pytest.mark.fast

PAGE = ROOT / "docs" / "walkthrough.md"
STOPS = 12
STOP = re.compile(r"^## (\d+)\. .+$", re.M)
LOCATION = re.compile(r"`([\w/]+\.py):([\w.]+)`")


def stops(text: str) -> list[tuple[int, list[tuple[str, str]]]]:
    """The number of each stop, and the places (file, function) that it names."""
    sections = STOP.split(text)[1:]
    return [(int(number), LOCATION.findall(body)) for number, body in zip(sections[::2], sections[1::2], strict=True)]


def is_defined(path: Path, name: str) -> bool:
    """Whether a file defines the function, class or method `name`, such as Trainer.fit; reads the source alone."""
    if not path.is_file():
        return False
    found: ast.AST = ast.parse(path.read_text(encoding="utf-8"))
    for attribute in name.split("."):
        inside = [node for node in ast.iter_child_nodes(found) if getattr(node, "name", None) == attribute]
        if not inside or not isinstance(inside[-1], ast.FunctionDef | ast.ClassDef):
            return False
        found = inside[-1]
    return True


def test_stops_in_order_name_places_that_exist() -> None:
    found = stops(PAGE.read_text(encoding="utf-8"))
    assert [number for number, _ in found] == list(range(1, STOPS + 1))
    assert [number for number, locations in found if not locations] == []
    assert [
        f"{file}:{name}" for _, locations in found for file, name in locations if not is_defined(ROOT / file, name)
    ] == []


def test_a_place_that_is_gone_is_found(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text(
        "class Trainer:\n    steps = 3\n\n    def fit(self): ...\n\n\ndef prepare(): ...\n\n\nprepared = prepare\n"
    )
    assert all(is_defined(file, name) for name in ("Trainer", "Trainer.fit", "prepare"))
    assert not any(
        is_defined(file, name) for name in ("Trainer.prepare", "Trainer.steps", "fit", "prepared", "prepare.fit")
    )
    assert not is_defined(tmp_path / "b.py", "prepare")
    text = "# A walk\n\n## 1. Text\n\nRead by `a.py:prepare`.\n\n## 2. Steps\n\nnothing `here.py`\n"
    assert stops(text) == [(1, [("a.py", "prepare")]), (2, [])]
