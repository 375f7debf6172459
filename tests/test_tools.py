"""Every tool's command line: it answers without waiting for torch, from any folder, and the same mistake has the same
exit status."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from base import checksums, command
from base.errors import ConfigError
from checkpoint import manifest, safetensors_header, state_file
from configs.weights import config_from
from inference import command as model_command
from models.weight_files.expected import logical_shapes
from parallel import card
from parallel.dtypes import DTYPES
from tests.distributed import ROOT
from tests.waits import LONG

# started by scripts and by other programs, not by people
INTERNAL = {
    "launch.agent",
    "launch.rank",
    "launch.missing_wheels",
    "launch.system_torch",
    "data.worker",
    "moe.kernels",
}
PACKAGES_OF_A_USER = ("base", "checkpoint", "configs", "data", "memory", "models", "moe", "training")
HEAVY = ("torch", "megatron", "transformers", "wandb", "tensorboard")
MISSING = "no/such/folder"
# For each tool: command lines that a wrong path ends.
WRONG_PATHS = {
    "train": [[f"data.corpus={MISSING}"], [f"checkpoint.resume={MISSING}"], [f"checkpoint.weights={MISSING}"]],
    "training.report": [[MISSING], ["a_file"]],
    "checkpoint": [[name, path] for name in ("ls", "verify", "show") for path in (MISSING, "a_file")]
    + [["convert", MISSING, "new"]],
    "training.status": [[MISSING], ["a_file"]],
    "checkpoint.export": [[MISSING, "new"], ["a_file", "new"]],
    "inference.generate": [["--checkpoint", MISSING, "--prompt", "a"], ["--checkpoint", "a_file", "--prompt", "a"]],
    "inference.evaluate": [
        ["--checkpoint", MISSING, "--files", "a_file"],
        ["--checkpoint", "a_file", "--files", "a_file"],
    ],
    "inference.fill_mask": [
        ["--checkpoint", MISSING, "--text", "[MASK]"],
        ["--checkpoint", "a_file", "--text", "[MASK]"],
    ],
    "models.convert": [[direction, path, "new"] for direction in ("import", "export") for path in (MISSING, "a_file")],
    "data.prepare": [[f"data.corpus={MISSING}"]],
    "simulator.fit": [[MISSING, "--hardware", "mine.yaml"], ["a_file", "--hardware", "mine.yaml"]],
    "simulator.backtest": [[MISSING, "--hardware", "a100_8x"], ["a_file", "--hardware", "a100_8x"]],
    "launch.job": [],
    "launch.submit": [],
}
UNKNOWN = {
    "train": ["model.widht=3"],
    "data.prepare": ["data.widht=3"],
    "launch.submit": ["--dry-run", "--", "model.widht=3"],
    "launch.job": ["--world-size", "1", "--widht"],
}
WRONG_DEVICES = {
    "train": [["training.device=cuda"], ["training.device=tpu"]],
    "inference.generate": [["--checkpoint", ".", "--device", "cuda"], ["--checkpoint", ".", "--device", "tpu"]],
}
RUN = """
import contextlib, io, json, runpy, sys
from models.weight_files.expected import logical_shapes
from parallel import card
card._may_have_gpu = lambda: False
tool, lines, heavy = json.loads(sys.argv[1])
for line in lines:
    sys.argv = [tool, *line]
    out, err, status = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            runpy.run_module(tool, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            status = end.code
    print(json.dumps([status, out.getvalue(), err.getvalue(), [name for name in heavy if name in sys.modules]]))
"""


def run_all(folder: Path, lines: dict[str, list[list[str]]]) -> dict[tuple[str, ...], tuple[int, str, str, list[str]]]:
    """Status, output, errors and loaded libraries of each tool's command lines; a fresh process for each tool, started
    in `folder`."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": ""}

    def of(tool: str) -> list[tuple[int, str, str, list[str]]]:
        code = [sys.executable, "-c", RUN, json.dumps([tool, lines[tool], HEAVY])]
        done = subprocess.run(code, cwd=folder, env=environment, capture_output=True, text=True, timeout=LONG)
        assert done.returncode == 0, done.stderr
        return [tuple(json.loads(line)) for line in done.stdout.splitlines()]

    with ThreadPoolExecutor(2) as pool:
        results = pool.map(of, lines)
        return {
            (tool, *line): answer
            for tool, answers in zip(lines, results)
            for line, answer in zip(lines[tool], answers, strict=True)
        }


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A folder of a user's, with folders that are called as ours are."""
    for name in PACKAGES_OF_A_USER:
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes.txt").write_text("mine")
    (tmp_path / "a_file").write_text("text")
    return tmp_path


def test_every_tool_is_here() -> None:
    packages = {path.parent.name for path in ROOT.glob("*/*.py")} - {"tests", "benchmarks"}
    files = [
        path
        for package in packages
        for path in (ROOT / package).rglob("*.py")
        if '\nif __name__ == "__main__":' in path.read_text()
    ]
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__") for path in files}
    assert names - INTERNAL == WRONG_PATHS.keys() - {"train"}


