"""How a run starts: alone in its folder, and from the newest checkpoint that all ranks together found good."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from configs.schema import Config, ConfigError
from training import contents, events, manifest

LOCK = "job.lock"
GRACE = 3.0  # seconds that a job which was just killed has to let go of its folder


class Claim:
    """Rank 0's hold on a run's folder: a lock on a file that names the holder. The kernel lets go of it when the process dies."""

    def __init__(self, run_dir: Path):
        """Wait at most GRACE seconds for the lock. Raises ConfigError where another job holds it, or the folder cannot be written."""
        path = run_dir / LOCK
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            self._file = open(path, "a+")
            deadline = time.monotonic() + GRACE
            # A record lock: over NFS it holds between hosts, and unlike flock's it is not inherited by a child that outlives us.
            while not self._locked():
                if time.monotonic() > deadline:
                    holder = path.read_text()
                    self._file.close()
                    raise ConfigError(
                        f"run_dir ({run_dir}) is in use by another job: {_holder(holder)}. Two jobs would write over each other's "
                        "checkpoints. Stop that one, or give this one another name or run_dir."
                    )
                time.sleep(0.1)
            self._file.truncate(0)
            self._file.write(json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}))
            self._file.flush()
            manifest.tidy(run_dir)
        except OSError as error:
            raise ConfigError(
                f"run_dir ({run_dir}) cannot be written: {error.strerror}. Make room or give a folder that can be written."
            ) from error

    def _locked(self) -> bool:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            print(f"run_dir has no locks ({error.strerror}): nothing keeps a second job out of it", flush=True)
        return True

    def release(self) -> None:
        """Let another job have the folder."""
        self._file.close()


def _holder(text: str) -> str:
    with contextlib.suppress(ValueError, KeyError, TypeError):
        content = json.loads(text)
        return f"process {content['pid']} on {content['host']}, since {content['since']}"
    return "it does not say which"


def claim(run_dir: Path) -> Claim | None:
    """Keep other jobs out of the folder; on rank 0 the hold on it. A collective call. Raises ConfigError on every rank."""
    held, problem = None, None
    if dist.get_rank() == 0:
        try:
            held = Claim(run_dir)
        except ConfigError as error:
            problem = str(error)
    contents.raise_together(problem)
    return held


def find(config: Config) -> Path | None:
    """The checkpoint to start from, the same on every rank, or None. Every byte of it was read, each by one of the ranks.

    Says, once, which checkpoints it passed over. A collective call. Raises ConfigError on every rank.
    """
    folder, problem = None, None
    if dist.get_rank() == 0:
        try:
            folder, passed_over = manifest.find(config, _check_together)
            for line in passed_over:
                print(line, flush=True)
                events.record(Path(config.run_dir), "checkpoint_passed_over", line)
        except (OSError, ValueError) as error:  # ConfigError, or a file that went away meanwhile
            problem = str(error)
        _broadcast(None)  # no more to check
    else:
        while (candidate := _broadcast(None)) is not None:
            _check_share(*candidate)
    contents.raise_together(problem)
    answer = _broadcast(None if folder is None else (folder, {}))
    return None if answer is None else answer[0]


def _check_together(folder: Path) -> str | None:
    """On rank 0, while the other ranks are in `find`: what is wrong with a checkpoint."""
    problem = manifest.problem_with(folder)
    if problem is not None or dist.get_world_size() == 1:
        return problem or manifest.verify(folder)
    files = manifest.read(folder)
    _broadcast((folder, files))
    found = _check_share(folder, files) or manifest.unreadable(folder, files)
    return found[0] if found else None


def _check_share(folder: Path, files: dict[str, manifest.FileSum]) -> list[str]:
    """What any rank found wrong with the files; each reads some of them."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    found: list[Any] = [None] * world_size
    dist.all_gather_object(found, manifest.wrong_files(folder, files, sorted(files)[rank::world_size]))
    return [problem for problems in found for problem in problems]


def _broadcast(value: Any) -> Any:
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]
