"""Tests wait for events, and long enough for a machine that is slow or busy: no short limit of their own."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.test_packages import ROOT
from tests.waits import LONG

pytestmark = pytest.mark.fast

# Where a time that runs out is what is tested: file and function.
OF_TIMES = {
    ("tests/benchmarks/test_cgroups.py", "test_timeout_ends_what_was_started"),
    ("tests/benchmarks/test_cluster.py", "test_a_stuck_rank_is_reported_with_its_stack"),
    ("tests/benchmarks/test_cluster.py", "test_launch_fails_with_its_rank_and_in_time"),
    ("tests/test_distributed_pool.py", "test_hang_is_reported_with_stacks_and_ends_the_pool"),
}
WAITING = ("wait", "join", "communicate", "wait_procs")
WORDS = re.compile(r"timeout|monotonic|\.(wait|join)\(")


def short_waits(code: str) -> Iterator[tuple[str, int, str]]:
    """Function, line and text of each limit below LONG: a `timeout`, a mark, a deadline."""
    for function in ast.walk(ast.parse(code)):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for node in ast.walk(function):
                if isinstance(node, ast.expr) and any(value < LONG for value in _limits(node)):
                    yield function.name, node.lineno, ast.unparse(node)


def _limits(node: ast.expr) -> Iterator[float]:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
        given = [keyword.value for keyword in node.keywords if keyword.arg == "timeout"]
        given += node.args[:1] if name in WAITING else []
        # A poll of some milliseconds is no limit.
        yield from (value for value in map(_number, given) if value is not None and value >= 0.1)
        if name == "timeout":  # pytest.mark.timeout
            yield 0.0
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) and isinstance(node.left, ast.Call):
        deadline = _number(node.right) if ast.unparse(node.left).endswith("monotonic()") else None
        yield from () if deadline is None else (deadline,)


def _number(node: ast.expr) -> float | None:
    is_number = isinstance(node, ast.Constant) and isinstance(node.value, int | float)
    return float(node.value) if is_number else None  # type: ignore[attr-defined, arg-type]


def test_no_test_has_a_short_limit_of_its_own() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        if WORDS.search(code := path.read_text(encoding="utf-8"))
        for function, line, text in short_waits(code)
        if (str(path.relative_to(ROOT)), function) not in OF_TIMES
    ]
    assert not found, "take tests.waits.LONG or until(): " + "; ".join(found)


def test_the_rule_finds_short_limits() -> None:
    code = (
        "def test_a():\n    process.communicate(timeout=60)\n    heard.wait(30)\n    thread.join(timeout=LONG)\n"
        "    end = time.monotonic() + 5\n    done.wait(0.002)\n@pytest.mark.timeout(240)\ndef test_b():\n"
        "    run(timeout=900)\n"
    )
    assert [line for _, line, _ in short_waits(code)] == [2, 3, 5, 7]
