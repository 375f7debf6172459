"""Lanes run each test once, whole files, whatever other lanes do."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests import lanes
from tests.waits import LONG

pytestmark = pytest.mark.fast

FILE = """
import pytest

LOG = __import__("pathlib").Path({log!r})

@pytest.fixture(scope="module", autouse=True)
def module():
    yield
    with LOG.open("a") as log:
        log.write(f"over {{__name__}}\\n")

@pytest.mark.parametrize("number", range(3))
def test_some(number):
    with LOG.open("a") as log:
        log.write(f"{{__name__}} {{number}}\\n")
    assert (__name__, number) != ("test_2", 1)
"""
CONFTEST = """
import pathlib
from tests import lanes

def pytest_addoption(parser):
    parser.addoption("--lane", type=pathlib.Path)

def pytest_configure(config):
    config.addinivalue_line("markers", "fast: some")
    config.pluginmanager.register(lanes.Lane(config.getoption("--lane")))
"""


def test_each_test_runs_once_and_whole_files_together(tmp_path: Path) -> None:
    (tmp_path / "claims").mkdir()
    (tmp_path / "conftest.py").write_text(CONFTEST)
    for number in range(4):
        folder = tmp_path / f"folder_{number % 2}"
        folder.mkdir(exist_ok=True)
        (folder / f"test_{number}.py").write_text(FILE.format(log=str(tmp_path / "log")))
    command = [sys.executable, "-m", "pytest", "-q", "--rootdir", str(tmp_path), "-p", "no:cacheprovider"]
    command += ["--lane", str(tmp_path / "claims"), str(tmp_path)]
    env = {"PYTHONPATH": str(lanes.ROOT), "PATH": "/usr/bin:/bin"}
    both = [subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [lane.communicate(timeout=LONG)[0] for lane in both]
    assert sorted(lane.returncode for lane in both) == [0, 1], outputs
    assert sum("1 failed" in output for output in outputs) == 1
    counts = Counter((tmp_path / "log").read_text().splitlines())
    names = [f"test_{number}" for number in range(4)]
    assert counts == Counter(
        [*(f"{name} {i}" for name in names for i in range(3)), *(f"over {name}" for name in names)]
    )


def test_the_pretended_device_is_one_lanes() -> None:
    units = map(lanes.unit_of, ("tests/cuda/test_fake.py::test_a", "tests/cuda/test_lanes.py::test_b[x::y]"))
    assert set(units) == {"tests/cuda"}
    assert lanes.unit_of("tests/moe/test_route.py::test_c") == "tests/moe/test_route.py"


def test_there_are_lanes() -> None:
    assert lanes.num_lanes() >= 1
