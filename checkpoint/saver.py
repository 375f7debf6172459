"""Save checkpoints during training: take a snapshot between two steps, then write it in a thread while the next steps
run.

A save has two phases on every rank: `write`, in which each rank's thread writes its own file and reads it back, and
`commit`, in which rank 0's thread adds the small files, writes the manifest, renames the folder and deletes old
checkpoints. The threads never communicate: every rank calls `poll` between two steps, which exchanges the threads'
states over the CPU. If any rank fails, all ranks raise.
"""

from __future__ import annotations

import contextlib
import functools
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

from base.checksums import FileSum
from checkpoint import manifest, safetensors_header
from checkpoint import state as checkpoint_state
from checkpoint.shards import NotFinite, SaveCancelled, ShardWriter
from configs.compose import to_yaml
from configs.schema import Config
from memory.host_link import HostLink
from models.parallelize import frozen_weights
from optim.offload.optimizer import offload_of
from optim.offload.records import StateSnapshot

WRITE_TIMEOUT = 3600.0  # seconds until a rank's file, or the commit, counts as failed
CLOSE_TIMEOUT = 10.0  # seconds that a failed run waits for its writer to end
VISIBLE_TIMEOUT = 90.0  # seconds for rank 0 to see the files of other hosts; NFS caches names for up to 60
NICENESS = 5  # of the writing threads: training has priority if cores are short
RUNNING, DONE, FAILED = 0, 1, -1


