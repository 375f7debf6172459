"""The keys of a config.json that transformers' code reads, by family: `python -m benchmarks.kit.transformers_reads`
writes transformers_reads.yaml anew from the sources of the installed transformers, and prints how many keys each has.

The sources are parsed, not run. Taken is what a model's own files read, and what the files read that those import, and
the files that these import. A key counts as read where `config.KEY` stands, `getattr(config, "KEY")` or
`config["KEY"]`, where a class of configs has it as a field, a property or a method, and where it stands as a text in
files that may take it for a name. That counts too many rather than too few.
"""

from __future__ import annotations

import argparse
import ast
import importlib.metadata
import importlib.util
import re
import sys
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import yaml

from base import command
from base.errors import ConfigError
from models.huggingface.translate import FAMILIES
from models.huggingface.unknown_keys import TABLE

# In names of configs that are not a model's.
OTHER_CONFIGS = (
    *("adapter", "cache", "compile", "deepspeed", "distributed", "fusion", "generation", "kernel", "peft", "plugin"),
    *("processor", "quant", "tokenizer", "trainer", "watermark"),
)
# Files that a model alone does not need: for quantised weights, other frameworks, generation.
LEFT_OUT = re.compile(
    r"integrations/(?!.*(attention|paged|moe|heterogeneity|kernels)).*|quantizers/.*|modeling_gguf.*|tokenization.*|"
    r"processing.*|utils/(auto_docstring|import_utils|quantization_config)\.py"
)
STEPS = 2  # of imports from a model's own files
ATTRIBUTE_CALLS = ("getattr", "hasattr", "setattr", "delattr")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kit.transformers_reads", description=__doc__.partition("\n\n")[0]
    )
    parser.parse_args(arguments)

    def write() -> None:
        keys = all_reads()
        TABLE.write_text(text_of(keys))
        for name, found in keys.items():
            print(f"{name}: {len(found)} keys")

    return command.run(write)


def all_reads() -> dict[str, set[str]]:
    """Return the keys that each supported family's code reads; `every_family` has those that all read."""
    root = _root()
    each = {name: set().union(*_reads_of(root, FAMILIES[name].runs_as)) for name in sorted(FAMILIES)}
    common = set.intersection(*each.values())
    return {"every_family": common, **{name: found - common for name, found in each.items()}}


def text_of(keys: dict[str, set[str]]) -> str:
    """Return the content of the table's file."""
    version = importlib.metadata.version("transformers")
    lines = ["# Made by `python -m benchmarks.kit.transformers_reads` from the code of this version.", ""]
    lines.append(yaml.safe_dump({"transformers": version}))
    for name, found in keys.items():
        words = textwrap.fill(" ".join(sorted(found)), 118, initial_indent="  ", subsequent_indent="  ")
        lines.append(f"{name}: >-\n{words}\n")
    return "\n".join(lines).rstrip() + "\n"


def _root() -> Path:
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        raise ConfigError("transformers must be installed: its code is what is read.")
    return Path(spec.origin).parent


def _reads_of(root: Path, model: str) -> Iterator[set[str]]:
    """Return the keys that a family's own files read, and the names that they import."""
    folder = root / "models" / model
    own = [folder / f"{kind}_{model}.py" for kind in ("configuration", "modeling")]
    reached, new = dict.fromkeys(own), list(own)
    for _ in range(STEPS):
        new = [path for file in new for path in _imports(root, file).values() if path not in reached]
        reached |= dict.fromkeys(path for path in new if path.parent == folder or folder.parent not in path.parents)
    for file in reached:
        if LEFT_OUT.fullmatch(file.relative_to(root).as_posix()) is None:
            yield _file_reads(file)
    for file in own:
        yield _texts(_tree(file))
    for node in _tree(own[0]).body:
        if isinstance(node, ast.ClassDef) and node.name.endswith("Config"):
            yield from _class_reads(root, own[0], node)


@cache
def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


@cache
def _nodes(file: Path) -> list[ast.AST]:
    return list(ast.walk(_tree(file)))


@cache
def _imports(root: Path, file: Path) -> dict[str, Path]:
    """Return the file of each name imported from transformers, as far as the import shows it."""
    found = {}
    for node in _nodes(file):
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        package = file.parents[node.level - 1].joinpath(*(node.module or "").split("."))
        for name in node.names:
            for path in (package.with_suffix(".py"), package / f"{name.name}.py", package / "__init__.py"):
                if path.is_file() and path != root / "__init__.py":
                    found[name.asname or name.name] = path
                    break
    return found


def _class_reads(root: Path, file: Path, node: ast.ClassDef) -> Iterator[set[str]]:
    """Yield the keys that a config class defines and reads, then those of its bases."""
    found = _texts(node)
    for child in ast.walk(node):
        if isinstance(child, ast.Attribute) and isinstance(child.value, ast.Name) and child.value.id in ("self", "cls"):
            found.add(child.attr)
    for child in node.body:
        if isinstance(child, ast.FunctionDef):
            found.add(child.name)
        elif isinstance(child, ast.Assign | ast.AnnAssign):
            targets = child.targets if isinstance(child, ast.Assign) else [child.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    yield found
    for base in node.bases:
        if not isinstance(base, ast.Name):
            continue
        there = _imports(root, file).get(base.id, file)
        there = _imports(root, there).get(base.id, there)  # a package's __init__ hands it on
        for other in _tree(there).body:
            if isinstance(other, ast.ClassDef) and other.name == base.id and other is not node:
                yield from _class_reads(root, there, other)


@cache
def _file_reads(file: Path) -> set[str]:
    """Return the keys that are read of expressions that are called a config."""
    found, any_name = set[str](), any(map(_asks_for_any, _nodes(file)))
    for node in _nodes(file):
        if isinstance(node, ast.Attribute) and _is_config(node.value):
            found.add(node.attr)
        elif isinstance(node, ast.Subscript) and _is_config(node.value):
            found |= _texts(node.slice)
        elif isinstance(node, ast.Compare) and _is_config(node.comparators[-1]):
            found |= _texts(node.left)  # "KEY" in config
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ATTRIBUTE_CALLS:
            if len(node.args) > 1 and _is_config(node.args[0]):
                found |= _texts(node.args[1])
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _is_config(node.func.value):
            if node.func.attr in ("get", "pop", "setdefault") and node.args:
                found |= _texts(node.args[0])
        elif any_name and isinstance(node, ast.FunctionDef) and any(map(_asks_for_any, ast.walk(node))):
            found |= _texts(node)
    return found


def _asks_for_any(node: ast.AST) -> bool:
    """Whether a key is read whose name stands elsewhere: `getattr(config, name)`."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ATTRIBUTE_CALLS
        and len(node.args) > 1
        and _is_config(node.args[0])
        and not isinstance(node.args[1], ast.Constant)
    )


def _is_config(node: ast.AST) -> bool:
    """Whether an expression is called a model's config: `config`, `self.config.get_text_config()`, `config_dict`."""
    while isinstance(node, ast.Call):
        node = node.func
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return "config" in name.lower() and not any(word in name.lower() for word in OTHER_CONFIGS)


def _texts(tree: ast.AST) -> set[str]:
    """Return the strings that may be names of keys, without docstrings."""
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and id(node) not in docs
        if isinstance(node.value, str) and node.value.isidentifier()
    }


if __name__ == "__main__":
    sys.exit(main())
