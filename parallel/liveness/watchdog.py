"""Ranks watch each other, so that a job with a dead, stopped or hung rank ends soon and names that rank.

A collective with a lost rank blocks the other ranks, on NCCL in a way that Python cannot interrupt. So each rank has a
thread that writes a heartbeat to the job's key-value store (which outlives the ranks in torchrun's process) and watches
the heartbeats of a few other ranks: the next ones in a ring, and all on its own machine. A dead process is missing in
the machine's process table within a second. A silent process has been stopped, or its machine is lost. A rank whose
collective takes nearly `parallel.timeout_seconds` waits for ranks that have not started it. The first rank that notices
a problem writes a verdict to the store; then each rank's thread calls `on_verdict`.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, get_type_hints

import psutil
import torch
import torch.distributed as dist

from parallel.liveness import collective_log, rendezvous

ROOT = Path(__file__).resolve().parents[2]
INTERVAL = 1.0  # seconds between two rounds
MAX_SILENCE = 120.0  # most seconds without a heartbeat, for any timeout of collectives
NEIGHBOURS = 3  # ranks of the ring that each rank watches, so that two neighbours may die together
STALL_SHARE = 0.8  # of the timeout, so that there is a verdict before the backend gives up
STORE_SECONDS = 10.0  # that an answer of the store may take


@dataclass(frozen=True)
class Verdict:
    """The verdict that ends the job: the rank that causes it, the reason, and the rank that found it (`witness`)."""

    rank: int
    host: str
    step: int  # finished steps
    reason: str  # continues "rank 3 on node-a "
    collective: str  # the last one that the rank has started
    witness: int  # the rank that found the problem
    stop: bool = False  # a signal asked the rank to end, before it had anything to save

    def __str__(self) -> str:
        after = f"after step {self.step}" if self.step else "before the first step"
        return f"rank {self.rank} on {self.host} {self.reason}, {after}; its last collective: {self.collective}"


@dataclass(frozen=True)
class _RankProcess:
    """The process of a rank. Ranks with the same `machine` see each other's process ids."""

    host: str
    machine: str
    pid: int
    started: float  # creation time, since a process id may be reused
    box: str  # a file shared by the ranks of the machine, see collective_log


@dataclass(frozen=True)
class _Beat:
    """The heartbeat of a rank, which shows other ranks how far it is in its steps and collectives.

    `number` grows with each beat; `left` is set when the rank ends normally.
    """

    number: int
    step: int
    calls: int  # collectives started
    share: float  # collectives of this step, relative to the step before
    stalled: float  # seconds since the last collective was started
    waits: bool  # whether the rank is in a collective
    where: str  # line of code of the main thread
    collective: str
    left: bool = False


NO_BEAT = _Beat(0, 0, 0, 0.0, 0.0, False, "", "none")  # of a rank that has not been seen yet


