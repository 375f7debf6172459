"""Rules for the packages, read from the source: who may import whom, and that no two files import each other. Also
limits that keep them readable: sizes, numbers of arguments, unique names of classes, first words of docstrings.

Imports inside functions count as much as those at the top.
"""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

pytestmark = pytest.mark.fast

ROOT = Path(__file__).resolve().parent.parent

# The table of the design. A package may also import what the packages that it may import may import: so every package
# may import base, and every one but base may import configs.
TABLE: dict[str, set[str]] = {
    "train": {"training"},
    "base": set(),
    "configs": {"base"},
    "training": {"inference", "checkpoint", "simulator", "models", "optim", "data", "moe", "parallel", "memory"},
    "inference": {"checkpoint", "models", "moe", "data", "parallel"},
    "checkpoint": {"models", "optim", "moe", "data", "parallel", "memory"},
    "simulator": {"models", "optim", "moe", "parallel", "memory"},
    "models": {"moe", "parallel", "memory"},
    "optim": {"parallel", "memory"},
    "data": {"parallel"},
    "moe": {"parallel", "memory"},
    "parallel": {"memory", "configs"},
    "memory": {"configs"},
    "launch": {"configs"},
}
FREE = {"benchmarks", "tests"}  # may import everything, and no other package may import them
MOST_LINES = 700  # of a file, which is about one topic
MOST_FUNCTION_LINES = 60  # of a function
MOST_ARGUMENTS = 9  # of a function, without self
# Functions with more, and why.
MANY_ARGUMENTS = {
    "moe/kernels/ops.py:_forward_blocks": "torch's custom operation, whose schema is the C function's signature",
    "moe/kernels/ops.py:_backward_blocks": "torch's custom operation, whose schema is the C function's signature",
    "models/attention/layers.py:ScaledDotProductAttention.__init__": "Megatron-core builds it with its arguments",
}

# Functions with more than MOST_FUNCTION_LINES lines, and why.
LONG_FUNCTIONS: dict[str, str] = {}

# Words that begin no docstring: what follows is a fragment of a sentence that the function's name would begin.
FRAGMENTS = ("Of", "As", "Those", "These", "What", "Where")

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def may_import(package: str) -> set[str]:
    allowed, found = {package}, set(TABLE[package])
    while found - allowed:
        allowed |= found
        found = set().union(*(TABLE[other] for other in allowed))
    return allowed


def module_name(path: Path, root: Path = ROOT) -> str:
    names = path.relative_to(root).with_suffix("").parts
    return ".".join(names[:-1] if names[-1] == "__init__" else names)


def own_modules(root: Path = ROOT) -> dict[str, Path]:
    """Every module of the project by its dotted name."""
    paths = [path for package in (*TABLE, *FREE) for path in (root / package).rglob("*.py")]
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
        package = name.split(".")[0]
        if package in FREE:
            continue
        for target, line in imports(name, path, modules).items():
            if target.split(".")[0] not in may_import(package):
                wrong.append(
                    f"{path.relative_to(root)}:{line} imports {target}, but {package} may import only "
                    f"{sorted(may_import(package))}"
                )
    return wrong


def cycle(modules: dict[str, Path]) -> list[str]:
    """One circle of modules that import each other, first and last the same, or nothing."""
    graph = {
        name: [target for target in imports(name, path, modules) if target in modules] for name, path in modules.items()
    }
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


def test_packages_import_only_what_the_table_allows() -> None:
    modules = own_modules()
    assert {name.split(".")[0] for name in modules} == {*TABLE, *FREE}
    wrong = forbidden(modules)
    assert not wrong, "\n".join(wrong)


def test_the_simulator_knows_of_the_optimizer_where_its_state_lies_alone() -> None:
    """optim/arrangement/ needs no torch: a plan arranges state by the functions by which a run does."""
    modules = own_modules()
    found = {
        target
        for name, path in modules.items()
        if name.split(".")[0] == "simulator" or name.startswith("optim.arrangement")
        for target in imports(name, path, modules)
        if target.split(".")[0] == "optim"
    }
    assert found and all(target.startswith("optim.arrangement.") for target in found), found


