"""The type check sees every attribute that a benchmark reads of Mixtrain's own objects."""

from __future__ import annotations

import ast
from inspect import signature
from pathlib import Path

import pytest

from benchmarks.speed import end_to_end
from models.build import build_model

pytestmark = pytest.mark.fast

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
# Attributes of other libraries' objects, which some of them lack.
FOREIGN = {"__dict__", "__name__", "ds_numel", "is_user_annotation"}
# Parameters by these names are Mixtrain's, and have a type of their own.
OWN = {"config", "engine", "plan", "topology"}


@pytest.mark.parametrize("file", sorted(BENCHMARKS.rglob("*.py")), ids=lambda file: file.stem)
def test_no_attribute_is_hidden_from_the_type_check(file: Path) -> None:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
            name = node.args[1]
            if len(node.args) == 3 and isinstance(name, ast.Constant):
                said = f"line {node.lineno}: `getattr` with a default hides {name.value!r}: narrow by isinstance"
                assert name.value in FOREIGN, said
        elif isinstance(node, ast.FunctionDef):
            for each in (*node.args.args, *node.args.kwonlyargs):
                is_any = isinstance(each.annotation, ast.Name) and each.annotation.id == "Any"
                assert not (is_any and each.arg in OWN), f"line {node.lineno}: `{each.arg}: Any` is not checked"


def test_a_stand_in_takes_what_its_original_is_given() -> None:
    """A patch by name is not checked."""
    given = set(signature(build_model).parameters) - {"fill"}
    assert set(signature(end_to_end._build_megatron).parameters) == given