def test_answers_come_from_any_folder_without_torch(elsewhere: Path) -> None:
    lines: dict[str, list[list[str]]] = {}
    for tool, wrong in WRONG_PATHS.items():
        lines[tool] = [["--help"], UNKNOWN.get(tool) or [*wrong[0], "--widht"], *WRONG_DEVICES.get(tool, []), *wrong]
    for (tool, *line), (status, out, errors, heavy) in run_all(elsewhere, lines).items():
        case = (tool, line, out, errors)
        assert heavy == [], case
        if line == ["--help"]:
            assert status == 0 and len(out) > 100 and errors == "", case
            continue
        assert status == 2 and "Traceback" not in errors and errors.strip(), case
        last = errors.strip().splitlines()[-1]
        wrong_one = line[-1:] if "widht" in line[-1] else line
        words = [word for argument in wrong_one for word in (argument, *argument.split("=")) if len(word) > 3]
        assert any(word in last for word in words) and "error: " in last, case
    assert sorted(path.name for path in elsewhere.iterdir()) == sorted(["a_file", *PACKAGES_OF_A_USER])


def test_an_editable_installation_is_a_path(tmp_path: Path) -> None:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    code = "from setuptools import build_meta; print(build_meta.build_editable('.'))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=LONG)
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(tmp_path / done.stdout.split()[-1]) as wheel:
        (name,) = [name for name in wheel.namelist() if "/" not in name]
        assert name.endswith(".pth") and wheel.read(name).decode().split() == [str(tmp_path.resolve())]


def write_checkpoint(folder: Path) -> None:
    """A checkpoint as another version or rank count might have written it, of one tensor in two parts."""
    folder.mkdir(parents=True)
    layout = {
        "world_size": 8,
        "tensor": 2,
        "pipeline": 2,
        "context": 1,
        "expert": 2,
        "virtual_pipeline": None,
        "sequence": True,
    }
    state = {
        "step": 7,
        "consumed_samples": 56,
        "health": None,
        "vocab_size": 384,
        "precision": "fp32",
        "optimizer_steps": [7],
        "loss_scaler": None,
        "architecture": {"model": {"num_layers": 2}},
        "layout": {**layout, "timeout_seconds": 600},
    }
    sums = {manifest.STATE: manifest.write_text(folder / manifest.STATE, json.dumps(state))}
    model = {"num_layers": 1, "hidden_size": 8, "ffn_hidden_size": 8, "num_attention_heads": 1}
    sums[manifest.CONFIG] = manifest.write_text(folder / manifest.CONFIG, json.dumps({"name": "here", "model": model}))
    shapes = logical_shapes(config_from({"model": model}), 384)
    for rank in range(2):
        entries, start = [], 0
        for name, shape in {"weight": (2, 3), **shapes}.items():
            half = (shape[0] // 2, *shape[1:])
            offset, end = (rank * half[0], *(0 for _ in half[1:])), start + 4 * math.prod(half)
            entries.append(safetensors_header.Entry(name, "F32", half, shape, offset, start, end))
            start = end
        content = safetensors_header.encode(entries) + bytes(start)
        (folder / f"rank_{rank}.safetensors").write_bytes(content)
        sums[f"rank_{rank}.safetensors"] = checksums.sum_of(folder / f"rank_{rank}.safetensors")
    manifest.write(folder, 7, sums)


def test_checkpoints_are_shown_without_torch(elsewhere: Path) -> None:
    write_checkpoint(elsewhere / "run/checkpoints/step_0000007")
    answers = run_all(elsewhere, {"checkpoint": [["ls", "run"], ["verify", "run"], ["show", "run"]]})
    for line, (status, _, errors, heavy) in answers.items():
        assert (status, errors, heavy) == (0, "", []), line
    shown = answers["checkpoint", "show", "run"][1]
    assert "written by 8 ranks: data 2 x tensor 2 x pipeline 2 x expert 2 x sequence" in shown
    assert "weight" in shown and "2 x 3" in shown and "7  " in answers["checkpoint", "ls", "run"][1]


def test_layouts_in_words() -> None:
    assert state_file.describe_layout({"world_size": 1}) == "1 rank"
    assert state_file.describe_layout(
        {"world_size": 4, "tensor": 1, "pipeline": 1, "context": 1, "expert": 4, "expert_tensor": None}
    ) == ("4 ranks: data 4 x expert 4")
    assert (
        state_file.describe_layout({"world_size": 4, "pipeline": 4, "virtual_pipeline": 2})
        == "4 ranks: pipeline 4 x virtual pipeline 2"
    )


def test_the_precisions_are_all_there() -> None:
    assert list(model_command.PRECISIONS) == sorted(DTYPES)


def test_statuses(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def ends(error: BaseException | None) -> int:
        def body() -> None:
            if error is not None:
                raise error

        return command.run(body)

    assert [ends(None), command.run(lambda: 1)] == [0, 1] and capfd.readouterr().err == ""
    for error, status, words in (
        (ConfigError("a.b (3) must be\n  4"), 2, "error: a.b (3) must be 4"),
        (FileNotFoundError(2, "No such file or directory", "x/y"), 2, "error: x/y: No such file or directory"),
        (PermissionError(13, "Permission denied", "x"), 2, "error: x: Permission denied"),
        (OSError(28, "No space left on device", "x"), 1, "error: x: No space left on device"),
        (KeyboardInterrupt(), 130, "error: interrupted"),
    ):
        assert ends(error) == status
        assert capfd.readouterr().err == words + "\n"
    with pytest.raises(ZeroDivisionError):  # a bug keeps its traceback
        ends(ZeroDivisionError())


def test_a_gpu_is_looked_for_before_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card, "_may_have_gpu", lambda: False)
    with pytest.raises(ConfigError, match=r"^training.device \(cuda\) needs a CUDA GPU, .* Try training.device=cpu.$"):
        card.refuse_missing("cuda", "training.device")
    card.refuse_missing("cpu", "training.device")
    card.refuse_missing("auto", "training.device")
    monkeypatch.setattr(card, "_may_have_gpu", lambda: True)
    card.refuse_missing("cuda", "training.device")