def test_no_two_files_import_each_other() -> None:
    assert cycle(own_modules()) == []


def test_entry_point_is_short() -> None:
    assert len((ROOT / "train.py").read_text(encoding="utf-8").splitlines()) < 80


def long_files(root: Path = ROOT) -> list[str]:
    """Source files of the product that are longer than MOST_LINES."""
    paths = [
        path
        for package in sorted(TABLE)
        for path in (root / package).rglob("*")
        if path.suffix in (".py", ".cpp", ".h")
    ]
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in paths}
    return [f"{path.relative_to(root)} has {length} lines" for path, length in lengths.items() if length > MOST_LINES]


def test_no_file_is_too_long(tmp_path: Path) -> None:
    assert not long_files()
    for name, length in (("moe/a.py", 701), ("moe/deep/b.h", 701), ("moe/c.py", 700), ("tests/d.py", 701)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("\n" * length)
    assert sorted(long_files(tmp_path)) == ["moe/a.py has 701 lines", "moe/deep/b.h has 701 lines"]


@functools.cache
def definitions(root: Path = ROOT) -> list[tuple[str, Definition]]:
    """Every class and function of the product, with the file that it stands in."""
    paths = sorted(path for package in TABLE for path in (root / package).rglob("*.py"))
    return [
        (path.relative_to(root).as_posix(), node)
        for path in paths
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path)))
        if isinstance(node, Definition)
    ]


def shared_names(root: Path = ROOT) -> dict[str, list[str]]:
    """Names that more than one class of the product has, with the classes' files."""
    files: dict[str, list[str]] = {}
    for file, node in definitions(root):
        if isinstance(node, ast.ClassDef):
            files.setdefault(node.name, []).append(file)
    return {name: found for name, found in files.items() if len(found) > 1}


def test_no_two_classes_share_a_name(tmp_path: Path) -> None:
    assert not shared_names()
    write_tree(
        tmp_path,
        {
            "moe/a.py": "class A: ...\nclass _B: ...",
            "data/deep/b.py": "def f():\n    class _B: ...",
            "tests/c.py": "class A: ...",
        },
    )
    assert shared_names(tmp_path) == {"_B": ["data/deep/b.py", "moe/a.py"]}


def many_arguments(root: Path = ROOT) -> dict[str, int]:
    """Functions of the product with more than MOST_ARGUMENTS arguments: how many each has."""
    found: dict[str, int] = {}
    owners = {
        inner: f"{node.name}." for _, node in definitions(root) if isinstance(node, ast.ClassDef) for inner in node.body
    }
    for file, node in definitions(root):
        if isinstance(node, ast.ClassDef):
            continue
        given = node.args
        names = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
        count = len(names) + (given.vararg is not None) - (names[:1] in (["self"], ["cls"]))
        if count > MOST_ARGUMENTS:
            found[f"{file}:{owners.get(node, '')}{node.name}"] = count
    return found


def test_no_function_has_too_many_arguments(tmp_path: Path) -> None:
    assert many_arguments().keys() == MANY_ARGUMENTS.keys()
    eight = "a, b, c, d, e, f, g, h"
    write_tree(
        tmp_path,
        {
            "moe/a.py": f"def few({eight}, *, i): ...\ndef many({eight}, *i, j): ...",
            "data/b.py": f"class A:\n def few(self, {eight}, i): ...\n async def many(self, {eight}, i, j=0): ...",
        },
    )
    assert many_arguments(tmp_path) == {"moe/a.py:many": 10, "data/b.py:A.many": 10}


def long_functions(root: Path = ROOT) -> dict[str, int]:
    """Functions of the product over MOST_FUNCTION_LINES lines, with their number of lines."""
    return {
        f"{file}:{node.name}": lines
        for file, node in definitions(root)
        if not isinstance(node, ast.ClassDef)
        and (lines := (node.end_lineno or 0) - node.lineno + 1) > MOST_FUNCTION_LINES
    }


