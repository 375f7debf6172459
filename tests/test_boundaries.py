"""What only one package may touch, read from the source: ranks and process groups, the launcher's variables,
Megatron-core's insides.

Each rule is shown to find what it forbids in made-up files. Benchmarks and tests are free.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_packages import FREE, ROOT, own_modules, write_tree

pytestmark = pytest.mark.fast

TOPOLOGY, LAUNCH, MEGATRON = "parallel/topology.py", "base/ranks.py", "parallel/megatron/"

# Ways to Megatron-core's global process groups.
GLOBAL_GROUPS = {"parallel_state", "mpu", "use_mpu_process_groups", "get_default_pg_collection"}
# What a launcher says of a process's place.
VARIABLES = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"}
# Private by meaning, not by name: what Megatron-core 0.16.1 neither documents nor means for others, and what it would
# not have replaced.
INSIDES = {
    "router_replay",
    "model_param_group_index_map",
    "main_param",
    "grad_accs",
    "remove_forward_pre_hook_handles",
}
REPLACED = {
    "routing",
    "gating",
    "get_grad_norm",
    "prepare_grads",
    "step_with_ready_grads",
    "grad_scaler",
}
# Private names of others than Megatron-core. Each is the only way to what it does.
OF_OTHERS = {
    "_current_frames": "sys",
    "_exit": "os",
    "_internal": "hydra",
    "_value": "omegaconf",
    "_dynamo": "torch",
    "_grouped_mm": "torch",
    "_scaled_dot_product_flash_attention_for_cpu": "torch",
    "_scaled_dot_product_flash_attention_for_cpu_backward": "torch",
    "_scaled_dot_product_efficient_attention": "torch",
    "_scaled_dot_product_efficient_attention_backward": "torch",
    "_flash_attention_forward": "torch",
    "_flash_attention_backward": "torch",
    "_C": "torch",
    "_set_sm_carveout_experimental": "torch",
    "_foreach_norm": "torch",
    "_foreach_copy_": "torch",
    "_foreach_mul_": "torch",
    "_fused_adamw_": "torch",
    "_amp_foreach_non_finite_check_and_unscale_": "torch",
    "_get_default_store": "torch",
    "_monitor_workers": "torch",
}


def findings(path: Path, root: Path = ROOT) -> list[str]:
    """Return one line for each use in a file of what only another package may use."""
    file, tree = path.relative_to(root).as_posix(), ast.parse(path.read_text(encoding="utf-8"), str(path))
    found: list[tuple[int, str]] = []
    if file != TOPOLOGY and not file.startswith(MEGATRON):
        found += _uses(tree, GLOBAL_GROUPS, "takes process groups from Megatron-core: ask the Topology")
    if file != LAUNCH:
        found += _strings(tree, VARIABLES, "reads the launcher's variable: ask base/ranks.py")
    if not file.startswith(MEGATRON):
        found += _uses(tree, INSIDES, "reaches into Megatron-core: do it in parallel/megatron")
        found += _private(tree)
        found += _replaced(tree)
    return [f"{file}:{line} {text}" for line, text in sorted(set(found))]


def _uses(tree: ast.AST, names: set[str], why: str) -> Iterator[tuple[int, str]]:
    """Names as identifiers, attributes, imports, definitions, or strings (of getattr, setattr and the like)."""
    for node in ast.walk(tree):
        used: list[str] = []
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            used = [name for alias in node.names for name in alias.name.split(".")]
            used += (node.module or "").split(".") if isinstance(node, ast.ImportFrom) else []
        elif isinstance(node, ast.Attribute):
            used = [node.attr]
        elif isinstance(node, ast.Name):
            used = [node.id]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            used = [node.value]
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            used = [node.name]
        yield from ((getattr(node, "lineno", 0), f"{name} {why}") for name in used if name in names)


def _strings(tree: ast.AST, names: set[str], why: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in names:
            yield node.lineno, f"{node.value} {why}"


def _private(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Underscore names of Megatron-core: imported, called on what is not this file's own, or defined over in a
    subclass."""
    why = "is private: touch it in parallel/megatron, or name it in OF_OTHERS"
    own = _own_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            module = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                dotted = f"{module}.{alias.name}"
                if "megatron" in dotted and any(_is_private(name) for name in dotted.split(".")):
                    yield node.lineno, f"{dotted.strip('.')} {why}"
        elif isinstance(node, ast.Attribute) and _is_private(node.attr) and node.attr not in OF_OTHERS:
            on_itself = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if not on_itself and node.attr not in own:
                yield node.lineno, f"{node.attr} {why}"
        elif isinstance(node, ast.Call):
            name = _by_name(node)[1]
            if _is_private(name) and name not in own:
                yield node.lineno, f"{name} {why}"
        elif isinstance(node, ast.ClassDef) and _from_megatron(tree) & {_root(base) for base in node.bases}:
            # A subclass has its own private names too: only those that Megatron-core has as well are its insides.
            yield from (
                (line, f"{name} {why}") for line, name in _defined(node) if name in _private_names_of_megatron()
            )


