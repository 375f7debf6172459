"""Find, verify, rename and delete the checkpoints of a run. Works on files only, without torch.

A checkpoint folder is good if its manifest, which is written last, names every file, and all files have the size and
checksum in it. The checksum is XXH3 (128 bits): 10 GB/s on one core, compared with 0.5 to 2 for CRC-32 and SHA-256, so
it can be checked at every save and every start. It detects damage, not forgery; a forged checkpoint still cannot run
code, because nothing is unpickled.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import yaml

from base.checksums import FOLDER_SUMS, SUM, FileSum, own_sum, size_problem, sum_of, wrong_files
from base.errors import ConfigError, reason_of
from base.files import read_yaml, writing
from checkpoint import record, safetensors_header

FORMAT = 2
MANIFEST = "manifest.json"
STATE = "state.json"
CONFIG = "config.yaml"
TEMPORARY = ".tmp"  # suffix of a folder that is being written or deleted
REPLACED = ".replaced"  # suffix of a checkpoint whose step was saved again: deleted after the new one is renamed
ADVICE = "Restore its files, or use another checkpoint"  # ends messages about a damaged checkpoint
Check = Callable[[Path], str | None]


def folder_of(run_dir: Path, step: int) -> Path:
    """Return the folder of the checkpoint of a step."""
    return run_dir / "checkpoints" / f"step_{step:07d}"


def write(folder: Path, step: int, files: dict[str, FileSum], buffer: memoryview | None = None) -> None:
    """Write the manifest of a checkpoint folder whose other files are all on disk. Raises OSError."""
    content = {"format": FORMAT, "step": step, "files": {name: vars(files[name]) for name in sorted(files)}}
    write_text(folder / MANIFEST, json.dumps({**content, SUM: own_sum(content)}, indent=1), buffer)


def write_text(path: Path, text: str, buffer: memoryview | None = None) -> FileSum:
    """Write a small file, fsync it, and return its size and checksum. Raises OSError."""
    with writing(path), open(path, "wb") as stream:
        stream.write(text.encode())
        stream.flush()
        os.fsync(stream.fileno())
    return sum_of(path, buffer)


def sync_folder(folder: Path) -> None:
    """Fsync a folder, so that its new and renamed files survive a power failure. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read(folder: Path) -> dict[str, FileSum]:
    """Return size and checksum of each file in a folder's manifest, by name. Raises ValueError, with a clause for
    users, if the manifest is missing or damaged."""
    try:
        content = json.loads((folder / MANIFEST).read_bytes())
        if content["format"] != FORMAT:
            raise _Invalid(f"its format ({content['format']}) is not the format that this version reads ({FORMAT})")
        if content.pop(SUM) != own_sum(content):
            raise _Invalid(f"its {MANIFEST} does not match the checksum that it contains")
        number = folder.name.removeprefix("step_")
        if number.isdigit() and folder.name != number and int(number) != content["step"]:
            raise _Invalid(f"its {MANIFEST} belongs to step {content['step']}, not to step {int(number)}")
        files = {name: FileSum(**entry) for name, entry in content["files"].items()}
    except FileNotFoundError:
        raise _Invalid(f"it has no {MANIFEST}") from None
    except _Invalid:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _Invalid(f"its {MANIFEST} cannot be read ({reason_of(error)})") from error
    missing = {STATE, CONFIG} - files.keys()
    elsewhere = [name for name in files if Path(name).name != name]
    if missing or elsewhere:
        what = f"does not name {min(missing)}" if missing else f"names {elsewhere[0]}, which is in another folder"
        raise _Invalid(f"its {MANIFEST} {what}")
    return files


class _Invalid(ValueError):
    """Raised if a manifest is invalid. The message is a clause for users with the reason."""


def problem_with(folder: Path) -> str | None:
    """Return the reason why a folder is not a complete checkpoint, or None. Checks only names and sizes of files."""
    return next(iter(problems(folder, content=False)), None)


def verify(folder: Path) -> str | None:
    """Return the reason why a folder is not a good checkpoint, or None. Reads every byte."""
    return next(iter(problems(folder)), None)


