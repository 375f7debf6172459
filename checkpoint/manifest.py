"""Which checkpoints a run has, and whether they are whole. Reads files only: imports in no time, before torch.

A checkpoint folder is good if its manifest, which was written last, names every file with its size and checksum, and
all of them are so. The checksum is XXH3 (128 bits): 10 GB/s on one core, where CRC-32 and SHA-256 make 0.5 to 2, so
that it can be checked at every save and every start. It finds damage, not forgery; for that, nothing that is loaded can
be code.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import yaml

from checkpoint import record, safetensors_header
from configs.checksums import FOLDER_SUMS, SUM, FileSum, own_sum, size_problem, sum_of, wrong_files
from configs.files import read_yaml, writing
from configs.schema import ConfigError

FORMAT = 2
MANIFEST = "manifest.json"
STATE = "state.json"
CONFIG = "config.yaml"
TEMPORARY = ".tmp"  # being written, or being deleted
REPLACED = ".replaced"  # a checkpoint whose step was saved anew: goes when the new one is in its place
Check = Callable[[Path], str | None]


def folder_of(run_dir: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return run_dir / "checkpoints" / f"step_{step:07d}"


def write(folder: Path, step: int, files: dict[str, FileSum], buffer: memoryview | None = None) -> None:
    """Write the manifest of a folder whose files are all on disk. Raises OSError."""
    content = {"format": FORMAT, "step": step, "files": {name: vars(files[name]) for name in sorted(files)}}
    write_text(folder / MANIFEST, json.dumps({**content, SUM: own_sum(content)}, indent=1), buffer)


def write_text(path: Path, text: str, buffer: memoryview | None = None) -> FileSum:
    """Write a small file through to the disk, and sum it up as `sum_of`. Raises OSError."""
    with writing(path), open(path, "wb") as stream:
        stream.write(text.encode())
        stream.flush()
        os.fsync(stream.fileno())
    return sum_of(path, buffer)


def sync_folder(folder: Path) -> None:
    """Make renames and new names in a folder survive a power cut. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read(folder: Path) -> dict[str, FileSum]:
    """The files that a folder's manifest names. Raises ValueError, in words, where there is no whole manifest."""
    try:
        content = json.loads((folder / MANIFEST).read_bytes())
        if content["format"] != FORMAT:
            raise _Refused(f"its format ({content['format']}) is not the one this version reads ({FORMAT})")
        if content.pop(SUM) != own_sum(content):
            raise _Refused(f"its {MANIFEST} does not have the checksum that stands in it")
        number = folder.name.removeprefix("step_")
        if number.isdigit() and folder.name != number and int(number) != content["step"]:
            raise _Refused(f"its {MANIFEST} is that of step {content['step']}")
        files = {name: FileSum(**entry) for name, entry in content["files"].items()}
    except FileNotFoundError:
        raise _Refused(f"it has no {MANIFEST}") from None
    except _Refused:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _Refused(f"its {MANIFEST} cannot be read ({type(error).__name__}: {error})") from error
    missing = {STATE, CONFIG} - files.keys()
    if missing or any(Path(name).name != name for name in files):
        raise _Refused(
            f"its {MANIFEST} " + (f"does not name {min(missing)}" if missing else "names files of other folders")
        )
    return files


class _Refused(ValueError):
    """Why a manifest is none, in words."""


def problem_with(folder: Path) -> str | None:
    """Why the folder is no complete checkpoint, by names and sizes alone, in one line; None if it is one."""
    return next(iter(_problems(folder, content=False)), None)


def verify(folder: Path) -> str | None:
    """Why the folder is no good checkpoint, with every byte read, in one line; None if it is one."""
    return next(iter(problems(folder)), None)


def problems(folder: Path) -> list[str]:
    """All that is wrong with a checkpoint folder, with every byte read."""
    return _problems(folder, content=True)


def _problems(folder: Path, content: bool) -> list[str]:
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
    """A line for each file that is as the manifest says but not what it should be, and for tensors that are not
    complete."""
    found: list[str] = []
    entries: list[safetensors_header.Entry] = []
    for name in files:
        try:
            if name == STATE:
                if not isinstance(json.loads((folder / name).read_bytes()), dict):
                    raise ValueError("no JSON object")
            elif name == CONFIG:
                if not isinstance(read_yaml(folder / name), dict):
                    raise ValueError("no mapping")
            elif name.endswith(safetensors_header.SUFFIX):
                entries += safetensors_header.read(folder / name).values()
        except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
            found.append(f"its file {name} is none of a checkpoint: {' '.join(str(error).split())}")
    lacking = None if found else safetensors_header.incomplete(entries)
    return [*found, *([lacking] if lacking else [])]


def all_checkpoints(run_dir: Path) -> list[Path]:
    """All checkpoint folders below a run folder, newest first, good or not, whichever run wrote them."""
    folders = [path for path in (run_dir / "checkpoints").glob("step_*") if path.name[5:].isdigit() and path.is_dir()]
    return sorted(folders, key=lambda path: int(path.name[5:]), reverse=True)


def run_of(folder: Path) -> str | None:
    """The id of the run that wrote a checkpoint; None where its state is damaged."""
    try:
        found = json.loads((folder / STATE).read_bytes()).get("run")
    except (OSError, ValueError, RecursionError, AttributeError):
        return None
    return found if isinstance(found, str) else None


