"""Saving beside the training: a snapshot between two steps, then a thread that writes while the next steps run.

A save has two parts on every rank: `write`, in which each rank's thread writes and reads back its own file, and
`commit`, in which rank 0's thread adds the small files, puts the manifest and the folder's name in place and deletes
old checkpoints. The threads never communicate: `poll`, which every rank calls between two steps, asks over the CPU how
far all are. Where any rank fails, all raise.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import parallel.megatron  # noqa: F401  (before anything else of Megatron-core: see parallel/megatron/startup.py)

# isort: split
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.optimizer import MegatronOptimizer

from checkpoint import manifest, safetensors_header
from checkpoint import state as checkpoint_state
from checkpoint.shards import NotFinite, SaveCancelled, ShardWriter
from configs.checksums import FileSum
from configs.compose import to_yaml
from configs.schema import Config
from memory.host_link import HostLink
from models.parallelize import frozen_weights
from optim.tiers.state_snapshot import StateSnapshot
from optim.tiers.tiers import tiers_of

WRITE_TIMEOUT = 3600.0  # seconds that one rank's file, or the commit, may take before the run gives up
CLOSE_TIMEOUT = 10.0  # seconds that a run which failed waits for its writer to notice
VISIBLE_TIMEOUT = 90.0  # seconds until rank 0 sees what another host wrote; NFS caches names for up to 60
NICENESS = 5  # of the writing threads: training goes first where cores are short
RUNNING, DONE, FAILED = 0, 1, -1


class SaveError(RuntimeError):
    """A checkpoint could not be written, and why, in one line; raised on every rank. Earlier ones are untouched."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is complete, on disk, read back and in place."""

    folder: Path
    step: int
    num_bytes: int
    seconds: float  # from the snapshot until `poll` saw it
    pause_seconds: float  # of them the training stood still
    complaint: str | None  # why older checkpoints could not be deleted


