"""Fixtures and skips that all tests share."""

from __future__ import annotations

import gc
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import distributed, durations, lanes, marks
from tests.waits import LONG


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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--durations-file", type=Path, help="write what each test takes and starts into this file")
    parser.addoption("--lane", type=Path, help="run the files that no other pytest with this folder has claimed")


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # until all is collected
    config.pluginmanager.register(marks.Guard())
    path = config.getoption("--durations-file")
    if path is not None:
        config.pluginmanager.register(durations.Recorder(path))
    folder = config.getoption("--lane")
    if folder is not None:
        config.pluginmanager.register(lanes.Lane(folder))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this machine cannot run. Each mark is probed only if a collected test has it."""
    probes = {"gpu": _has_gpu, "slurm": _has_slurm, "netns": _has_network_namespaces, "cuda_pretended": _can_pretend}
    for mark, probe in probes.items():
        marked = [item for item in items if item.get_closest_marker(mark)]
        if marked and not probe():
            for item in marked:
                item.add_marker(pytest.mark.skip(reason=f"this machine lacks what the mark '{mark}' needs"))


def pytest_collection_finish() -> None:
    gc.freeze()  # all modules and tests live to the end: nothing needs to look through them for garbage
    gc.enable()


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