def problems(folder: Path, content: bool = True) -> list[str]:
    """Return a line for each problem of a checkpoint folder. `content`: check every byte rather than only sizes."""
    if not folder.is_dir():
        return ["no such folder"]
    try:
        files = read(folder)
    except ValueError as error:
        return [str(error)]
    found = [problem for name, entry in files.items() if (problem := size_problem(folder / name, entry))]
    if content and not found:
        found = wrong_files(folder, files, list(files)) or unreadable(folder, files)
    return found


def unreadable(folder: Path, files: Iterable[str]) -> list[str]:
    """Return a line for each file that matches the manifest but has invalid content; if there is none, a line for the
    first incomplete tensor."""
    found: list[str] = []
    entries: list[safetensors_header.Entry] = []
    for name in files:
        try:
            if name == STATE:
                if not isinstance(json.loads((folder / name).read_bytes()), dict):
                    raise ValueError("it contains no JSON object")
            elif name == CONFIG:
                if not isinstance(read_yaml(folder / name), dict):
                    raise ValueError("it contains no mapping")
            elif name.endswith(safetensors_header.SUFFIX):
                entries += safetensors_header.read(folder / name).values()
        except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
            found.append(f"its file {name} is not a valid checkpoint file: {' '.join(str(error).split())}")
    lacking = None if found else safetensors_header.incomplete(entries)
    return [*found, *([lacking] if lacking else [])]


def all_checkpoints(run_dir: Path) -> list[Path]:
    """Return all checkpoints in a run's folder, newest first, including damaged checkpoints and those of other runs."""
    folders = [path for path in (run_dir / "checkpoints").glob("step_*") if path.name[5:].isdigit() and path.is_dir()]
    return sorted(folders, key=lambda path: int(path.name[5:]), reverse=True)


def run_of(folder: Path) -> str | None:
    """Return the id of the run that wrote a checkpoint; None if its state.json is damaged."""
    try:
        found = json.loads((folder / STATE).read_bytes()).get("run")
    except (OSError, ValueError, RecursionError, AttributeError):
        return None
    return found if isinstance(found, str) else None


def foreign_checkpoints(run_dir: Path) -> list[tuple[Path, str]]:
    """Return the checkpoints in a run's folder that other runs wrote, newest first, each with a clause that names the
    other run. Raises ConfigError if run.json is damaged."""
    held = record.read(run_dir)
    found = [(folder, run_of(folder)) for folder in all_checkpoints(run_dir)]
    # A damaged checkpoint has no reliable run id, and is passed over for its damage.
    own = None if held is None else held.id
    found = [(folder, run) for folder, run in found if run == own or not _is_state_damaged(folder)]
    if held is None:
        named = {run: folder for folder, run in found if run is not None}
        return [] if len(named) < 2 else [(folder, f"it is of run {run}") for run, folder in named.items()]
    return [(folder, f"it is of run {run}") for folder, run in found if run not in (None, held.id)]


def _is_state_damaged(folder: Path) -> bool:
    """Return whether a checkpoint has an intact manifest that its state.json does not match."""
    try:
        return sum_of(folder / STATE) != read(folder)[STATE]
    except ValueError:
        return False
    except OSError:
        return True


def list_checkpoints(run_dir: Path) -> list[Path]:
    """Return the checkpoints of a folder's own run, newest first, including damaged checkpoints. Raises ConfigError if
    several runs may own the folder."""
    foreign = foreign_checkpoints(run_dir)
    if foreign and record.read(run_dir) is None:
        several = " and ".join(f"{folder.name} ({why})" for folder, why in foreign)
        raise ConfigError(
            f"{run_dir} holds checkpoints of several runs, and no {record.RECORD} names its own run: {several}. "
            "Move the other runs' checkpoints to folders of their own."
        )
    others = [folder for folder, _ in foreign]
    return [folder for folder in all_checkpoints(run_dir) if folder not in others]


def checkpoints_at(path: Path, also: str = "") -> list[Path]:
    """Return the checkpoints at a path (a run's folder or a checkpoint), newest first, including damaged checkpoints.
    Raises ConfigError if there are none. `also`: other paths that the caller accepts, for the message."""
    found = list_checkpoints(path.parent if path.name == "checkpoints" else path)
    if not found and path.is_dir() and ((path / MANIFEST).exists() or path.name.startswith("step_")):
        found = [path]
    if not found:
        foreign = foreign_checkpoints(path)
        if foreign:
            raise ConfigError(
                f"{path} holds no checkpoint of its own run: {foreign[0][0].name} is there, but {foreign[0][1]}. Give "
                "that checkpoint's own folder to use it."
            )
        raise ConfigError(
            f"{path} holds no checkpoint. Give a run folder or one of its checkpoints/step_XXXXXXX{also}."
        )
    return found


