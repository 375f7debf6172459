"""The quickstart, the tasks of the README and those of docs/README.md, typed in a fresh clone from top to bottom.

    python -m benchmarks.checks.readme_table [--steps 620] [--set-up] [--json]

A row that trains must end with status 0 after steps of its own, and not find a run that another row has finished. One
that needs a GPU or Slurm must say so where there is none. All others must end with status 0. The clone's `.venv` sees
the packages of this Python; with `--set-up` launch/setup.sh makes one. `--steps`: of the quickstart, where its 620 are
too many.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
QUICKSTART = "bash launch/quickstart.sh"
TIMEOUT = 1800  # seconds of a row
# What a row must say, with its status, on a machine that lacks what it needs.
WITHOUT_GPU = ("bash launch/gpu_check.sh", "nvidia-smi", 2, "no GPU")
WITHOUT_SLURM = ("python -m launch.submit", "sbatch", 1, "sbatch is not on PATH here")
WITHOUT_CLUSTER = ("python -m launch.submit", "sinfo", 1, "sbatch: ")  # Slurm's programs alone


@dataclass(frozen=True)
class Row:
    """A row of the table: what somebody wants, and what it says to type; None where it gives no command."""

    want: str
    command: str | None


@dataclass(frozen=True)
class Typed:
    """What came of a row."""

    want: str
    command: str
    ok: bool
    status: int
    seconds: float
    did: str


def tasks_of_readme(text: str) -> list[Row]:
    """Return the commands of the README's section "Tasks", in order; the comment above a command names its task."""
    lines = re.sub(r"\s*\\\n\s*", " ", text.partition("\n## Tasks\n")[2]).splitlines()
    found: list[Row] = []
    task = ""
    for line in lines:
        if line.startswith("    # "):
            task = line[6:].split("  ")[0]
        elif re.match(r"    (python|bash) ", line):
            found.append(Row(task, line.strip()))
    return found


def tasks_of_index(text: str) -> list[Row]:
    """Return the rows of the tables of docs/README.md, in order."""
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and cells[0] != "I want to" and not set(line) <= set("|-"):
            spans = re.findall(r"`([^`]+)`", cells[1])
            found.append(Row(cells[0], spans[-1] if spans else None))
    return found


def trains(command: str) -> bool:
    """Whether a command takes steps, of a run that it may find finished."""
    program = re.match(r"(\.venv/bin/)?python train\.py( |$)|bash launch/(torchrun|quickstart)\.sh( |$)", command)
    return program is not None and re.search(r"\s(plan=|--help|-h\b|--cfg)", command) is None


def _is_there(program: str) -> bool:
    """Whether a program is on PATH; of `sinfo`, whether it reaches a cluster."""
    if shutil.which(program) is None:
        return False
    return program != "sinfo" or subprocess.run([program], capture_output=True, timeout=60, check=False).returncode == 0


def verdict(command: str, status: int, output: str, seen: set[str]) -> tuple[bool, str]:
    """Whether a row did what it shall, and what that was. `seen`: what went before has trained to, folder and last
    step; it is added to."""
    last = next((line.strip() for line in reversed(output.splitlines()) if re.search(r"[a-z]{2}", line)), "")
    for program, needed, expected, words in (WITHOUT_GPU, WITHOUT_SLURM, WITHOUT_CLUSTER):
        if command.startswith(program) and not _is_there(needed):
            return status == expected and words in output, last
    if status != 0:
        return False, last
    if not trains(command):
        return bool(last), last
    steps = re.search(r"steps (\d+) to (\d+) of .*; writing to (\S+)", output)
    if steps is None or int(steps[1]) >= int(steps[2]):
        return False, f"took no step: {last}"
    begin, end, folder = f"{steps[3]} {steps[1]}", f"{steps[3]} {steps[2]}", steps[3]
    goes_on = begin in seen
    if not goes_on and any(trained.split()[0] == folder for trained in seen):
        return False, f"found another row's run in {folder}"
    if re.search(rf"step {steps[2]}/{steps[2]} \|", output) is None:
        return False, f"did not come to step {steps[2]}: {last}"
    seen.add(end)
    return True, f"{'went on' if goes_on else 'trained'} from step {steps[1]} to {steps[2]} in {folder}"


def clone(folder: Path, set_up: bool) -> Path:
    """A fresh clone with an environment."""
    subprocess.run(["git", "clone", "--quiet", str(REPOSITORY), str(folder)], check=True, timeout=300)
    if set_up:
        subprocess.run(["bash", "launch/setup.sh"], cwd=folder, check=True, timeout=3600)
        return folder
    venv = folder / ".venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True, timeout=300)
    packages = next(venv.glob("lib/python*/site-packages")) / "packages.pth"
    packages.write_text(f"{sysconfig.get_path('purelib')}\n{folder}\n")
    pins = b"".join((folder / name).read_bytes() for name in ("pyproject.toml", "launch/constraints.txt"))
    (venv / ".setup-complete").write_text(f"{folder} {hashlib.sha256(pins).hexdigest()}\n\n")
    return folder


def type_all(folder: Path, steps: int | None) -> list[Typed]:
    """The quickstart and all rows, in order."""
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment["PATH"] = f"{folder / '.venv' / 'bin'}{os.pathsep}{environment['PATH']}"
    fewer = "" if steps is None else f" training.steps={steps}"
    readme, index = (folder / "README.md").read_text(), (folder / "docs" / "README.md").read_text()
    table_rows = [Row("begin", QUICKSTART + fewer), *tasks_of_readme(readme), *tasks_of_index(index)]
    typed: list[Typed] = []
    seen: set[str] = set()
    for row in table_rows:
        if row.command is None or not re.match(r"(python|bash) ", row.command):
            continue
        begin = time.monotonic()
        try:
            done = subprocess.run(
                ["bash", "-c", row.command],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=TIMEOUT,
            )
            status, output = done.returncode, done.stdout
        except subprocess.TimeoutExpired:
            status, output = 124, f"not done after {TIMEOUT} s"
        ok, did = verdict(row.command, status, output, seen)
        typed.append(
            Typed(row.want, row.command, ok, status, time.monotonic() - begin, did.replace(str(folder), "CLONE"))
        )
        print(
            f"{'ok' if ok else 'WRONG':5} {status:>3} {typed[-1].seconds:6.0f} s  {row.command}\n{'':17}{did}",
            flush=True,
        )
        if not ok:
            print(output[-3000:], file=sys.stderr, flush=True)
    return typed


def markdown(typed: list[Typed]) -> str:
    """The table of the results."""
    lines = ["| typed | status | seconds | what it did |", "|---|---|---|---|"]
    for row in typed:
        mark = "" if row.ok else "**wrong** "
        did = row.did.replace("|", ",")
        lines.append(f"| `{row.command}` | {row.status} | {row.seconds:.0f} | {mark}{did} |")
    return "\n".join(lines)


def main() -> int:
    """The command line; the exit status: 1 if a row did not do what it shall."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checks.readme_table", description=__doc__)
    parser.add_argument("--steps", type=int, help="of the quickstart; default: its own")
    parser.add_argument("--set-up", action="store_true", help="have launch/setup.sh make the clone's .venv")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="readme-table-") as scratch:
        typed = type_all(clone(Path(scratch).resolve() / "mixtrain", options.set_up), options.steps)
    print(f"\n{markdown(typed)}")
    wrong = sum(not row.ok for row in typed)
    print(f"\n{len(typed)} commands typed, {wrong} wrong")
    if options.json:
        print(json.dumps({"rows": [asdict(row) for row in typed], "wrong": wrong}))
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
