"""launch/gpu_check.sh: it refuses where there is no GPU, and hands its options on. What it starts: test_card.py."""

from __future__ import annotations

import sys
import time

import pytest

from tests.test_launch import NVIDIA_SMI, PYTHON, Sandbox, pip_line, sandbox

__all__ = ["sandbox"]  # a fixture

# As the stand-in for Python has it: torch sees no GPU; what the check itself is told.
OF_CHECK = """    "-c import sys, torch; "*) echo asked >>"$SANDBOX/log"; exit 1 ;;
    "-m benchmarks.card"*) printf '%s\\n' "${@:3}" >"$SANDBOX/options"; exit 7 ;;
"""
# An image's Python: it has torch, and says what it lacks.
OF_IMAGE = f"""    "-c import importlib.util"*) exit 0 ;;
    "launch/missing_wheels.py"*) "{sys.executable}" "$@" ;;
    "-m pip install"*) echo "${{@:2}}" >>"$SANDBOX/log" ;;
"""


@pytest.fixture
def box(sandbox: Sandbox) -> Sandbox:
    sandbox.put("python3.12", PYTHON.replace('case "$*" in\n', f'case "$*" in\n{OF_CHECK}'))
    return sandbox


# --- The script ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nvidia_smi", "visible"),
    [
        (None, None),
        ("#!/usr/bin/env bash\necho 'NVIDIA-SMI has failed'\nexit 9\n", None),
        (NVIDIA_SMI, ""),
        (None, "0"),
    ],
    ids=["none", "no driver", "none visible", "visible but not there"],
)
def test_without_a_gpu_it_ends_before_the_set_up(box: Sandbox, nvidia_smi: str | None, visible: str | None) -> None:
    if nvidia_smi is not None:
        box.put("nvidia-smi", nvidia_smi)
    result = box.run("gpu_check.sh", **({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}))
    assert (result.returncode, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("gpu_check: no GPU: ")
    assert "needs an NVIDIA GPU and its driver" in line and "bash launch/test.sh" in line
    assert not (box.repo / ".venv").exists() and box.log() == []


def test_with_a_gpu_it_sets_up_and_hands_its_options_on(box: Sandbox) -> None:
    box.put("nvidia-smi", NVIDIA_SMI)
    wheels = box.root / "my wheels"
    wheels.mkdir()
    (wheels / "torch-2.13.0-py3-none-any.whl").touch()
    (box.root / "torch-is-in").write_text("/usr/lib/python3/dist-packages\n")
    options = ("--system-torch", "--wheels", "my wheels", "--results", "out", "--seconds", "300", "--small")
    before = time.time()
    result = box.run("gpu_check.sh", *options, "--only", "next to", "--only", "copies")
    assert (result.returncode, result.stderr) == (7, "")  # the status of the check
    pip = pip_line("dev").replace("launch/constraints.txt", ".venv/constraints.txt")
    assert box.log() == ["venv --system-site-packages", f"{pip} --no-index --find-links {wheels}"]
    handed = ["--results", str(box.root / "out"), "--seconds", "300", "--small", "--only", "next to", "copies"]
    since, began, *others = (box.root / "options").read_text().splitlines()
    assert others == handed
    assert since == "--since" and before - 1 <= float(began) <= time.time()


def test_an_images_packages_are_taken_and_the_missing_ones_added(box: Sandbox) -> None:
    box.put("nvidia-smi", NVIDIA_SMI)
    python = PYTHON.replace('case "$*" in\n', f'case "$*" in\n{OF_CHECK}{OF_IMAGE}')
    box.put("python3.12", python)
    wheels = box.root / "wheels"
    wheels.mkdir()
    for name in ("pytest-9.2.0-py3-none-any.whl", "no_such_package-1.0-py3-none-any.whl"):
        (wheels / name).touch()
    result = box.run("gpu_check.sh", "--image", "--wheels", "wheels", "--commit", "abc")
    assert (result.returncode, result.stderr) == (7, "")
    assert not (box.repo / ".venv").exists()
    assert (box.root / "options").read_text().splitlines()[2:] == ["--commit", "abc"]
    (line,) = box.log()
    assert (
        line.startswith("pip install")
        and "--no-deps" in line
        and line.endswith(f"{wheels}/no_such_package-1.0-py3-none-any.whl")
    )


@pytest.mark.parametrize("option", ["--small", "--list"])
def test_tiny_sizes_and_the_list_need_no_gpu(box: Sandbox, option: str) -> None:
    assert box.run("gpu_check.sh", option).returncode == 7  # the status of the check
    assert (box.root / "options").read_text().splitlines()[2:] == [option]


def test_torch_is_asked_where_there_is_no_nvidia_smi(box: Sandbox) -> None:
    assert box.run("setup.sh").returncode == 0
    box.log()
    assert box.run("gpu_check.sh").returncode == 2
    assert box.log() == ["asked"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--wheels"], "--wheels needs a folder that exists, not ''"),
        (["--wheels", "nowhere"], "--wheels needs a folder that exists, not 'nowhere'"),
        (["--seconds", "0"], "--seconds=0 must be a whole number from 1"),
        (["--seconds", "soon"], "--seconds=soon must be a whole number"),
        (["--minutes", "9"], "--minutes was replaced by --seconds, such as --seconds 540"),
        (["--commit"], "--commit needs the commit"),
        (["--only"], "--only needs a word of a rung's name"),
        (["--gpus", "2"], "unknown option --gpus"),
    ],
)
def test_wrong_options(box: Sandbox, arguments: list[str], message: str) -> None:
    box.put("nvidia-smi", NVIDIA_SMI)
    result = box.run("gpu_check.sh", *arguments)
    assert result.returncode == 2
    assert result.stderr.startswith(f"gpu_check: {message}") and result.stderr.count("\n") == 1
    assert box.log() == []
