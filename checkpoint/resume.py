"""The start of a job on all ranks: lock the run's folder, and find the checkpoint to resume from. checkpoint/start.py
decides; the ranks verify the checkpoint together."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from base import checksums, files
from base.errors import ConfigError
from checkpoint import manifest, start
from checkpoint.record import Keeper, Record
from checkpoint.start import Start
from configs.changes import Change
from configs.schema import Config
from data.identity import Difference, Identity
from parallel.joint_errors import raise_together, raised_together

LOCK = "job.lock"
GRACE = 3.0  # seconds for a job that was just killed to release its folder


class Claim:
    """Rank 0's lock on a run's folder: a locked file that names the process. It is released if the process dies."""

    def __init__(self, run_dir: Path):
        """Wait at most GRACE seconds for the lock. Raises ConfigError if another job keeps the lock, or the folder is
        not writable."""
        self._run_dir = run_dir
        self._keeper: Keeper | None = None
        path = run_dir / LOCK
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "a+")
            deadline = time.monotonic() + GRACE
            # A record lock: over NFS it holds between hosts, and unlike flock's it is not inherited by a child that
            # outlives us.
            while not self._locked():
                if time.monotonic() > deadline:
                    holder = path.read_text()
                    self._file.close()
                    raise ConfigError(
                        f"run_dir ({run_dir}) is in use by another job: {_holder(holder)}. Two jobs would "
                        "overwrite each other's checkpoints. Stop that job, or give this one another name or run_dir."
                    )
                time.sleep(0.1)
            self._file.truncate(0)
            process = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
            self._file.write(json.dumps(process))
            self._file.flush()
            manifest.tidy(run_dir)
            files.tidy(run_dir)
        except OSError as error:
            raise ConfigError(
                f"run_dir ({run_dir}) cannot be written: {error.strerror}. Free disk space, or give a writable folder."
            ) from error

    def _locked(self) -> bool:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            print(f"run_dir cannot be locked ({error.strerror}): a second job could write to it, too", flush=True)
        return True

    def keep(self, record: Record) -> None:
        """Write the record of the run that this process works on, and update it from now on. Raises OSError."""
        self._keeper = Keeper(self._run_dir, record)

    def note_saved(self, step: int) -> None:
        """Record that the checkpoint of a step was saved, so that later starts must find it. Raises OSError."""
        if self._keeper is not None:
            self._keeper.note(saved=step)

    def release(self) -> None:
        """Release the folder, so that other jobs can lock it."""
        if self._keeper is not None:
            self._keeper.close()
        self._file.close()


def _holder(text: str) -> str:
    with contextlib.suppress(ValueError, KeyError, TypeError):
        content = json.loads(text)
        return f"process {content['pid']} on {content['host']}, since {content['since']}"
    return "an unknown process"


def claim(run_dir: Path) -> Claim | None:
    """Lock the folder against other jobs, and return the lock on rank 0, None elsewhere. A collective call. Raises
    ConfigError on every rank."""
    with raised_together():
        return Claim(run_dir) if dist.get_rank() == 0 else None


@dataclass(frozen=True)
class Resumption:
    """The start of this job, and the settings and data that differ from the checkpoint's; equal on every rank."""

    start: Start
    settings: list[Change]
    data: list[Difference]


def find(config: Config, vocab_size: int, identity: Identity, passed_over: Callable[[Path, str], None]) -> Resumption:
    """Decide how the command starts, verify every byte of its checkpoint on all ranks together, and compare the
    checkpoint's model, settings and data with the config's. Rank 0 calls `passed_over` with the run's folder and a line
    for each checkpoint that is not good. A collective call. Raises ConfigError on every rank."""

    def decide() -> Resumption:
        found = start.find(config, _check_together)
        for line in found.passed_over:
            passed_over(Path(config.run_dir), line)
        if found.checkpoint is not None:
            start.check_model(config, vocab_size, found.checkpoint)
        return Resumption(found, start.changed_settings(config, found), start.changed_data(config, found, identity))

    answer = _with_checks(decide)
    assert isinstance(answer, Resumption)
    return answer


def newest(run_dir: Path, passed_over: Callable[[Path, str], None]) -> Path | None:
    """Return the newest good checkpoint of a folder's run, after verifying every byte, or None. A collective call. Rank
    0 calls `passed_over` with the folder and a line for each checkpoint that is not good."""

    def look() -> Path | None:
        good, lines = manifest.newest_good(manifest.list_checkpoints(run_dir), _check_together)
        for line in lines:
            passed_over(run_dir, line)
        return good

    answer: Path | None = _with_checks(look)
    return answer


def _with_checks(work: Callable[[], Any]) -> Any:
    """Run `work` on rank 0, while the other ranks help to verify the checkpoints that it checks. Returns its result on
    every rank. Raises ConfigError on every rank."""
    answer, problem = None, None
    if dist.get_rank() == 0:
        try:
            answer = work()
        except (OSError, ValueError) as error:  # ConfigError, or a file that vanished meanwhile
            problem = str(error)
        _broadcast(None)  # nothing more to check
    else:
        while (candidate := _broadcast(None)) is not None:
            _check_share(*candidate)
    raise_together(problem)
    return _broadcast(answer)


def _check_together(folder: Path) -> str | None:
    """Return the first problem of a checkpoint, or None, after every rank verified a share of its files. Called only on
    rank 0; the other ranks wait for files to verify."""
    problem = manifest.problem_with(folder)
    if problem is not None or dist.get_world_size() == 1:
        return problem or manifest.verify(folder)
    files = manifest.read(folder)
    _broadcast((folder, files))
    found = _check_share(folder, files) or manifest.unreadable(folder, files)
    return found[0] if found else None


def _check_share(folder: Path, files: dict[str, checksums.FileSum]) -> list[str]:
    """Verify this rank's share of the files, and return the problems that all ranks found."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    found: list[Any] = [None] * world_size
    dist.all_gather_object(found, checksums.wrong_files(folder, files, sorted(files)[rank::world_size]))
    return [problem for problems in found for problem in problems]


def _broadcast(value: Any) -> Any:
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]