def kind_of_model(path: Path) -> str:
    """Return the kind of a trained model's folder: huggingface, checkpoint (also for a run) or weights. Raises
    ConfigError for other paths."""
    if (path / "config.json").exists():
        return "huggingface"
    if any((path / name).exists() for name in (MANIFEST, STATE, "checkpoints")):
        return "checkpoint"
    if any((path / name).is_file() for name in (CONFIG, FOLDER_SUMS)):
        return "weights"
    raise ConfigError(
        f"--checkpoint ({path}) is not a model: it must be a run folder, one of its checkpoints/step_XXXXXXX, a folder "
        "of `python -m checkpoint.export` or `python -m models.convert`, or a Hugging Face folder with config.json."
    )


def good_checkpoint_at(path: Path) -> Path:
    """Return the checkpoint at a path, or a run's newest good checkpoint, after checking every byte. Prints skipped
    checkpoints on stderr. Raises ConfigError if no checkpoint is good."""
    good, passed_over = newest_good(checkpoints_at(path), verify)
    if good is None:
        raise ConfigError(f"{path} holds no good checkpoint: {'; '.join(passed_over)}. {ADVICE}.")
    for line in passed_over:
        print(line, file=sys.stderr)
    return good


def newest_good(folders: list[Path], check: Check) -> tuple[Path | None, list[str]]:
    """Return the first folder in which `check` finds no problem, and a line for each damaged folder before it. Raises
    ConfigError for a checkpoint in another version's format."""
    passed_over: list[str] = []
    for folder in folders:
        problem = check(folder)
        if problem is None:
            return folder, passed_over
        if is_of_other_format(folder):
            raise ConfigError(
                f"checkpoint {folder} cannot be read: {problem}. Use the version that wrote it, or name another "
                "checkpoint."
            )
        passed_over.append(f"skipped {folder}: {problem}")
    return None, passed_over


def is_of_other_format(folder: Path) -> bool:
    """Return whether a folder has an intact manifest in a format that this version does not read."""
    try:
        content = json.loads((folder / MANIFEST).read_bytes())
        found = content.pop(SUM)
        return bool(content["format"] != FORMAT and found == own_sum(content))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False


def put_in_place(temporary: Path, folder: Path) -> None:
    """Rename a complete checkpoint to its final name. An earlier checkpoint with this name is deleted afterwards, so a
    kill loses no checkpoint. Raises OSError."""
    replaced = folder.with_name(folder.name + REPLACED)
    if folder.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        folder.rename(replaced)
    temporary.rename(folder)
    sync_folder(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def tidy(run_dir: Path) -> None:
    """Clean up after a killed job: delete half-written and half-deleted checkpoints, and restore the name of a replaced
    one. Only for the process that has locked the run's folder, while no save is in progress. Raises OSError."""
    for replaced in (run_dir / "checkpoints").glob(f"step_*{REPLACED}"):
        folder = replaced.with_name(replaced.name.removesuffix(REPLACED))
        if folder.exists():
            shutil.rmtree(replaced, ignore_errors=True)
        else:
            replaced.rename(folder)
    for leftover in (run_dir / "checkpoints").glob(f"step_*{TEMPORARY}"):
        shutil.rmtree(leftover, ignore_errors=True)


def prune(newest: Path, keep: int, keep_every: int) -> None:
    """Delete the checkpoints that are older than `newest`, which was just verified. Keeps the newest `keep` checkpoints
    (0: all), steps divisible by `keep_every` (0: none), and incomplete checkpoints. Raises OSError."""
    if keep == 0:
        return
    siblings = list_checkpoints(newest.parent.parent)
    older = [folder for folder in siblings[siblings.index(newest) + 1 :] if problem_with(folder) is None]
    for folder in older[keep - 1 :]:
        if keep_every == 0 or int(folder.name[5:]) % keep_every != 0:
            # renamed first: a killed deletion leaves no broken checkpoint
            doomed = folder.with_name(folder.name + TEMPORARY)
            folder.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)
