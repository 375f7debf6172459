"""The arrows between the rooms, read from the source: who may import whom, and that no two files import each other.

Imports inside functions count as much as those at the top.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# The table of the design. What a room may import it may import with all that this may: so every room but configs sees configs.
TABLE: dict[str, set[str]] = {
    "train": {"configs", "training", "models", "optim", "data", "moe", "parallel"},
    "configs": set(),
    "training": {"models", "optim", "data", "moe", "parallel"},
    "models": {"moe", "parallel"},
    "optim": {"parallel"},
    "data": {"parallel"},
    "moe": {"parallel"},
    "parallel": {"configs"},
    "launch": {"configs"},
}
FREE = {"benchmarks", "tests"}  # may import everything, and no other room may import them


def may_import(room: str) -> set[str]:
    allowed, found = {room}, set(TABLE[room])
    while found - allowed:
        allowed |= found
        found = set().union(*(TABLE[other] for other in allowed))
    return allowed


def module_name(path: Path, root: Path = ROOT) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def own_modules(root: Path = ROOT) -> dict[str, Path]:
    """Every module of the project by its dotted name."""
    paths = [path for room in (*TABLE, *FREE) for path in (root / room).rglob("*.py")]
    if (root / "train.py").exists():
        paths.append(root / "train.py")
    return {module_name(path, root): path for path in paths}


def imports(name: str, path: Path, modules: dict[str, Path]) -> dict[str, int]:
    """The project's modules that a file imports, with the line of the first import of each."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found: dict[str, int] = {}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        targets: list[str] = []
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            # `from a import b` means the module a.b where there is one, else a name inside a.
            targets = [f"{base}.{alias.name}" if f"{base}.{alias.name}" in modules else base for alias in node.names]
        for target in targets:
            if target.split(".")[0] in {*TABLE, *FREE} and target != name:
                found.setdefault(target, getattr(node, "lineno", 0))
    return found


def forbidden(modules: dict[str, Path], root: Path = ROOT) -> list[str]:
    wrong = []
    for name, path in modules.items():
        room = name.split(".")[0]
        if room in FREE:
            continue
        for target, line in imports(name, path, modules).items():
            if target.split(".")[0] not in may_import(room):
                wrong.append(f"{path.relative_to(root)}:{line} imports {target}, but {room} may import only {sorted(may_import(room))}")
    return wrong


def cycle(modules: dict[str, Path]) -> list[str]:
    """One circle of modules that import each other, first and last the same, or nothing."""
    graph = {name: [target for target in imports(name, path, modules) if target in modules] for name, path in modules.items()}
    done: set[str] = set()

    def search(name: str, way: list[str]) -> list[str]:
        if name in way:
            return [*way[way.index(name) :], name]
        if name in done:
            return []
        for target in graph[name]:
            if circle := search(target, [*way, name]):
                return circle
        done.add(name)
        return []

    for name in graph:
        if circle := search(name, []):
            return circle
    return []


def test_rooms_import_only_what_the_table_allows() -> None:
    modules = own_modules()
    assert {name.split(".")[0] for name in modules} == {*TABLE, *FREE}
    wrong = forbidden(modules)
    assert not wrong, "\n".join(wrong)


def test_no_two_files_import_each_other() -> None:
    assert cycle(own_modules()) == []


def test_entry_point_is_short() -> None:
    assert len((ROOT / "train.py").read_text(encoding="utf-8").splitlines()) < 80


def write_tree(root: Path, files: dict[str, str]) -> dict[str, Path]:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return own_modules(root)


@pytest.mark.parametrize(
    ("file", "text", "target"),
    [
        ("parallel/a.py", "from moe import layer", "moe.layer"),
        ("parallel/a.py", "def f():\n    import moe.layer", "moe.layer"),
        ("moe/deep/a.py", "from training.loop import fit", "training.loop"),
        ("configs/a.py", "import parallel", "parallel"),
        ("models/a.py", "if True:\n    from tests import tolerances", "tests"),
        ("training/a.py", "import benchmarks.cluster as c", "benchmarks.cluster"),
    ],
)
def test_forbidden_imports_are_found(tmp_path: Path, file: str, text: str, target: str) -> None:
    modules = write_tree(tmp_path, {file: text, "moe/layer.py": "", "training/loop.py": "import moe.layer\nfrom configs import schema"})
    (message,) = forbidden(modules, tmp_path)
    assert message.startswith(file) and f" imports {target}," in message


def test_cycles_are_found(tmp_path: Path) -> None:
    modules = write_tree(
        tmp_path,
        {
            "data/__init__.py": "",
            "data/a.py": "from data import b",
            "data/b.py": "def f():\n    from .c import g",
            "data/c.py": "import data.a",
            "data/d.py": "import data.a",
        },
    )
    assert sorted(set(cycle(modules))) == ["data.a", "data.b", "data.c"]