def test_no_function_is_too_long(tmp_path: Path) -> None:
    assert long_functions().keys() == LONG_FUNCTIONS.keys()
    write_tree(tmp_path, {"moe/a.py": "def f():\n" + " x = 0\n" * 59 + "def g():\n" + " x = 0\n" * 60})
    assert long_functions(tmp_path) == {"moe/a.py:g": 61}


def fragments(root: Path = ROOT) -> list[str]:
    """Classes and functions of the product whose docstring begins with one of FRAGMENTS."""
    return [
        f"{file}:{node.lineno} {node.name}"
        for file, node in definitions(root)
        if (ast.get_docstring(node) or "").startswith(tuple(f"{word} " for word in FRAGMENTS))
    ]


def test_docstrings_are_sentences(tmp_path: Path) -> None:
    assert not fragments()
    write_tree(
        tmp_path,
        {
            "moe/a.py": 'class A:\n    """Of one layer."""\n    def f():\n        """Off the device."""',
            "data/b.py": 'async def g():\n    """\n    Those of a chunk."""\ndef h(): ...',
        },
    )
    assert fragments(tmp_path) == ["data/b.py:1 g", "moe/a.py:1 A"]


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
        ("base/a.py", "from configs import schema", "configs.schema"),
        ("models/a.py", "if True:\n    from tests import tolerances", "tests"),
        ("training/a.py", "import benchmarks.kit.cluster as c", "benchmarks.kit.cluster"),
    ],
)
def test_forbidden_imports_are_found(tmp_path: Path, file: str, text: str, target: str) -> None:
    modules = write_tree(
        tmp_path,
        {
            file: text,
            "moe/layer.py": "",
            "configs/schema.py": "",
            "training/loop.py": "import moe.layer\nfrom configs import schema",
        },
    )
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


def _unseen_functions(modules: dict[str, Path]) -> dict[tuple[str, str], ast.arguments]:
    """Functions with a decorator of torch, whose type mypy takes for Any: (module, name) to their parameters."""
    found = {}
    for name, path in modules.items():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and any("torch." in ast.unparse(by) for by in node.decorator_list):
                found[name, node.name] = node.args
    return found


def _fits(call: ast.Call, parameters: ast.arguments) -> bool:
    """Return whether a call's arguments can be bound to a function's parameters."""
    if any(isinstance(each, ast.Starred) for each in call.args) or any(each.arg is None for each in call.keywords):
        return True  # not known from the source
    positional = [each.arg for each in parameters.posonlyargs + parameters.args]
    by_name = {each.arg: default is None for each, default in zip(parameters.kwonlyargs, parameters.kw_defaults)}
    needed = positional[: len(positional) - len(parameters.defaults)] + [name for name, need in by_name.items() if need]
    given = [*positional[: len(call.args)], *(each.arg for each in call.keywords)]
    few_enough = len(call.args) <= len(positional) and len(set(given)) == len(given)
    return few_enough and set(given) <= {*positional, *by_name} and set(needed) <= set(given)


def test_calls_fit_functions_whose_types_mypy_does_not_see() -> None:
    modules = own_modules()
    unseen = _unseen_functions(modules)
    assert len(unseen) > 5
    wrong = []
    for name, path in modules.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        known = {own: parameters for (module, own), parameters in unseen.items() if module == name}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                known |= {
                    alias.asname or alias.name: unseen[node.module or "", alias.name]
                    for alias in node.names
                    if (node.module, alias.name) in unseen
                }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in known:
                if not _fits(node, known[node.func.id]):
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno} {ast.unparse(node)[:80]}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("call", "fits"),
    [("f(1, b=2)", True), ("f(1)", False), ("f(1, 2, 3)", False), ("f(1, 2, c=3)", True), ("f(1, 2, d=3)", False)],
)
def test_a_call_that_does_not_fit_is_found(call: str, fits: bool) -> None:
    function = ast.parse("def f(a, b, *, c=0): ...").body[0]
    made = ast.parse(call, mode="eval").body
    assert isinstance(function, ast.FunctionDef) and isinstance(made, ast.Call)
    assert _fits(made, function.args) is fits