class Saver:
    """Saves a model again and again, one save at a time. Every rank makes every call, but for `close`."""

    def __init__(self, config: Config, link: HostLink):
        """A collective call, once the process groups are there. `link`: what snapshots leave the device by."""
        self._snapshot = ShardWriter(link)
        self.last_step: int | None = None  # the step that was saved last, unless the model was loaded since
        self._save: _Save | None = None
        self._hold: StateSnapshot | None = None  # of the save that was started last
        # Called on rank 0, in the writing thread, before a checkpoint gets its name; what it raises fails the save.
        self.before_name: Callable[[], None] = _nothing
        self.config_text = to_yaml(config)  # now, because it takes longer than a snapshot
        # The state of writers is asked for over the CPU, whatever training uses: no step waits for it on the device.
        gloo = dist.get_backend() == "gloo"
        self._group = (
            None if gloo else dist.new_group(backend="gloo", timeout=timedelta(seconds=config.parallel.timeout_seconds))
        )

    @property
    def pending(self) -> bool:
        """Whether a save is under way; the same on every rank."""
        return self._save is not None

    def start(
        self,
        chunks: list[DistributedDataParallel],
        optimizer: MegatronOptimizer,
        state: dict[str, Any],
        folder: Path,
        keep: int = 0,
        keep_every: int = 0,
    ) -> Saved | None:
        """Take a snapshot, and begin to write it. Waits for an earlier save first, and returns that. `state`: what the
        checkpoint says beside its tensors, as JSON has it; its `step` is that of the folder's name.

        Once the checkpoint is in place, older ones are deleted as manifest.prune says. Raises SaveError for the earlier
        save.
        """
        named = folder.name.removeprefix("step_")
        step = state["step"]
        assert not named.isdigit() or int(named) == step, f"{folder} is no name for step {step}"
        earlier = self.finish()
        begin = time.perf_counter()
        with frozen_weights(chunks):
            tensors, tiers = checkpoint_state.tensors_to_save(chunks, optimizer), tiers_of(optimizer)
            self._hold = None if tiers is None else tiers.hold()
            self._snapshot.take(tensors, self._hold)
        text = json.dumps(checkpoint_state.describe(optimizer, state), indent=1)
        self._save = _Save(
            folder,
            step,
            {manifest.CONFIG: self.config_text, manifest.STATE: text},
            self._snapshot,
            self._hold,
            keep,
            keep_every,
            begin,
        )
        self._save.before_name = self.before_name
        self.last_step = step
        return earlier

    def poll(self) -> Saved | None:
        """What has become complete since the last call, if anything. Costs a small all-reduce while a save is under
        way.

        Raises SaveError on every rank where any rank failed; what was written of that checkpoint is deleted.
        """
        save = self._save
        if save is None:
            return None
        state = torch.tensor(save.part.state)
        dist.all_reduce(state, op=dist.ReduceOp.MIN, group=self._group)
        if int(state) == RUNNING:
            return None
        results: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(
            results, save.part.result if int(state) == DONE else save.part.problem, group=self._group
        )
        if int(state) == FAILED:
            self._save = self.last_step = None
            save.abandon(self._group)
            problem = next(f"rank {rank}: {text}" for rank, text in enumerate(results) if text is not None)
            raise SaveError(
                f"checkpoint {save.folder} cannot be written ({problem}). Earlier checkpoints are untouched."
            )
        if not save.committing:
            save.commit([entry for entry in results if entry is not None])
            return None
        self._save = None
        num_bytes, complaint = results[0]
        return Saved(save.folder, save.step, num_bytes, time.perf_counter() - save.begin, save.pause, complaint)

    def finish(self) -> Saved | None:
        """Wait for the save under way, if any; what became complete. Raises SaveError."""
        saved = None
        while self._save is not None:
            self._save.part.wait(WRITE_TIMEOUT)
            saved = self.poll()
        return saved

    def cancel(self, reason: str) -> None:
        """Give up the save under way, if this rank still can; all ranks hear of it as of any failure."""
        if self._save is not None:
            self._save.cancel(reason)

    def close(self) -> None:
        """Stop writing what this run can no longer complete, and free its space. Asks no other rank: they may be
        gone."""
        if self._save is not None:
            self._save.cancel("the run ended")
            self._save.part.wait(CLOSE_TIMEOUT)
            self._save.delete()
            self._save = None
        if self._hold is not None:
            self._hold.close()


def _nothing() -> None:
    pass


