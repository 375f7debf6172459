"""The calls into TransformerEngine that a Python file makes, by its syntax tree."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

PACKAGE = "transformer_engine"


@dataclass(frozen=True)
class Call:
    """`target` is "module:name" or "module:Class.method"; `open`: arguments that no reader of the code knows may
    follow."""

    target: str
    line: int
    positional: int
    keywords: frozenset[str]
    open: bool


@dataclass(frozen=True)
class Imported:
    """A name that is imported from the package."""

    module: str
    name: str
    line: int

    @property
    def target(self) -> str:
        return f"{self.module}:{self.name}"


def imported(tree: ast.Module) -> dict[str, Imported]:
    """What a file imports by name, by the name it has there; of two of a name the first one, the other is for older
    versions."""
    found: dict[str, Imported] = {}
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    for node in sorted(nodes, key=lambda node: node.lineno):
        if node.module is not None and node.module.split(".")[0] == PACKAGE:
            for item in node.names:
                found.setdefault(item.asname or item.name, Imported(node.module, item.name, node.lineno))
    return found


def calls(tree: ast.Module) -> Iterator[Call]:
    """Of the package's functions, its classes, and methods of classes that a class of the file extends."""
    yield from _calls(tree, imported(tree), None, {})


def dotted(node: ast.expr) -> str | None:
    """a.b.c as text."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (before := dotted(node.value)) is not None:
        return f"{before}.{node.attr}"
    return None


def _target(name: str | None, names: dict[str, Imported]) -> str | None:
    if name is None:
        return None
    first, _, rest = name.partition(".")
    if first == "te" and rest.startswith("pytorch."):
        module, _, last = rest.rpartition(".")
        return f"{PACKAGE}.{module}:{last}"
    if first in names:
        return names[first].target + (f".{rest}" if rest else "")
    return None


def _calls(node: ast.AST, names: dict[str, Imported], base: str | None, dicts: dict[str, set[str]]) -> Iterator[Call]:
    if isinstance(node, ast.ClassDef):
        base = next((found for each in node.bases if (found := _target(dotted(each), names)) is not None), None)
    elif isinstance(node, ast.FunctionDef):
        dicts = _keys_of_dicts(node)
    elif isinstance(node, ast.Call):
        target = _target(dotted(node.func), names)
        function = node.func
        if base is not None and isinstance(function, ast.Attribute) and _is_super(function.value):
            target = base if function.attr == "__init__" else f"{base}.{function.attr}"
        if target is not None:
            yield _call(node, target, dicts)
    for child in ast.iter_child_nodes(node):
        yield from _calls(child, names, base, dicts)


def _is_super(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and dotted(node.func) == "super"


def _keys_of_dicts(function: ast.FunctionDef) -> dict[str, set[str]]:
    """The string keys that a function puts into its dictionaries: what `**` may hand on."""
    keys: dict[str, set[str]] = {}
    for node in _walk(function):
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            if isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
                if isinstance(target.slice, ast.Constant) and isinstance(target.slice.value, str):
                    keys.setdefault(target.value.id, set()).add(target.slice.value)
            elif isinstance(target, ast.Name) and isinstance(node.value, ast.Dict):
                found = {key.value for key in node.value.keys if isinstance(key, ast.Constant)}
                keys.setdefault(target.id, set()).update(str(key) for key in found)
    return keys


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes below, but for what is for versions that are too old."""
    yield node
    if isinstance(node, ast.If) and "is_te_min_version(" in ast.unparse(node.test):
        children: list[ast.AST] = list(node.body)
    else:
        children = list(ast.iter_child_nodes(node))
    for child in children:
        yield from _walk(child)


def _call(node: ast.Call, target: str, dicts: dict[str, set[str]]) -> Call:
    keywords = {keyword.arg for keyword in node.keywords if keyword.arg is not None}
    spread = [keyword.value for keyword in node.keywords if keyword.arg is None]
    for value in spread:
        keywords |= dicts.get(value.id, set()) if isinstance(value, ast.Name) else set()
    starred = any(isinstance(argument, ast.Starred) for argument in node.args)
    positional = sum(not isinstance(argument, ast.Starred) for argument in node.args)
    return Call(target, node.lineno, positional, frozenset(keywords), bool(spread) or starred)