class Watchdog:
    """Threads of one rank that watch other ranks. The constructor is a collective call that exchanges process ids.

    timeout: `parallel.timeout_seconds`. A rank that is silent for half of it, but at most MAX_SILENCE seconds, counts
    as lost. on_verdict: called once on every live rank, in a thread, with the verdict and whether this rank wrote it.
    """

    def __init__(self, timeout: float, device: torch.device, on_verdict: Callable[[Verdict, bool], None]):
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.silence = min(timeout / 2, MAX_SILENCE)
        self._stall = timeout * STALL_SHARE
        self._device = device
        self._on_verdict = on_verdict
        self._log = collective_log.install()
        self._main = threading.main_thread().ident
        self._step, self._calls_before, self._calls_per_step = 0, 0, 0
        self._last_call = (0, time.monotonic())
        self._verdict: Verdict | None = None
        self._ending = threading.Lock()
        self._decided, self._closed = threading.Event(), threading.Event()
        folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        with tempfile.NamedTemporaryFile(prefix="mixtrain-", dir=folder, delete=False) as file:
            file.write(bytes(collective_log.BOX_BYTES))
        box_path = file.name
        process = _RankProcess(socket.gethostname(), _machine(), os.getpid(), psutil.Process().create_time(), box_path)
        found: list[Any] = [None] * self.world_size
        dist.all_gather_object(found, process)
        self._processes: list[_RankProcess] = found
        ring = {(self.rank + 1 + i) % self.world_size for i in range(NEIGHBOURS)}
        self._local = {rank for rank in range(self.world_size) if self._processes[rank].machine == process.machine}
        self._local.discard(self.rank)
        self._watched = sorted((ring | self._local) - {self.rank})
        self._boxes = {rank: _open_box(self._processes[rank].box) for rank in self._local}
        self._log.write_to(_open_box(box_path))
        self._beats: dict[int, tuple[_Beat, float]] = {}  # by rank: the last beat, and when it was first seen
        self._last_round = time.monotonic()
        self._store, self._store_host = _open_store()
        dist.barrier()
        os.unlink(box_path)  # all readers have opened it
        self._number = 0
        self._threads = [
            threading.Thread(target=target, daemon=True, name="watchdog")
            for target in (self._watch, self._watch_the_store)
        ]
        for thread in self._threads:
            thread.start()

    def note_step(self, step: int) -> None:
        """Record the number of finished steps."""
        self._step = step
        self._log.note_step(step)
        self._calls_per_step, self._calls_before = self._log.count - self._calls_before, self._log.count

    def accuse_myself(self, reason: str, stop: bool = False) -> Verdict:
        """End the job because of this rank. Returns the verdict that counts, which may be another rank's earlier one.

        stop: whether a signal asked the rank to end before it had anything to save.
        """
        mine = replace(self._about_myself(reason), stop=stop)
        try:
            return self._decide(mine)
        except Exception:  # the store has ended, and so has the job
            return mine

    def verdict_within(self, seconds: float) -> Verdict | None:
        """Wait up to `seconds` for a verdict, such as after an error that the end of another rank may have caused."""
        self._decided.wait(seconds)
        return self._verdict

    def close(self) -> None:
        """Stop watching, and tell the others that this rank ends normally. Ranks close after their last collective."""
        if not self._closed.is_set():
            self._closed.set()
            self._threads[0].join(timeout=STORE_SECONDS)
            if not self._threads[0].is_alive() and self._verdict is None:
                try:
                    self._store.set(f"beat/{self.rank}", json.dumps(asdict(replace(self._beat(), left=True))))
                except Exception:
                    return  # the store was closed before

    def _watch(self) -> None:
        while not self._closed.wait(INTERVAL if self._number else 0.0):
            now = time.monotonic()
            paused = now - self._last_round - INTERVAL
            if paused > self.silence / 2:  # this process itself was stopped, and has seen no beats
                self._beats = {rank: (beat, seen + paused) for rank, (beat, seen) in self._beats.items()}
            try:
                self._round(now)
            except Exception as error:
                if self._closed.is_set() or self._verdict is not None:
                    return
                broken = "Connection" in str(error) or "Broken pipe" in str(error)
                if broken or isinstance(error, dist.DistNetworkError):
                    self._end(self._lost_store(f"cannot be reached any more ({error})"), written=False)
                    return
                time.sleep(INTERVAL)  # the answer was slow; the other thread limits for how long
                continue
            self._last_round = time.monotonic()
            if self._verdict is not None:
                return

    def _round(self, now: float) -> None:
        self._number += 1
        try:
            beat = self._beat()
        except torch.AcceleratorError as error:  # raised by each query after a fault of the device
            self._decide(self._about_myself(f"its GPU failed: {str(error).splitlines()[0]}"))
            return
        self._store.set(f"beat/{self.rank}", json.dumps(asdict(beat)))
        if self._store.check(["verdict"]):
            try:
                verdict = _read_verdict(self._store.get("verdict"), self.world_size)
            except ValueError as error:
                reason = f"holds a verdict that no rank has written ({error}); see docs/guide/network.md"
                verdict = self._lost_store(reason)
            self._end(verdict, written=False)
            return
        for rank in self._watched:
            self._look_at(rank, now)
        for rank in self._watched:
            guilty = self._problem(rank, now)
            if guilty is not None:
                self._decide(guilty)
                return
        if beat.waits and beat.stalled > self._stall:
            self._decide(self._who_holds_up(now))

    def _look_at(self, rank: int, now: float) -> None:
        if not self._store.check([f"beat/{rank}"]):
            self._beats.setdefault(rank, (NO_BEAT, now))
            return
        beat = _Beat(**json.loads(self._store.get(f"beat/{rank}")))
        known = self._beats.get(rank)
        if known is None or known[0].number != beat.number or known[0].left != beat.left:
            self._beats[rank] = (beat, now)

    def _problem(self, rank: int, now: float) -> Verdict | None:
        beat, seen = self._beats[rank]
        if beat.left:
            return None
        if rank in self._local:
            state = _state(self._processes[rank])
            if state is None:
                # It may have ended normally, or written a verdict, since its beat was read.
                self._look_at(rank, now)
                gone = not self._beats[rank][0].left and not self._store.check(["verdict"])
                return self._verdict_on(rank, "is dead (killed from outside, or out of memory)") if gone else None
            if now - seen > self.silence and state == psutil.STATUS_STOPPED:
                return self._verdict_on(rank, f"is stopped (SIGSTOP), silent for {now - seen:.0f} s")
        if now - seen > self.silence:
            return self._verdict_on(rank, f"is silent for {now - seen:.0f} s: stopped, or its host or network is lost")
        return None

    def _verdict_on(self, rank: int, reason: str) -> Verdict:
        if rank in self._local:
            step, collective = collective_log.read_box(self._boxes[rank])
        elif rank == self.rank:
            return self._about_myself(reason)
        else:
            step, collective = self._beats[rank][0].step, self._beats[rank][0].collective
        return Verdict(rank, self._processes[rank].host, step, reason, collective, self.rank)

    def _about_myself(self, reason: str) -> Verdict:
        return Verdict(self.rank, self._processes[self.rank].host, self._step, reason, self._log.last, self.rank)

    def _who_holds_up(self, now: float) -> Verdict:
        """Return a verdict on the rank that holds up the collective that this rank waits for.

        It is a stalled rank outside any collective or, if there is none, the one that is furthest behind.
        """
        for rank in range(self.world_size):
            if rank != self.rank:
                self._look_at(rank, now)
        self._beats[self.rank] = (self._beat(), now)
        stalled = {r: beat for r, (beat, _) in self._beats.items() if beat.stalled > self._stall / 2 and not beat.left}
        outside = [rank for rank, beat in stalled.items() if not beat.waits]
        culprit = min(outside or stalled, key=lambda rank: (stalled[rank].step, stalled[rank].share))
        beat = stalled[culprit]
        state = "hangs outside any collective" if outside else "is behind the others in a collective that does not end"
        return self._verdict_on(culprit, f"{state}, for {beat.stalled:.0f} s at {beat.where}")

    def _beat(self) -> _Beat:
        now, calls = time.monotonic(), self._log.count
        if calls != self._last_call[0]:
            self._last_call = calls, now
        share = (calls - self._calls_before) / max(1, self._calls_per_step)
        stalled = now - self._last_call[1]
        waits, where = self._waits(stalled), self._where()
        return _Beat(self._number, self._step, calls, share, stalled, waits, where, self._log.last)

    def _waits(self, stalled: float) -> bool:
        """Whether this rank waits in a collective. stalled: seconds since it started the last one.

        With NCCL, the only sign of waiting is GPU work that does not end.
        """
        if self._log.waiting_since is not None or self._device.type == "cpu":
            return self._log.waiting_since is not None
        return stalled > self._stall / 4 and not torch.cuda.default_stream(self._device).query()

    def _where(self) -> str:
        """Return the line of this project's code that the main thread is executing."""
        frame = sys._current_frames().get(self._main or 0)
        for line, number in traceback.walk_stack(frame) if frame is not None else ():
            path = Path(line.f_code.co_filename)
            if path.is_relative_to(ROOT) and ".venv" not in path.parts and path != Path(collective_log.__file__):
                return f"{path.relative_to(ROOT)}:{number} ({line.f_code.co_name})"
        return "an unknown line"

    def _decide(self, mine: Verdict) -> Verdict:
        """Write a verdict to the store unless it has one, and act on the verdict in the store. Returns that verdict."""
        counts = _read_verdict(self._store.compare_set("verdict", "", json.dumps(asdict(mine))), self.world_size)
        self._end(counts, written=counts == mine)
        return counts

    def _end(self, verdict: Verdict, written: bool) -> None:
        with self._ending:
            if self._verdict is not None:
                return
            self._verdict = verdict
        process = self._processes[verdict.rank]
        ends_by_itself = verdict.stop or verdict.reason.startswith(("raised ", "stopped: "))
        if verdict.rank in self._local and _state(process) is not None and not ends_by_itself:
            # A stopped process reacts to no other signal, and torchrun would wait half a minute for it.
            os.kill(process.pid, signal.SIGKILL)
        self._on_verdict(verdict, written)  # first, as the main thread may end the process once it is informed
        self._decided.set()

    def _watch_the_store(self) -> None:
        """Watch the key-value store in a thread, and end the job if the store does not answer.

        The other thread, which reads and writes the store, would then be blocked forever.
        """
        while not self._closed.wait(INTERVAL) and self._verdict is None:
            silent = time.monotonic() - self._last_round
            if silent > self.silence:
                time.sleep(2 * INTERVAL)  # if this process itself was stopped, the other thread runs now
                if time.monotonic() - self._last_round > self.silence and not self._closed.is_set():
                    self._end(self._lost_store(f"has not answered for {silent:.0f} s"), written=False)

    def _lost_store(self, reason: str) -> Verdict:
        if self._store_host is not None:  # in the launcher
            return self._about_myself(f"lost the launcher at {self._store_host}: it {reason}")
        self._beats.setdefault(0, (NO_BEAT, 0.0))
        return self._verdict_on(0, f"holds the job's store, which {reason}")


