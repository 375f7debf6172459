"""One word for one thing: words that no identifier may contain, and words that need a word next to them.

Identifiers of the product, the tests and the benchmarks are read from the source, those of the documents from their
backquotes. CONTRIBUTING.md has the words to use instead.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from configs.schema import Config
from tests.test_packages import FREE, ROOT, TABLE, write_tree

pytestmark = pytest.mark.fast

# Use the word that is meant: sharded, balanced; separate, distant; capacity, headroom; candidates, directions;
# synchronize, apply; estimate; validate, check, verdict; started, in flight, resume state.
NEVER = frozenset(
    "deal deals dealt dealing dealer apart room rooms ways settle settles settled settling "
    "reckon reckons reckoned reckoning judge judges judged judging begun".split()
)
# Words that mean several things: an identifier with one of them has another word as well (expert_slots, not slots).
QUALIFIED = frozenset("place places part parts piece pieces slot slots rows copy copies".split())
# File names that fit everywhere and say nothing: each at most once.
GENERAL_FILES = ("words", "pieces", "parts", "rows", "memory", "build", "files", "measure")

# Identifiers that a file or another program prescribes, by file.
EXEMPT: dict[str, set[str]] = {
    "benchmarks/checks/expert_tiers_parity.py": {"copies"},  # a field of Compared, which --json prints by name
    "benchmarks/card/records.py": {"rows"},  # a field of Record, which card.jsonl stores by name
    "simulator/context/shared_rows.py": {"places", "rows"},  # fields of SharedRows, which plan=json prints by name
}


def word_parts(identifier: str) -> list[str]:
    """Return the words of an identifier in lower case: `ExpertSlot2` and `expert_slot_2` are expert, slot, 2."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", identifier)]


def is_banned(identifier: str) -> bool:
    """Whether an identifier has a word of NEVER, or is a word of QUALIFIED alone."""
    words = word_parts(identifier)
    return not NEVER.isdisjoint(words) or (len(words) == 1 and words[0] in QUALIFIED)


def identifiers(path: Path) -> Iterator[tuple[int, str]]:
    """Every identifier that a Python file defines, with its line; names of Python's own protocols are left out."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                name = node.name
            case ast.Name(ctx=ast.Store()):
                name = node.id
            case ast.Attribute(ctx=ast.Store()):
                name = node.attr
            case ast.arg():
                name = node.arg
            case ast.alias(asname=str(name)):
                pass
            case _:
                continue
        if not re.fullmatch(r"__\w+__", name):
            yield getattr(node, "lineno", 0), name


@functools.cache
def config_keys() -> frozenset[str]:
    """Names of the configuration's keys, at every level."""
    found: set[str] = set()
    todo = [Config]
    while todo:
        kind = todo.pop()
        for name, field in kind.__dataclass_fields__.items():
            found.add(name)
            inner = field.default_factory
            if isinstance(inner, type) and hasattr(inner, "__dataclass_fields__"):
                todo.append(inner)
    return frozenset(found)


def banned_identifiers(root: Path = ROOT) -> list[str]:
    """Identifiers and file names of the product, the tests and the benchmarks that the lists forbid."""
    found = []
    for path in sorted(path for package in (*TABLE, *FREE) for path in (root / package).rglob("*.py")):
        file = path.relative_to(root)
        allowed = EXEMPT.get(file.as_posix(), set()) | config_keys()
        names = [(0, word) for word in file.with_suffix("").parts] + list(identifiers(path))
        found += [f"{file}:{line} {name}" for line, name in names if is_banned(name) and name not in allowed]
    return list(dict.fromkeys(found))


def test_no_identifier_has_a_word_that_is_not_the_fields(tmp_path: Path) -> None:
    found = banned_identifiers()
    assert not found, f"{len(found)}:\n" + "\n".join(found)
    write_tree(
        tmp_path,
        {
            "moe/a.py": "ideal = 1\ndef deal(expert_slots, slot): ...\nclass _RoomOf: ...\nself.copy = lambda part: 0",
            "moe/apart/b.py": "import numpy as rooms\ndef __copy__(x): ...",
        },
    )
    assert [line.split()[-1] for line in banned_identifiers(tmp_path)] == [
        "deal", "_RoomOf", "copy", "slot", "part", "apart", "rooms",
    ]  # fmt: skip


def quoted_identifiers(text: str) -> list[str]:
    """Identifiers in backquotes of a Markdown text; blocks of commands are left out."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    return [
        name
        for quoted in re.findall(r"`([^`\n]+)`", text)
        if re.fullmatch(r"[A-Za-z_][\w.]*(\(\))?", quoted)
        for name in quoted.removesuffix("()").split(".")
    ]


@functools.cache
def product_strings() -> frozenset[str]:
    """Words of the product's string constants: keys of metrics, events and stored files are among them."""
    found: set[str] = set()
    for path in (path for package in TABLE for path in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
                found.update(re.findall(r"\w+", node.value))
    return frozenset(found)


def test_documents_quote_no_such_identifier() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"))
        for name in quoted_identifiers(path.read_text(encoding="utf-8"))
        if is_banned(name) and name not in config_keys() | product_strings()
    ]
    assert not found, "\n".join(found)
    assert quoted_identifiers("`a.rows` and `deal()` in `python -m x`\n```\n`rows`\n```") == ["a", "rows", "deal"]


def test_general_file_names_are_given_once() -> None:
    stems = [path.stem for package in TABLE for path in (ROOT / package).rglob("*.py")]
    assert {name: stems.count(name) for name in GENERAL_FILES if stems.count(name) > 1} == {}
