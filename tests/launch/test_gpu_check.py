"""launch/gpu_check.sh: it refuses where there is no GPU, and runs to its end on the pretended device."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_check
from benchmarks.gpu_check import Outcome, Step
from tests.test_launch import NVIDIA_SMI, PYTHON, ROOT, Sandbox, pip_line, sandbox
from tests.tolerances import MOE
from tests.waits import LONG

__all__ = ["sandbox"]  # a fixture

# As the stand-in for Python has it: torch sees no GPU; what the check itself is told.
OF_CHECK = """    "-c import sys, torch; "*) echo asked >>"$SANDBOX/log"; exit 1 ;;
    "-m benchmarks.gpu_check"*) printf '%s\\n' "${@:3}" >"$SANDBOX/options"; exit 7 ;;
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
    assert "driver was expected" in line and "bash launch/test.sh" in line
    assert not (box.repo / ".venv").exists() and box.log() == []


def test_with_a_gpu_it_sets_up_and_hands_its_options_on(box: Sandbox) -> None:
    box.put("nvidia-smi", NVIDIA_SMI)
    wheels = box.root / "my wheels"
    wheels.mkdir()
    (wheels / "torch-2.13.0-py3-none-any.whl").touch()
    (box.root / "torch-is-in").write_text("/usr/lib/python3/dist-packages\n")
    options = ("--system-torch", "--wheels", "my wheels", "--results", "out", "--minutes", "3", "--small")
    result = box.run("gpu_check.sh", *options)
    assert (result.returncode, result.stderr) == (7, "")  # the status of the check
    pip = pip_line("dev").replace("launch/constraints.txt", ".venv/constraints.txt")
    assert box.log() == ["venv --system-site-packages", f"{pip} --no-index --find-links {wheels}"]
    handed = ["--results", str(box.root / "out"), "--minutes", "3", "--small"]
    assert (box.root / "options").read_text().splitlines() == handed


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
        (["--minutes", "0"], "--minutes=0 must be a whole number of at least 1"),
        (["--minutes", "soon"], "--minutes=soon must be a whole number"),
        (["--shapes"], "--shapes needs a name"),
        (["--gpus", "2"], "unknown option --gpus"),
    ],
)
def test_wrong_options(box: Sandbox, arguments: list[str], message: str) -> None:
    box.put("nvidia-smi", NVIDIA_SMI)
    result = box.run("gpu_check.sh", *arguments)
    assert result.returncode == 2
    assert result.stderr.startswith(f"gpu_check: {message}") and result.stderr.count("\n") == 1
    assert box.log() == []


# --- The check -------------------------------------------------------------------------------------------------------


