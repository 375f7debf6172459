"""Every message that proposes something has a test that does it: a new one must be entered here with its own."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

pytestmark = pytest.mark.fast

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = "base checkpoint configs data inference launch memory models moe optim parallel simulator training".split()

# How many texts of a file propose something ("Try ..."), and the files of tests that take it.
TRIED: dict[str, tuple[int, str]] = {
    "checkpoint/start.py": (2, "training/test_another_model training/test_start"),
    "configs/validate.py": (2, "configs/test_validate configs/test_wrong_values test_wrong_configs configs/test_idle"),
    "configs/compose.py": (5, "test_wrong_configs configs/test_compose"),
    "configs/overrides.py": (10, "test_wrong_configs configs/test_context configs/test_compose"),
    "base/ranks.py": (5, "configs/test_ranks"),  # a launcher
    "configs/values.py": (1, "configs/test_wrong_values"),
    "data/loader.py": (2, "data/test_split"),
    "data/corpus/text_fields.py": (1, "data/test_wrong_text"),
    "data/tokenizer/train.py": (1, "data/test_tokenizer"),
    "inference/decoder/decode.py": (1, "inference/test_evaluate"),
    "inference/decoder/encode.py": (1, "inference/test_damage"),
    "inference/evaluate.py": (4, "inference/test_evaluate"),
    "inference/generation.py": (1, "inference/test_generate"),
    "inference/lm_harness.py": (1, "inference/test_evaluate"),
    "inference/open_model.py": (1, "inference/test_generate"),
    "inference/generate.py": (1, "inference/test_recording"),
    "inference/weights/budget.py": (1, "inference/test_damage"),
    "launch/submit.py": (4, "launch/test_submit"),
    "memory/budgets.py": (2, "memory/test_budgets simulator/offload/test_state"),
    "memory/disk.py": (3, "memory/test_disk"),
    "models/convert.py": (1, "models/test_huggingface"),
    "models/folder.py": (1, "models/test_huggingface"),
    "models/specs.py": (2, "models/test_build"),
    "moe/alltoall/hierarchical.py": (2, "moe/test_layer training/test_preflight moe/test_hierarchical"),
    "moe/planning/planner.py": (4, "moe/test_planner"),
    "parallel/card.py": (1, "test_wrong_configs"),
    "parallel/topology.py": (2, "parallel/test_topology"),
    "simulator/clock/hardware.py": (2, "simulator/test_hardware_files"),
    "simulator/search/impossible.py": (3, "simulator/search/test_impossible"),
    "simulator/run_plan.py": (2, "simulator/test_plan simulator/offload/test_state"),
    "training/callbacks/logging/external_loggers.py": (1, "training/test_another_model"),
    "training/callbacks/loss_scale.py": (1, "training/test_health"),
    "training/resilience/recovery.py": (3, "training/test_health"),
    "training/starting/offload.py": (1, "training/test_activation_offload"),
    "training/starting/limits.py": (2, "training/test_limits"),
    "training/starting/machine.py": (3, "training/test_layout_choice"),
    "training/starting/preflight.py": (5, "training/test_preflight training/test_another_model"),
}


def proposals(path: Path) -> int:
    """Texts of a file that propose something, docstrings aside."""
    tree = ast.parse(path.read_text())
    documented = (ast.FunctionDef, ast.ClassDef, ast.Module)
    documents = {ast.get_docstring(node, clean=False) for node in ast.walk(tree) if isinstance(node, documented)}
    texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return sum("Try " in text and text not in documents for text in texts)


def test_every_message_that_proposes_something_is_entered() -> None:
    files = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    found = {str(path.relative_to(ROOT)): number for path in files if (number := proposals(path))}
    assert found == {path: number for path, (number, _) in TRIED.items()}
    for _, tests in TRIED.values():
        for name in tests.split():
            assert (ROOT / "tests" / f"{name}.py").is_file(), name