def _open_store() -> tuple[dist.Store, str | None]:
    """Connect to the job's key-value store. Returns the store, and its address if it is torchrun's, else None."""
    default = dist.distributed_c10d._get_default_store()
    own = default.clone()
    own.set_timeout(timedelta(seconds=STORE_SECONDS))
    while isinstance(default, dist.PrefixStore):
        default = default.underlying_store
    address = f"{default.host}:{default.port}" if isinstance(default, dist.TCPStore) else "this process"
    return dist.PrefixStore("watchdog", own), address if rendezvous.launcher_holds_store() else None


def _open_box(path: str) -> mmap.mmap:
    with open(path, "r+b") as file:
        return mmap.mmap(file.fileno(), collective_log.BOX_BYTES)


def _machine() -> str:
    """Return a name that is equal for two processes exactly if they see each other's process ids."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return socket.gethostname()


def _state(rank_process: _RankProcess) -> str | None:
    """Return the status of a process on this machine, or None if it is gone."""
    try:
        process = psutil.Process(rank_process.pid)
        status = process.status()
        return None if status == psutil.STATUS_ZOMBIE or process.create_time() != rank_process.started else status
    except psutil.NoSuchProcess:
        return None


def _read_verdict(text: bytes, world_size: int) -> Verdict:
    """Parse a verdict from the key-value store. Raises ValueError if its fields, types or rank are invalid."""
    fields = json.loads(text)
    if not isinstance(fields, dict) or {name: type(value) for name, value in fields.items()} != get_type_hints(Verdict):
        raise ValueError(f"it must have the fields {', '.join(get_type_hints(Verdict))} in their types, not {fields}")
    verdict = Verdict(**fields)
    if verdict.rank not in range(world_size):
        raise ValueError(f"its rank ({verdict.rank}) must be from 0 to {world_size - 1}")
    return verdict