def _replaced(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Assignments that put something else in the place of Megatron-core's own."""
    why = "is replaced: do it in parallel/megatron"
    imported = _from_megatron(tree)
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, (ast.Assign, ast.Delete)):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign):
            targets = [node.target]
        for target in targets:
            if isinstance(target, ast.Attribute):
                foreign = target.attr in REPLACED and _root(target) != "self"
                if foreign or _root(target) in imported:
                    yield target.lineno, f"{target.attr} {why}"
        owner, name = _by_name(node, "setattr", "delattr")
        if owner is not None and _root(owner) in imported:
            yield owner.lineno, f"{name} {why}"


def _by_name(node: ast.AST, *functions: str) -> tuple[ast.expr | None, str]:
    """Return owner and name of a call such as getattr(owner, "name"); (None, "") for anything else."""
    functions = functions or ("getattr", "setattr", "delattr", "hasattr")
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in functions:
        owner, name = node.args[0], node.args[1] if len(node.args) > 1 else None
        return owner, name.value if isinstance(name, ast.Constant) and isinstance(name.value, str) else ""
    return None, ""


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def _root(node: ast.AST) -> str:
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def _from_megatron(tree: ast.AST) -> set[str]:
    """Names that a file binds by importing from Megatron-core."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and "megatron" in (node.module or "").split("."):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {
                alias.asname or alias.name.split(".")[0] for alias in node.names if alias.name.startswith("megatron")
            }
    return names


@functools.cache
def _private_names_of_megatron() -> frozenset[str]:
    """Every private method and attribute of Megatron-core's classes."""
    spec = importlib.util.find_spec("megatron")
    assert spec is not None and spec.submodule_search_locations is not None
    paths = (Path(spec.submodule_search_locations[0]) / "core").rglob("*.py")
    pattern = re.compile(r"(?:\bdef |\bself\.)(_[a-z]\w*)")
    return frozenset(
        name for path in paths for name in pattern.findall(path.read_text(encoding="utf-8", errors="ignore"))
    )


def _defined(owner: ast.ClassDef) -> Iterator[tuple[int, str]]:
    """Private methods and attributes of a class, also those that are set on self."""
    for node in ast.walk(owner):
        if isinstance(node, ast.FunctionDef) and _is_private(node.name):
            yield node.lineno, node.name
        elif isinstance(node, ast.Attribute) and _root(node) == "self" and _is_private(node.attr):
            yield node.lineno, node.attr
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (
                (node.lineno, target.id)
                for target in targets
                if isinstance(target, ast.Name) and _is_private(target.id)
            )


def _own_names(tree: ast.AST) -> set[str]:
    """Private names that a file's own classes have."""
    return {name for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for _, name in _defined(node)}


def test_packages_keep_to_themselves() -> None:
    paths = [path for name, path in own_modules().items() if name.split(".")[0] not in FREE]
    assert len(paths) > 150
    wrong = [line for path in paths for line in findings(path)]
    assert not wrong, "\n".join(wrong)


def test_every_exception_is_used() -> None:
    texts = [path.read_text(encoding="utf-8") for name, path in own_modules().items() if name.split(".")[0] not in FREE]
    assert [name for name in OF_OTHERS if not any(name in text for text in texts)] == []
    insides = "".join(path.read_text(encoding="utf-8") for path in (ROOT / MEGATRON).glob("*.py"))
    assert [name for name in INSIDES if name not in insides] == []


