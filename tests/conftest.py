"""Fixtures and skips that all tests share."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Iterator

import pytest

from tests import distributed
from tests.waits import LONG

# Files whose tests start no rank and no training, marked `fast`.
FAST = {
    *("test_docs", "test_readme", "test_readme_table", "test_waits", "test_rooms", "test_walkthrough", "test_summary"),
    *("test_rounds",),
    *("test_files", "test_keys", "test_last_words", "test_ranks", "test_validate", "test_weights"),
    *("test_idle", "test_advice_sites", "test_preflight"),
    *("test_corpus", "test_documents_in_text", "test_ends", "test_identity", "data/test_kinds", "test_loader"),
    *("data/test_samples", "test_overlap", "test_split", "test_texts", "test_validation"),
    *("test_load", "test_planner", "test_program", "test_route", "test_solve", "test_trial", "moe/test_trace"),
    *("memory/test_disk", "memory/test_store", "test_budgets", "test_planning", "test_buckets"),
    *("test_costs", "test_events", "optim/test_schedule", "test_start", "test_submit"),
    *("test_boundaries", "test_presets", "test_wrong_text", "test_layer_inputs", "test_fused", "test_background"),
    *("test_fusions", "test_initial_weights", "test_pointwise", "test_rotary"),
    *("test_special_tokens", "models/test_weights", "test_quantized", "test_weight_files", "test_what_folders_say"),
    *("test_placement_plans", "test_placement_replay", "test_planner_oracle", "test_planner_pick", "test_planners"),
    *("test_workloads", "test_memory_reuse", "test_plans", "test_measured_costs"),
}

# Further files whose tests keep about one core busy. With the fast ones they are marked `beside`.
BESIDE = FAST | {
    *("cuda/test_fake", "cuda/test_trainings", "cuda/test_pretended_gpu", "launch/test_gpu_check"),
    *("parallel/test_megatron_patches", "models/test_build"),
    *("test_huggingface", "test_huggingface_damage", "test_huggingface_keys", "test_unknown_keys"),
    *("test_tokenizer_formats",),
    *("simulator/test_plan", "simulator/test_tiers"),
}


@pytest.fixture(scope="session", autouse=True)
def _children_take_an_interrupt() -> None:
    """A shell starts what it runs in the background with SIGINT ignored, and programs that tests start would inherit
    that."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _workers_end_with_the_session() -> Iterator[None]:
    yield
    distributed.shutdown()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the fast tests; skip what this machine cannot run. Each mark is probed only if a collected test has it."""
    for item in items:
        names = {item.path.stem, f"{item.path.parent.name}/{item.path.stem}"}
        for mark, files in (("fast", FAST), ("beside", BESIDE)):
            if names & files:
                item.add_marker(mark)
    probes = {"gpu": _has_gpu, "slurm": _has_slurm, "netns": _has_network_namespaces, "cuda_pretended": _can_pretend}
    for mark, probe in probes.items():
        marked = [item for item in items if item.get_closest_marker(mark)]
        if marked and not probe():
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=f"this machine lacks what the mark '{mark}' needs"))


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _has_slurm() -> bool:
    return shutil.which("sbatch") is not None


def _can_pretend() -> bool:
    import torch

    # a torch with CUDA would look for a real device
    return torch.version.cuda is None and any(shutil.which(name) for name in ("c++", "g++", "clang++"))


def _has_network_namespaces() -> bool:
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        return False
    return subprocess.run(["unshare", "--net", "true"], capture_output=True, timeout=LONG).returncode == 0