class SaveError(RuntimeError):
    """Raised on every rank, with the reason in one line, if a checkpoint cannot be written."""


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint: on disk, read back, and renamed to its final name."""

    folder: Path
    step: int
    num_bytes: int
    seconds: float  # from the snapshot to `poll`
    pause_seconds: float  # of them, those in which training was stopped
    complaint: str | None  # the reason why older checkpoints could not be deleted


class Saver:
    """Saves a model repeatedly, one save at a time. All methods are collective, except `cancel` and `close`."""

    def __init__(self, config: Config, link: HostLink):
        """Create the saver, after the process groups. A collective call. `link`: copies snapshots to the host."""
        self._shard_writer = ShardWriter(link)
        self.last_step: int | None = None  # the step that was saved last, None after the model was loaded
        self._save: _Save | None = None
        self._offloaded: StateSnapshot | None = None  # of the save that was started last
        # Called on rank 0, in the writing thread, before a checkpoint is renamed; its exceptions fail the save.
        self.before_name: Callable[[], None] = lambda: None
        self.config_text = to_yaml(config)  # here, because it takes longer than a snapshot
        # Writers' states are exchanged over the CPU, whatever training uses: no step waits for them on the device.
        timeout = timedelta(seconds=config.parallel.timeout_seconds)
        self._group = None if dist.get_backend() == "gloo" else dist.new_group(backend="gloo", timeout=timeout)

    @property
    def pending(self) -> bool:
        """True while a save is in progress; equal on every rank."""
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
        """Take a snapshot and start to write it to `folder`. First waits for an earlier save, and returns the earlier
        checkpoint. `state`: content of state.json, with the step in the folder's name. When the checkpoint is complete,
        older checkpoints are deleted, except for the newest `keep` (0: all) and steps divisible by `keep_every` (0:
        none). Raises SaveError if the earlier save failed."""
        named = folder.name.removeprefix("step_")
        step = state["step"]
        assert not named.isdigit() or int(named) == step, f"{folder} is no name for step {step}"
        earlier = self.finish()
        begin = time.perf_counter()
        with frozen_weights(chunks):
            tensors, offload = checkpoint_state.tensors_to_save(chunks, optimizer), offload_of(optimizer)
            self._offloaded = None if offload is None else offload.snapshot()
            self._shard_writer.take(tensors, self._offloaded)
        text = json.dumps(checkpoint_state.describe(optimizer, state), indent=1)
        small = {manifest.CONFIG: self.config_text, manifest.STATE: text}
        prune = functools.partial(manifest.prune, folder, keep, keep_every)
        self._save = _Save(folder, step, small, self._shard_writer, self._offloaded, self.before_name, prune, begin)
        self.last_step = step
        return earlier

    def poll(self) -> Saved | None:
        """Return the checkpoint that was completed since the last call, or None. Costs a small all-reduce during a
        save. If any rank failed, deletes the incomplete checkpoint and raises SaveError on every rank."""
        save = self._save
        if save is None:
            return None
        state = torch.tensor(save.writer.state)
        dist.all_reduce(state, op=dist.ReduceOp.MIN, group=self._group)
        if int(state) == RUNNING:
            return None
        results: list[Any] = [None] * dist.get_world_size()
        own = save.writer.result if int(state) == DONE else save.writer.problem
        dist.all_gather_object(results, own, group=self._group)
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
        """Wait for the save in progress, if any, and return its checkpoint. Raises SaveError."""
        saved = None
        while self._save is not None:
            self._save.writer.wait(WRITE_TIMEOUT)
            saved = self.poll()
        return saved

    def cancel(self, reason: str) -> None:
        """Cancel the save in progress, which then fails on all ranks. No effect once this rank has written its file."""
        if self._save is not None:
            self._save.cancel(reason)

    def close(self) -> None:
        """Cancel a save that is in progress when the run ends, and free its disk space. Not collective: other ranks may
        have ended."""
        if self._save is not None:
            self._save.cancel("the run ended")
            self._save.writer.wait(CLOSE_TIMEOUT)
            self._save.delete()
            self._save = None
        if self._offloaded is not None:
            self._offloaded.close()


class _Save:
    """One save in progress: its files, its folder, and the writing thread of the current phase."""

    def __init__(
        self,
        folder: Path,
        step: int,
        small: dict[str, str],
        shard_writer: ShardWriter,
        offloaded: StateSnapshot | None,
        before_name: Callable[[], None],
        prune: Callable[[], None],
        begin: float,
    ):
        self.folder, self.step, self.begin = folder, step, begin
        self.temporary = folder.with_name(folder.name + manifest.TEMPORARY)
        self.cancelled = threading.Event()
        self.committing = False
        self._small, self._shard_writer, self._offloaded = small, shard_writer, offloaded
        self._before_name, self._prune = before_name, prune
        self._reason = "cancelled"
        self._rank = dist.get_rank()
        self.writer = _WriterThread(self._write)
        self.pause = time.perf_counter() - begin

    def _write(self) -> tuple[str, FileSum]:
        try:
            # Without their parents: a run's folder that was removed must not be created again for this alone.
            for folder in (self.temporary.parent, self.temporary):
                folder.mkdir(exist_ok=True)
            name = f"rank_{self._rank:05d}{safetensors_header.SUFFIX}"
            return name, self._shard_writer.write(self.temporary / name, self.cancelled)
        except SaveCancelled:
            raise _Failed(self._reason) from None
        except NotFinite as error:
            raise _Failed(str(error)) from None
        finally:
            self._release()

    def commit(self, files: list[tuple[str, FileSum]]) -> None:
        """Start the second phase, in which rank 0 completes the folder. `files`: name, size and checksum by rank."""
        self.committing = True
        self.writer = _WriterThread((lambda: self._commit(dict(files))) if self._rank == 0 else None)

    def _commit(self, files: dict[str, FileSum]) -> tuple[int, str | None]:
        for name in files:
            _wait_for(self.temporary / name)
        if self.cancelled.is_set():
            raise _Failed(self._reason)
        for name, text in self._small.items():
            files[name] = manifest.write_text(self.temporary / name, text, self._shard_writer.buffer)
        for path in self.temporary.iterdir():  # left by a killed save on more ranks
            if path.name not in files:
                path.unlink()
        lacking = safetensors_header.incomplete(safetensors_header.read_folder(self.temporary, files))
        assert lacking is None, lacking
        manifest.write(self.temporary, self.step, files, self._shard_writer.buffer)
        manifest.sync_folder(self.temporary)
        self._before_name()
        manifest.put_in_place(self.temporary, self.folder)
        complaint = None
        try:
            self._prune()
        except OSError as error:  # the new one is complete all the same
            complaint = f"checkpoints older than {self.folder} cannot be deleted: {error}"
        return sum(entry.size for entry in files.values()), complaint

    def _release(self) -> None:
        """Release the snapshot of offloaded state, so that updates waiting for it can continue."""
        if self._offloaded is not None:
            self._offloaded.close()

    def cancel(self, reason: str) -> None:
        """Ask the writing thread to stop."""
        self._reason = reason
        self.cancelled.set()

    def abandon(self, group: dist.ProcessGroup | None) -> None:
        """Delete the incomplete checkpoint to free disk space, because the disk may be full. A collective call."""
        self.cancel("another rank failed")
        self.writer.wait(CLOSE_TIMEOUT)
        self._release()  # also if the writer hangs
        dist.barrier(group)  # no rank adds to the folder any more
        self.delete()

    def delete(self) -> None:
        """Delete the incomplete folder on rank 0, unless its thread is still writing."""
        if self._rank == 0 and not self.writer.is_alive:
            shutil.rmtree(self.temporary, ignore_errors=True)


def _wait_for(path: Path) -> None:
    """Wait until a file that another host wrote is visible, since network file systems cache names. Raises OSError."""
    deadline = time.monotonic() + VISIBLE_TIMEOUT
    while not path.exists():
        if time.monotonic() > deadline:
            raise OSError(f"rank 0 does not see {path}: run_dir must be on a file system that all nodes share")
        time.sleep(0.2)


class _Failed(Exception):
    """Raised in the writing thread with the reason why a phase of a save failed, as a message for users."""


class _WriterThread:
    """Runs one phase of a save in a thread. `work` is None on a rank that has nothing to do in this phase."""

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
        with contextlib.suppress(OSError, AttributeError):  # per thread on Linux only
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        try:
            self.result = self._work()
            self.state = DONE
        except _Failed as error:
            self.problem, self.state = str(error), FAILED
        except OSError as error:
            name = getattr(error, "path", error.filename)
            self.problem, self.state = f"{error.strerror or error}" + (f": {name}" if name else ""), FAILED
        except Exception as error:  # any failure must reach the other ranks
            self.problem, self.state = f"{type(error).__name__}: {error}", FAILED

    @property
    def is_alive(self) -> bool:
        """True while the thread runs."""
        return self._work is not None and self._thread.is_alive()

    def wait(self, seconds: float) -> None:
        """Wait at most `seconds` until the work is done. A timeout counts as a failure of the work."""
        if self._work is not None:
            self._thread.join(seconds)
            if self._thread.is_alive():
                self.problem, self.state = f"not done within {seconds:g} s", FAILED