def test_a_torch_without_cuda_is_named(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(sys, "argv", ["gpu_check"])
    assert gpu_check.main() == 2
    said = capfd.readouterr().err.splitlines()[-1]
    assert said.startswith("gpu_check: no GPU: torch 2.") and "use --system-torch" in said


def test_every_test_for_gpus_is_found() -> None:
    marked = {path for path in (ROOT / "tests").rglob("test_*.py") if "pytest.mark.gpu\n" in path.read_text()}
    marked |= {path for path in (ROOT / "tests").rglob("test_*.py") if "pytest.mark.gpu," in path.read_text()}
    assert marked - {Path(__file__)} == set(gpu_check.tests_for_gpus()) != set()


@pytest.mark.parametrize(("count", "sizes"), [(1, [1]), (3, [1, 2]), (16, [1, 8])])
def test_layers_run_on_one_gpu_and_on_all(count: int, sizes: list[int]) -> None:
    steps = gpu_check.make_steps(count, ["gpt_moe_small"], ["mixtral_8x7b"], small=False)
    assert [step.kind for step in steps] == ["tests", "training", *["layer"] * len(sizes)]
    assert f"parallel.expert={sizes[-1]}" in steps[1].command
    for step, size in zip(steps[2:], sizes):
        launched = "torch.distributed.run" in step.command
        assert launched == (size > 1) and (not launched or str(size) in step.command)


def test_a_step_that_fails_or_hangs_does_not_stop_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    def step(name: str, code: str, share: float = 1.0) -> Step:
        return Step("training", name, [sys.executable, "-I", "-S", "-c", code], share)

    hangs = "import time\nprint('begun', flush=True)\ntry: time.sleep(600)\nexcept KeyboardInterrupt: print('so far')"
    steps = [
        step("fails", "print('a reason'); raise SystemExit(3)", 100.0),
        step("hangs", hangs, 5.0),  # two seconds of 80; the others have many more than they need
        step("answers", "print('{\"rows\": []}')", 100.0),
        step("says nothing", "print('no JSON')", 100.0),
    ]
    failed, hung, answered, silent = gpu_check.run_all(steps, 80.0)
    assert (failed.status, failed.output) == ("status 3", ["a reason"])
    assert hung.status.startswith("its time was up") and hung.output == ["begun", "so far"]
    assert answered.went_well and answered.answer == {"rows": []}
    assert silent.status == "no answer on its last line"
    (late,) = gpu_check.run_all([step("late", "print('{}')")], 0.0)
    assert late.status == "not begun: the time was up"
    text = gpu_check.document(MACHINE, [failed, hung, answered, silent, late], "a command")
    assert "Last lines of fails:\n\n```\na reason\n```" in text
    assert "| late | not begun: the time was up | 0 |" in text
    assert len(capsys.readouterr().out.splitlines()) == 5


MACHINE = {
    "count": 8,
    "name": "NVIDIA H100 80GB HBM3",
    "memory_gib": 79.1,
    "capability": "9.0",
    "driver": "580.1",
    "torch": "2.11.0",
    "cuda": "13.0",
    "python": "3.12.3",
    "transformer_engine": "installed",
    "commit": "abc",
}


def layer_row(name: str, ours: bool, **figures: Any) -> dict[str, Any]:
    row = {"variant": name, "ours": ours, "milliseconds": 2.0, "tflops": 500.0, "share_of_peak": 0.5, "speedup": 1.0}
    row |= {"fastest_of_megatron": "theirs", "peak_gib": 3.0, "overlap": 0.75, "busy": 0.98, "difference": 0.001}
    return row | figures


def test_what_was_expected_is_held_or_missed() -> None:
    trained = {"experiment": "gpt2_124m", "ranks": 8, "tokens_per_second": 4e5, "step_seconds": 1.2, "mfu": 0.375}
    trained |= {"peak_memory_gib": 20.0, "last_loss": 7.5}
    layers = [
        layer_row("ours, 1 chunk", True, tflops=400.0, share_of_peak=0.41, speedup=0.9),
        layer_row("ours, 4 chunks", True, share_of_peak=0.51, speedup=1.2),
        layer_row("theirs", False),
    ]
    outcomes = [
        Outcome(Step("training", "gpt2", [], 1.0), "well", 60.0, [], {"rows": [trained]}),
        Outcome(Step("layer", "layer of mixtral_8x7b", [], 1.0), "well", 60.0, [], {"rows": layers, "sizes": "sizes"}),
    ]
    assert [row[1:] for row in gpu_check.expectations(outcomes)] == [
        ["37.5%", "missed"],
        ["51.0%", "held"],
        ["1.20", "held"],
    ]
    text = gpu_check.document(MACHINE, outcomes, "a command")
    assert "meaningless" not in text
    assert "| gpt2_124m | 8 | 400,000 | 1.200 | 37.5% | 20.00 | 7.500 |" in text
    assert "| ours, 4 chunks | 2.00 | 500.0 | 51% | 1.20 | 3.00 | 75% | 98% | 1.0e-03 |" in text


def test_the_summary_of_the_tests_names_what_did_not_pass() -> None:
    output = ["....F", "FAILED tests/test_gpu.py::test_a - boom", "== 1 failed, 3 passed in 9.00s =="]
    assert gpu_check.test_lines(output) == [output[1], "1 failed, 3 passed in 9.00s"]
    assert gpu_check.test_lines(["Killed"]) == ["no summary"]


def test_names_of_files() -> None:
    assert gpu_check.file_name("NVIDIA H100 80GB HBM3") == "gpu-NVIDIA-H100-80GB-HBM3.md"
    assert gpu_check.file_name("../a card/") == "gpu-a-card.md"


# --- On the pretended device -----------------------------------------------------------------------------------------


def set_up(folder: Path) -> None:
    """The repository with launch/ of its own and a complete .venv that runs this Python."""
    for path in ROOT.iterdir():
        if path.name not in ("launch", ".venv", ".git"):
            (folder / path.name).symlink_to(path)
    shutil.copytree(ROOT / "launch", folder / "launch")
    (folder / ".venv" / "bin").mkdir(parents=True)
    python = folder / ".venv" / "bin" / "python"
    python.write_text(f'#!/usr/bin/env bash\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    pins = b"".join((ROOT / name).read_bytes() for name in ("pyproject.toml", "launch/constraints.txt"))
    stamp = f"{folder} {hashlib.sha256(pins).hexdigest()}\ndev\n"
    (folder / ".venv" / ".setup-complete").write_text(stamp)


@pytest.mark.cuda_pretended
def test_it_runs_to_its_end_on_the_pretended_device(tmp_path: Path) -> None:
    folder = tmp_path.resolve() / "repo"
    folder.mkdir()
    set_up(folder)
    options = (
        "--small",
        "--experiments",
        "gpt_moe_small",
        "--shapes",
        "mixtral_8x7b",
        "--results",
        str(tmp_path / "out"),
    )
    command = [sys.executable, "-m", "tests.cuda.run", "--", "bash", str(folder / "launch" / "gpu_check.sh"), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=2 * LONG)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert done.stdout.splitlines()[-1] == f"gpu_check: written to {tmp_path / 'out' / 'gpu-pretended.md'}"
    text = (tmp_path / "out" / "gpu-pretended.md").read_text()
    assert text.splitlines()[2] == "## Pretended device: every figure is meaningless"
    assert re.search(r"^1 passed in ", text, re.M)
    assert re.search(r"^\| gpt_moe_small \| 1 \| [\d,]+ \| ", text, re.M)
    differences = [float(found) for found in re.findall(r"^\| (?:ours|Megatron-core), .* \| (\S+) \|$", text, re.M)]
    assert len(differences) == 4 and max(differences) < MOE["bfloat16"]
    assert re.findall(r"^\| .* \| (.*) \| \d+ \|$", text, re.M) == ["well"] * 3
    assert not re.search(r" (held|missed) \|", text)
