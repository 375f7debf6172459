"""Which checkpoints a run has, and whether they are whole. Reads files only: imports in no time, before torch."""

from __future__ import annotations

import json
from pathlib import Path

from configs.schema import Config, ConfigError

FORMAT = 1
MANIFEST = "manifest.json"


def folder_of(run_dir: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return run_dir / "checkpoints" / f"step_{step:07d}"


def problem_with(folder: Path) -> str | None:
    """Why the folder is no complete checkpoint, in one line; None if it is one."""
    if not folder.is_dir():
        return "no such folder"
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        files = manifest["files"]
        if manifest["format"] != FORMAT:
            return f"its format ({manifest['format']}) is not the one this version reads ({FORMAT})"
    except FileNotFoundError:
        return f"it has no {MANIFEST}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"its {MANIFEST} cannot be read ({type(error).__name__}: {error})"
    for name, size in files.items():
        path = folder / name
        if not path.is_file():
            return f"its file {name} is missing"
        if path.stat().st_size != size:
            return f"its file {name} has {path.stat().st_size} bytes, not {size}"
    return None


def list_checkpoints(run_dir: Path) -> list[Path]:
    """All checkpoint folders of a run, newest first, good or not."""
    folders = [path for path in (run_dir / "checkpoints").glob("step_*") if path.name[5:].isdigit() and path.is_dir()]
    return sorted(folders, key=lambda path: int(path.name[5:]), reverse=True)


def find(config: Config) -> tuple[Path | None, list[str]]:
    """The checkpoint to resume from, by `checkpoint.resume`, and a line for each one passed over.

    Raises ConfigError for a path that is no checkpoint.
    """
    resume = config.checkpoint.resume
    if resume == "never":
        return None, []
    if resume == "auto":
        passed_over: list[str] = []
        for folder in list_checkpoints(Path(config.run_dir)):
            problem = problem_with(folder)
            if problem is None:
                return folder, passed_over
            passed_over.append(f"passed over {folder}: {problem}")
        return None, passed_over
    folder = Path(resume)
    if problem_with(folder) is not None and (folder / "checkpoints").is_dir():  # a run folder stands for its newest
        good = [candidate for candidate in list_checkpoints(folder) if problem_with(candidate) is None]
        if good:
            return good[0], []
    problem = problem_with(folder)
    if problem is not None:
        raise ConfigError(
            f"checkpoint.resume ({resume}) is no checkpoint: {problem}. Give a folder .../checkpoints/step_XXXXXXX, a run folder that "
            "holds one, auto (the newest good one in run_dir, or a fresh start) or never."
        )
    return folder, []