BASE = "from megatron.core.transformer.moe.router import TopKRouter\n"
OWN_BASE = "from parallel.megatron.router import TopKRouter\n"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("from megatron.core import parallel_state", "parallel_state"),
        ("from megatron.core import parallel_state as ps", "parallel_state"),
        ("from megatron.core.parallel_state import get_data_parallel_rank", "parallel_state"),
        ("import megatron.core\nmegatron.core.parallel_state.is_initialized()", "parallel_state"),
        ("def f():\n    from megatron.core import mpu", "mpu"),
        ("groups = ProcessGroupCollection.use_mpu_process_groups()", "use_mpu_process_groups"),
        ("from megatron.core.transformer.moe.moe_utils import get_default_pg_collection", "get_default_pg_collection"),
        ("import os\nrank = int(os.environ['RANK'])", "RANK"),
        ("import os\nrank = os.environ.get('LOCAL_RANK', '0')", "LOCAL_RANK"),
        ("import os\nos.environ['WORLD_SIZE'] = '2'", "WORLD_SIZE"),
        ("from os import getenv\nsize = getenv('LOCAL_WORLD_SIZE')", "LOCAL_WORLD_SIZE"),
        ("from megatron.core.tensor_parallel.mappings import _gather_along_first_dim", "_gather_along_first_dim"),
        ("from megatron.core.tensor_parallel.random import _CUDA_RNG as r", "_CUDA_RNG"),
        ("def f(scaler):\n    return scaler._scale", "_scale"),
        ("def f(chunk):\n    chunk._modules.clear()", "_modules"),
        ("def f(member):\n    return getattr(member, '_get_model_param_range_map')", "_get_model_param_range_map"),
        ("def f(chunk):\n    chunk.grad_accs.clear()", "grad_accs"),
        ("def f(parameter):\n    return getattr(parameter, 'main_param', None)", "main_param"),
        ("class R(T):\n    def __init__(self):\n        self.router_replay = 1", "router_replay"),
        (BASE + "class R(TopKRouter):\n    _apply_expert_bias = None", "_apply_expert_bias"),
        (BASE + "class R(TopKRouter):\n    def _apply_aux_loss(self): ...", "_apply_aux_loss"),
        (
            BASE + "class R(TopKRouter):\n    def f(self):\n        self._maintain_float32_expert_bias()",
            "_maintain_float32_expert_bias",
        ),
        (
            "from parallel.megatron.router import TopKRouter\nclass R(TopKRouter):\n    def _apply_seq_aux_loss(self): "
            "...",
            "_apply_seq_aux_loss",
        ),
        ("def f(module):\n    module.routing = None", "routing"),
        ("def f(optimizer):\n    optimizer.get_grad_norm = None", "get_grad_norm"),
        ("from megatron.core.pipeline_parallel import schedules\nschedules.forward_step = None", "forward_step"),
        (
            "from megatron.core.pipeline_parallel import schedules\nsetattr(schedules, 'forward_step', None)",
            "forward_step",
        ),
        (BASE + "TopKRouter.forward = None", "forward"),
    ],
)
def test_what_is_forbidden_is_found(tmp_path: Path, text: str, name: str) -> None:
    write_tree(tmp_path, {"training/deep/a.py": text})
    (message,) = findings(tmp_path / "training/deep/a.py", tmp_path)
    assert message.startswith("training/deep/a.py:") and f" {name} " in f" {message.replace('.', ' ')} "


@pytest.mark.parametrize(
    ("file", "text"),
    [
        (TOPOLOGY, "from megatron.core import parallel_state"),
        (LAUNCH, "import os\nrank = os.environ['RANK']"),
        (MEGATRON + "a.py", "def f(scaler):\n    scaler._scale = scaler.grad_accs"),
        ("moe/a.py", BASE + "class R(TopKRouter):\n    def _of_ours(self):\n        self._passed = None"),
        ("moe/a.py", "class A:\n    def __init__(self, other):\n        self._x = other._x"),
        ("moe/a.py", "import os\nos._exit(1)\nos.environ['GROUP_RANK']"),
        ("moe/a.py", "text = 'RANK of this process'"),
    ],
)
def test_what_is_allowed_is_not(tmp_path: Path, file: str, text: str) -> None:
    write_tree(tmp_path, {file: text})
    assert findings(tmp_path / file, tmp_path) == []
