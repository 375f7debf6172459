"""The signatures of what is called in TransformerEngine: `python -m tests.parallel.transformer_engine.signatures WHEEL`
reads them from the pinned wheel's source and writes signatures.json beside this file.

The wheel: `pip download --no-deps transformer-engine==VERSION`, the version that pyproject.toml names.
"""

from __future__ import annotations

import ast
import json
import sys
import zipfile
from pathlib import Path
from typing import Any

from tests.parallel.transformer_engine.calls import calls, imported

FOLDER = Path(__file__).parent
FILE = FOLDER / "signatures.json"
ROOT = FOLDER.parents[2]


def sources() -> dict[str, Path]:
    """The files that call TransformerEngine: Megatron-core's, and this project's."""
    import megatron.core

    theirs = Path(megatron.core.__path__[0]) / "extensions" / "transformer_engine.py"
    ours = [
        path
        for package in ("models", "moe", "parallel", "optim", "training")
        for path in (ROOT / package).rglob("*.py")
    ]
    return {"megatron/core/extensions/transformer_engine.py": theirs} | {
        str(path.relative_to(ROOT)): path for path in ours if "transformer_engine" in path.read_text(encoding="utf-8")
    }


def trees() -> dict[str, ast.Module]:
    """Their syntax trees."""
    return {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in sources().items()}


class Wheel:
    """The Python source of a wheel; modules by their dotted names."""

    def __init__(self, path: Path) -> None:
        self._modules: dict[str, ast.Module] = {}
        self._packages: set[str] = set()
        self.version = path.name.split("-")[1]
        with zipfile.ZipFile(path) as archive:
            for file in archive.namelist():
                if file.endswith(".py"):
                    name = file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
                    if file.endswith("__init__.py"):
                        self._packages.add(name)
                    self._modules[name] = ast.parse(archive.read(file))

    def find(self, module: str, name: str, seen: frozenset[str] = frozenset()) -> tuple[str, ast.AST] | None:
        """(module, definition) of a class or function; where it is imported from elsewhere, there."""
        tree = self._modules.get(module)
        if tree is None or f"{module}:{name}" in seen:
            return None
        seen |= {f"{module}:{name}"}
        for node in tree.body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
                return module, node
            if isinstance(node, ast.Assign) and dotted_call(node) and any(_named(each, name) for each in node.targets):
                return module, node
        for each in ast.walk(tree):
            if isinstance(each, ast.ImportFrom):
                for item in each.names:
                    if item.name == "*" or (item.asname or item.name) == name:
                        found = self.find(self._absolute(module, each), name if item.name == "*" else item.name, seen)
                        if found is not None:
                            return found
        return None

    def signature(self, target: str) -> list[list[Any]] | None:
        """[name, kind, has a default] of each parameter but self; None where there is no such thing."""
        module, _, path = target.partition(":")
        name, _, method = path.partition(".")
        found = self.find(module, name)
        if found is None:
            return [] if f"{module}.{name}" in self._modules and not method else None
        module, node = found
        function: ast.AST | None = node
        if isinstance(node, ast.ClassDef):
            function = self._method(module, node, method or "__init__")
            if function is None:
                return None if method else []
        elif isinstance(node, ast.Assign):  # the `apply` of a function of autograd
            assert isinstance(node.value, ast.Attribute) and isinstance(node.value.value, ast.Name)
            cls = self.find(module, node.value.value.id)
            assert cls is not None and isinstance(cls[1], ast.ClassDef)
            function = self._method(cls[0], cls[1], "forward")
        assert isinstance(function, ast.FunctionDef)
        return _parameters(function, bound=not isinstance(node, ast.FunctionDef))

    def _method(self, module: str, cls: ast.ClassDef, name: str) -> ast.FunctionDef | None:
        for node in cls.body:
            if isinstance(node, ast.FunctionDef) and node.name == name:
                return node
        for base in cls.bases:
            found = self.find(module, base.id) if isinstance(base, ast.Name) else None
            if found is not None and isinstance(found[1], ast.ClassDef):
                return self._method(found[0], found[1], name)
        return None

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        package = module if module in self._packages else module.rpartition(".")[0]
        for _ in range(node.level - 1):
            package = package.rpartition(".")[0]
        return f"{package}.{node.module}" if node.module else package


def dotted_call(node: ast.Assign) -> bool:
    """Whether something is the `apply` of a class."""
    return (
        isinstance(node.value, ast.Attribute) and node.value.attr == "apply" and isinstance(node.value.value, ast.Name)
    )


def _named(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _parameters(function: ast.FunctionDef, bound: bool) -> list[list[Any]]:
    given = function.args
    static = any(isinstance(each, ast.Name) and each.id == "staticmethod" for each in function.decorator_list)
    has_context = bool(given.args) and given.args[0].arg == "ctx"
    plain = [*given.posonlyargs, *given.args][1 if bound and (has_context or not static) else 0 :]
    first_default = len(plain) - len(given.defaults)
    result: list[list[Any]] = [[each.arg, "plain", i >= first_default] for i, each in enumerate(plain)]
    if given.vararg:
        result.append([given.vararg.arg, "*", True])
    result += [
        [each.arg, "keyword", default is not None]
        for each, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)
    ]
    if given.kwarg:
        result.append([given.kwarg.arg, "**", True])
    return result


def main(wheel: Path) -> None:
    """Write the file."""
    source = Wheel(wheel)
    targets = {call.target for tree in trees().values() for call in calls(tree)}
    targets |= {each.target for tree in trees().values() for each in imported(tree).values()}
    found = {target: source.signature(target) for target in sorted(targets)}
    lines = [f"  {json.dumps(target)}: {json.dumps(parameters)}" for target, parameters in found.items()]
    text = ",\n".join(lines)
    FILE.write_text(f'{{\n "version": "{source.version}",\n "signatures": {{\n{text}\n }}\n}}\n', encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
