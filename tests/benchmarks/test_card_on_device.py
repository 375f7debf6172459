"""Rungs of the ladder run to their end on the pretended device."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tolerances import MOE
from tests.waits import LONG

ROOT = Path(__file__).resolve().parents[2]
RUNGS = ("one layer of mixtral", "next to transformers", "copies")


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
def test_rungs_run_on_the_pretended_device(tmp_path: Path) -> None:
    folder = tmp_path.resolve() / "repo"
    folder.mkdir()
    set_up(folder)
    options = ["--small", "--seconds", str(2 * int(LONG)), "--results", str(tmp_path / "out")]
    options += [word for name in RUNGS for word in ("--only", name)]
    command = [sys.executable, "-m", "tests.cuda.run", "--", "bash", str(folder / "launch" / "gpu_check.sh"), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3 * LONG)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    found = [json.loads(line) for line in (tmp_path / "out" / "card.jsonl").read_text().splitlines()]
    assert {each["card"] for each in found} == {"pretended, tiny sizes"}
    assert {each["rung"]: each["status"] for each in found} == {
        "llama_1b next to transformers": "well",
        "one layer of mixtral_8x7b": "well",
        "pinned copies between host and card": "well",
    }
    result_rows = [row for each in found for row in each["rows"]]
    systems = {row["system"] for row in result_rows if "difference" in row}
    assert len(systems) == 5 and max(row["difference"] for row in result_rows if "difference" in row) < MOE["bfloat16"]
    losses = [row["loss"] for row in result_rows if row.get("model") == "llama_1b" and "loss" in row]
    assert len(losses) == 2 and max(losses) - min(losses) < 0.1  # of other weights, near that of no knowledge