def foreign_checkpoints(run_dir: Path) -> list[tuple[Path, str]]:
    """The checkpoints in a run folder that another run wrote, newest first, each with why. Raises ConfigError for a
    broken run.json."""
    held = record.read(run_dir)
    found = [(folder, run_of(folder)) for folder in all_checkpoints(run_dir)]
    # A damaged one does not say whose it is, and is passed over for its damage.
    own = None if held is None else held.id
    found = [(folder, run) for folder, run in found if run == own or not _is_state_damaged(folder)]
    if held is None:
        named = {run: folder for folder, run in found if run is not None}
        return [] if len(named) < 2 else [(folder, f"it is of run {run}") for run, folder in named.items()]
    return [(folder, f"it is of run {run}") for folder, run in found if run not in (None, held.id)]


def _is_state_damaged(folder: Path) -> bool:
    """Whether a checkpoint's manifest is whole, and its state is not what that says."""
    try:
        return sum_of(folder / STATE) != read(folder)[STATE]
    except ValueError:
        return False
    except OSError:
        return True


def list_checkpoints(run_dir: Path) -> list[Path]:
    """The checkpoints of a folder's run, newest first, good or not; none that another run wrote. Raises ConfigError
    where it cannot be told which run that is."""
    foreign = foreign_checkpoints(run_dir)
    if foreign and record.read(run_dir) is None:
        several = " and ".join(f"{folder.name} ({why})" for folder, why in foreign)
        raise ConfigError(
            f"{run_dir} holds checkpoints of several runs, and no {record.RECORD} says which is its own: {several}."
        )
    others = [folder for folder, _ in foreign]
    return [folder for folder in all_checkpoints(run_dir) if folder not in others]


def checkpoints_at(path: Path, also: str = "") -> list[Path]:
    """The checkpoints that a path stands for, newest first, good or not: all of a run, or one. Raises ConfigError,
    which says what else (`also`) the caller takes, where there are none."""
    found = list_checkpoints(path.parent if path.name == "checkpoints" else path)
    if not found and path.is_dir() and ((path / MANIFEST).exists() or path.name.startswith("step_")):
        found = [path]
    if not found:
        foreign = foreign_checkpoints(path)
        if foreign:
            raise ConfigError(f"{path} holds no checkpoint of its own run: {foreign[0][0].name}: {foreign[0][1]}.")
        raise ConfigError(
            f"{path} holds no checkpoint. Give a run folder or one of its checkpoints/step_XXXXXXX{also}."
        )
    return found


def kind_of_model(path: Path) -> str:
    """What a trained model's folder is: huggingface, checkpoint (also a run) or weights. Raises ConfigError for what is
    none."""
    if (path / "config.json").exists():
        return "huggingface"
    if any((path / name).exists() for name in (MANIFEST, STATE, "checkpoints")):
        return "checkpoint"
    if any((path / name).is_file() for name in (CONFIG, FOLDER_SUMS)):
        return "weights"
    raise ConfigError(
        f"--checkpoint ({path}) is no model: it must be a run folder, one of its checkpoints/step_XXXXXXX, a folder of "
        "`python -m checkpoint.export` or `python -m models.convert`, or a Hugging Face folder with config.json."
    )


def good_checkpoint_at(path: Path) -> Path:
    """The newest checkpoint of a run, or the given one, with every byte checked; says on standard error what it passed
    over.

    Raises ConfigError where there is none.
    """
    good, passed_over = newest_good(checkpoints_at(path), verify)
    if good is None:
        raise ConfigError(f"{path} holds no good checkpoint: {'; '.join(passed_over)}.")
    for line in passed_over:
        print(line, file=sys.stderr)
    return good


def newest_good(folders: list[Path], check: Check) -> tuple[Path | None, list[str]]:
    """The first folder that `check` finds nothing wrong with, and a line for each before it.

    Damaged ones are passed over. One that another version of the code wrote is not understood: raises ConfigError.
    """
    passed_over: list[str] = []
    for folder in folders:
        problem = check(folder)
        if problem is None:
            return folder, passed_over
        if is_of_other_format(folder):
            raise ConfigError(
                f"checkpoint {folder} cannot be read: {problem}. Use the version that wrote it, or name another."
            )
        passed_over.append(f"passed over {folder}: {problem}")
    return None, passed_over


def is_of_other_format(folder: Path) -> bool:
    """Whether a whole manifest is there, of a format that this version does not read."""
    try:
        content = json.loads((folder / MANIFEST).read_bytes())
        found = content.pop(SUM)
        return bool(content["format"] != FORMAT and found == own_sum(content))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False


def put_in_place(temporary: Path, folder: Path) -> None:
    """Give a complete checkpoint its name. One that is there already stays until then, whatever moment a kill picks.
    Raises OSError."""
    replaced = folder.with_name(folder.name + REPLACED)
    if folder.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        folder.rename(replaced)
    temporary.rename(folder)
    sync_folder(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def tidy(run_dir: Path) -> None:
    """Take up where a killed job stopped: delete half-written and half-deleted checkpoints, give a replaced one its
    name back.

    Only for who holds the run's folder, and while no save is under way. Raises OSError.
    """
    for replaced in (run_dir / "checkpoints").glob(f"step_*{REPLACED}"):
        folder = replaced.with_name(replaced.name.removesuffix(REPLACED))
        if folder.exists():
            shutil.rmtree(replaced, ignore_errors=True)
        else:
            replaced.rename(folder)
    for leftover in (run_dir / "checkpoints").glob(f"step_*{TEMPORARY}"):
        shutil.rmtree(leftover, ignore_errors=True)


def prune(newest: Path, keep: int, keep_every: int) -> None:
    """Delete checkpoints older than `newest`, which was just verified: all but `keep` in all (0 keeps all), and but
    each `keep_every`-th step (0: none). What is not whole is left for its owner to look at. Raises OSError."""
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