class _Save:
    """One save: what is written where, and the part of it that is under way."""

    def __init__(
        self,
        folder: Path,
        step: int,
        small: dict[str, str],
        snapshot: ShardWriter,
        hold: StateSnapshot | None,
        keep: int,
        keep_every: int,
        begin: float,
    ):
        self.folder, self.step, self.begin = folder, step, begin
        self.temporary = folder.with_name(folder.name + manifest.TEMPORARY)
        self.cancelled = threading.Event()
        self.committing = False
        self._small, self._snapshot, self._keep, self._keep_every = small, snapshot, keep, keep_every
        self._hold = hold
        self._reason = "cancelled"
        self.before_name: Callable[[], None] = _nothing
        self._rank = dist.get_rank()
        self.part = _Part(self._write)
        self.pause = time.perf_counter() - begin

    def _write(self) -> tuple[str, FileSum]:
        try:
            return self._write_file()
        finally:
            self._release()

    def _write_file(self) -> tuple[str, FileSum]:
        # Not its parents: a run's folder that was taken away must not be made again with nothing but this in it.
        for folder in (self.temporary.parent, self.temporary):
            folder.mkdir(exist_ok=True)
        name = f"rank_{self._rank:05d}{safetensors_header.SUFFIX}"
        try:
            return name, self._snapshot.write(self.temporary / name, self.cancelled)
        except SaveCancelled:
            raise _Broken(self._reason) from None
        except NotFinite as error:
            raise _Broken(str(error)) from None

    def commit(self, files: list[tuple[str, FileSum]]) -> None:
        """Let rank 0 complete the folder, whose files of all ranks these are."""
        self.committing = True
        self.part = _Part(lambda: self._commit(dict(files))) if dist.get_rank() == 0 else _Part(None)

    def _commit(self, files: dict[str, FileSum]) -> tuple[int, str | None]:
        for name in files:
            _wait_for(self.temporary / name)
        if self.cancelled.is_set():
            raise _Broken(self._reason)
        for name, text in self._small.items():
            files[name] = manifest.write_text(self.temporary / name, text, self._snapshot.buffer)
        for path in self.temporary.iterdir():  # of a save that was killed on more ranks
            if path.name not in files:
                path.unlink()
        entries = (
            entry
            for name in files
            if name.endswith(safetensors_header.SUFFIX)
            for entry in safetensors_header.read(self.temporary / name).values()
        )
        lacking = safetensors_header.incomplete(entries)
        assert lacking is None, lacking
        manifest.write(self.temporary, self.step, files, self._snapshot.buffer)
        manifest.sync_folder(self.temporary)
        self.before_name()
        manifest.put_in_place(self.temporary, self.folder)
        complaint = None
        try:
            manifest.prune(self.folder, self._keep, self._keep_every)
        except OSError as error:  # the new one is there all the same
            complaint = f"checkpoints older than {self.folder} cannot be deleted: {error}"
        return sum(entry.size for entry in files.values()), complaint

    def _release(self) -> None:
        """Let updates go on that wait until the state off the device is written."""
        if self._hold is not None:
            self._hold.close()

    def cancel(self, reason: str) -> None:
        """Have the writing end soon."""
        self._reason = reason
        self.cancelled.set()

    def abandon(self, group: dist.ProcessGroup | None) -> None:
        """Free the space of what was written: the disk may be full. A collective call."""
        self.cancel("another rank failed")
        self.part.wait(CLOSE_TIMEOUT)
        self._release()  # also where the writer hangs
        dist.barrier(group)  # no rank adds to the folder any more
        self.delete()

    def delete(self) -> None:
        """Take the unfinished folder away, unless somebody is still at work in it; on rank 0."""
        if self._rank == 0 and not self.part.is_alive:
            shutil.rmtree(self.temporary, ignore_errors=True)


def _wait_for(path: Path) -> None:
    """Until a file that another host has written is seen here: network file systems take their time. Raises OSError."""
    deadline = time.monotonic() + VISIBLE_TIMEOUT
    while not path.exists():
        if time.monotonic() > deadline:
            raise OSError(f"rank 0 does not see {path}: run_dir must be in a file system that all nodes share")
        time.sleep(0.2)


class _Broken(Exception):
    """Why a part is given up, in words."""


class _Part:
    """Work in a thread of its own; None is no work."""

    def __init__(self, work: Callable[[], Any] | None):
        self.state = DONE if work is None else RUNNING
        self.result: Any = None
        self.problem: str | None = None
        self._work = work
        self._thread = threading.Thread(target=self._run, name="checkpoint writer", daemon=True)
        if work is not None:
            self._thread.start()

    def _run(self) -> None:
        assert self._work is not None
        with contextlib.suppress(OSError, AttributeError):  # Linux alone has it per thread
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        try:
            self.result = self._work()
            self.state = DONE
        except _Broken as error:
            self.problem, self.state = str(error), FAILED
        except OSError as error:
            name = getattr(error, "path", error.filename)
            self.problem, self.state = f"{error.strerror or error}" + (f": {name}" if name else ""), FAILED
        except Exception as error:  # whatever it is, the other ranks must hear of it
            self.problem, self.state = f"{type(error).__name__}: {error}", FAILED

    @property
    def is_alive(self) -> bool:
        """Whether somebody is at work."""
        return self._work is not None and self._thread.is_alive()

    def wait(self, seconds: float) -> None:
        """Until the work is done, or has failed by taking longer."""
        if self._work is not None:
            self._thread.join(seconds)
            if self._thread.is_alive():
                self.problem, self.state = f"not done within {seconds:g} s", FAILED
