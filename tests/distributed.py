"""Run a function on several ranks, over real process groups, from inside one test.

`run(fn, world_size, *args)` calls the module-level function `fn(*args)` on every rank and returns the results by rank.
The ranks are processes of a pool that lives for the whole pytest session, since importing Megatron-core takes seconds;
every call gets a new process group over a new store prefix, and everything global is taken down after it.
What a rank prints appears in the test's output as `[rank N] ...`.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import faulthandler
import gc
import importlib
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import psutil

from base.exit_handler import end_with_caller
from tests.waits import LONG, POLL

ROOT = Path(__file__).resolve().parent.parent
MAX_RANKS = 8
PRETENDED = "pretended"  # a backend: gloo between ranks that have tests/cuda's device
MEETING_TIMEOUT = 60.0  # seconds that ranks have to connect, which takes milliseconds; not counted against the call
GRACE = 10.0  # seconds that the other ranks have to end once one of them has failed
DUMP_WAIT = 30.0  # seconds that stuck ranks have to begin with their stacks, and dead ones to be gone
DUMP_PAUSE = 1.0  # seconds in which they write them
END = b"end"  # tells a rank that it may take everything down
END_OF_RUN = "\x00end-of-run"  # ends a rank's output of one call


class RankError(Exception):
    """A rank raised; `rank` is the first that did, `__cause__` its exception where that could be pickled."""

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(f"rank {rank} raised:\n{text}")
        self.rank = rank


class RankHang(Exception):
    """Ranks did not answer in time; the message holds their stacks. The pool is gone, the next call makes a new one."""


class RanksDidNotMeet(RankHang):
    """Ranks did not connect in time: once in thousands of calls gloo loses a connection of a group that it makes."""


class RankDied(Exception):
    """A rank's process ended without an answer. The pool is gone, the next call makes a new one."""


def run(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = LONG, backend: str = "gloo") -> list[Any]:
    """Call `fn(*args)` on `world_size` ranks and return their results by rank.

    `fn` must be importable by name; arguments and results are pickled. With backend "gloo" the ranks see no GPU, with
    PRETENDED they have the device of tests/cuda. Raises RankError, RankHang, RankDied, or ValueError for a function or
    a world size that cannot be run.
    """
    forbid()
    if not 1 <= world_size <= MAX_RANKS:
        raise ValueError(f"world_size={world_size}: the pool has 1 to {MAX_RANKS} ranks")
    if "<" in fn.__qualname__ or fn.__module__ == "__main__":
        raise ValueError(
            f"fn={fn.__module__}.{fn.__qualname__}: must be a module-level function that another process can import"
        )
    call = (fn.__module__, fn.__qualname__, pickle.dumps(args))
    try:
        return _run(call, world_size, timeout, backend)
    except RanksDidNotMeet as error:  # nothing of the test has run yet
        print(f"{error}\nstarted once more, with new processes", flush=True)
        return _run(call, world_size, timeout, backend)


def _run(call: tuple[str, str, bytes], world_size: int, timeout: float, backend: str) -> list[Any]:
    global _num_calls
    pool = _pools.get(backend) or _Pool(backend)
    _pools[backend] = pool
    _num_calls += 1
    try:
        return pool.run(call, world_size, timeout)
    except RankError as error:
        if pool.broken:
            _drop(backend)
        raise error
    except BaseException:  # a hang, a dead rank, Ctrl-C, pytest's time limit: nothing in these processes can be trusted
        _drop(backend)
        raise


def forbid() -> None:
    """Nothing, unless tests/marks.py has put a refusal here: a fast test calls no ranks."""


def backends() -> list[str]:
    """The backends that have a living pool."""
    return list(_pools)


def calls() -> int:
    """How often ranks were called since the session began."""
    return _num_calls


def pids(backend: str = "gloo") -> list[int]:
    """Process ids of the living pool, by rank."""
    return [worker.process.pid for worker in _pools[backend].workers] if backend in _pools else []


def shutdown() -> None:
    """End every worker. Called when the pytest session ends; a later `run` starts new ones."""
    for backend in list(_pools):
        _drop(backend)


# ---------------------------------------------------------------------------------------------------------------------
# The test's side
# ---------------------------------------------------------------------------------------------------------------------


class _Worker:
    """One rank's process, the connection to it and the thread that copies its output."""

    def __init__(self, rank: int, backend: str) -> None:
        self.rank = rank
        ours, theirs = socket.socketpair()
        env = dict(os.environ, OMP_NUM_THREADS="1", PYTHONUNBUFFERED="1", GLOO_SOCKET_IFNAME="lo")
        if backend != "nccl":
            env["CUDA_VISIBLE_DEVICES"] = ""
        code = f"from tests.distributed import _worker; _worker({theirs.fileno()}, {os.getpid()}, {rank}, {backend!r})"
        if backend == PRETENDED:
            from tests.cuda.pretended import build

            guard = str(build.guard())  # to be loaded before torch
            code = (
                f"import ctypes; ctypes.CDLL({guard!r}, ctypes.RTLD_GLOBAL); from tests.cuda.pretended import stubs; "
                f"stubs.install(); {code}"
            )
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env=env,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        theirs.close()
        self.connection = Connection(ours.detach())
        self.tail: deque[str] = deque(maxlen=200)
        self.output_ended = threading.Event()
        self.started = False
        self.reader = threading.Thread(target=self._copy_output, daemon=True)
        self.reader.start()

    def _copy_output(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            line = line.rstrip("\n")
            if line.endswith(END_OF_RUN):
                line = line.removesuffix(END_OF_RUN)
                if line:
                    self._show(line)
                self.output_ended.set()
                continue
            self._show(line)
        self.output_ended.set()

    def _show(self, line: str) -> None:
        self.tail.append(line)
        with contextlib.suppress(ValueError):  # pytest has closed the stream of a test that is over
            print(f"[rank {self.rank}] {line}", flush=True)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(timeout=LONG)
        self.reader.join(timeout=DUMP_WAIT)
        self.connection.close()


class _Pool:
    """The worker processes of one backend."""

    def __init__(self, backend: str) -> None:
        import torch.distributed as dist

        self.backend = backend
        self.broken = False
        self.calls = 0
        self.workers: list[_Worker] = []
        # One store for the pool, on a free port of its own; each call talks under its own prefix.
        self.store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=datetime.timedelta(seconds=LONG)
        )

    def run(self, call: tuple[str, str, bytes], world_size: int, timeout: float) -> list[Any]:
        while len(self.workers) < world_size:
            self.workers.append(_Worker(len(self.workers), self.backend))
        workers = self.workers[:world_size]
        for worker in workers:
            if not worker.started:
                self._expect(worker, "ready", LONG)
                worker.started = True
        self.calls += 1
        for worker in workers:
            worker.tail.clear()
            worker.output_ended.clear()
            try:
                worker.connection.send_bytes(
                    pickle.dumps((*call, world_size, self.store.port, f"run{self.calls}", timeout))
                )
            except OSError:
                raise RankDied(_obituary(worker)) from None
        self._meet(workers)
        deadline = time.monotonic() + timeout

        waiting = {worker.connection: worker for worker in workers}
        results: dict[int, Any] = {}
        failed: list[_Worker] = []
        first_error: RankError | None = None
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                worker = waiting.pop(connection)
                try:
                    kind, value = pickle.loads(connection.recv_bytes())
                except (EOFError, OSError):
                    # Even where another rank raised first: that was most likely the consequence.
                    raise RankDied(_obituary(worker)) from first_error
                if kind == "result":
                    results[worker.rank] = value
                    continue
                # This rank leaves its group at once, so that others who wait for it in a collective fail too.
                self._release(worker)
                failed.append(worker)
                if first_error is None:
                    text, cause = value
                    first_error = RankError(worker.rank, text)
                    first_error.__cause__ = cause
                    deadline = min(deadline, time.monotonic() + GRACE)
        stuck = list(waiting.values())
        if stuck:
            stacks = _dump_stacks(stuck)
            if first_error is None:
                names = ", ".join(str(worker.rank) for worker in stuck)
                raise RankHang(
                    f"rank {names} of {world_size} did not end {call[0]}.{call[1]} within {timeout:g} s\n{stacks}"
                )
            self.broken = True
            first_error.add_note(f"the other ranks were still at work {GRACE:g} s later and were ended:\n{stacks}")
            raise first_error
        # Only now that all have answered: a rank that leaves early breaks the connections of one that is still
        # arriving.
        for worker in workers:
            if worker not in failed:
                self._release(worker)
        for worker in workers:
            self._expect(worker, "clean", LONG)
            worker.output_ended.wait(timeout=DUMP_WAIT)
        if first_error is not None:
            raise first_error
        return [results[rank] for rank in range(world_size)]

    def _meet(self, workers: list[_Worker]) -> None:
        """Wait until all are in their process group."""
        deadline = time.monotonic() + MEETING_TIMEOUT
        for worker in workers:
            if not worker.connection.poll(max(0.0, deadline - time.monotonic())):
                raise RanksDidNotMeet(
                    f"rank {worker.rank} of {len(workers)} did not meet the others within {MEETING_TIMEOUT:g} s\n"
                    f"{_dump_stacks(workers)}"
                )
            self._expect(worker, "met", 0.0)

    def _release(self, worker: _Worker) -> None:
        try:
            worker.connection.send_bytes(END)
        except OSError:
            raise RankDied(_obituary(worker)) from None

    def _expect(self, worker: _Worker, kind: str, timeout: float) -> None:
        """Wait for a message that is no answer: that the process has started, or has left its group."""
        if not worker.connection.poll(timeout):
            raise RankHang(f"rank {worker.rank} was not {kind} within {timeout:g} s\n{_dump_stacks([worker])}")
        try:
            got, value = pickle.loads(worker.connection.recv_bytes())
        except (EOFError, OSError):
            raise RankDied(_obituary(worker)) from None
        if got == "error":
            self.broken = True
            raise RankError(worker.rank, value[0]) from value[1]
        assert got == kind, (got, kind)


_pools: dict[str, _Pool] = {}
_num_calls = 0


def _drop(backend: str) -> None:
    pool = _pools.pop(backend, None)
    if pool is not None:
        for worker in pool.workers:
            worker.process.kill()  # all at once: a rank must not be seen dying by the others
        for worker in pool.workers:
            worker.kill()


def _obituary(worker: _Worker) -> str:
    try:
        status: Any = worker.process.wait(timeout=DUMP_WAIT)
    except subprocess.TimeoutExpired:
        status = "still running, but it closed its connection"
    worker.reader.join(timeout=DUMP_WAIT)
    tail = "\n".join(worker.tail)
    return f"rank {worker.rank} (pid {worker.process.pid}) died, exit status {status}; its last output:\n{tail}"


def _says_something(worker: _Worker) -> bool:
    """Whether it has, or cannot any more."""
    with contextlib.suppress(psutil.NoSuchProcess):
        silent = psutil.Process(worker.process.pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
        return silent or bool(worker.tail)
    return True


def _dump_stacks(workers: Iterable[_Worker]) -> str:
    """Make stuck workers write the stacks of all their threads, and return that."""
    workers = list(workers)
    for worker in workers:
        worker.tail.clear()
        with contextlib.suppress(ProcessLookupError):
            worker.process.send_signal(signal.SIGUSR1)
    end = time.monotonic() + DUMP_WAIT
    while not all(map(_says_something, workers)) and time.monotonic() < end:
        time.sleep(POLL)
    time.sleep(DUMP_PAUSE)
    for worker in workers:
        worker.process.kill()
    for worker in workers:
        worker.reader.join(timeout=DUMP_WAIT)
    return "\n".join(f"[rank {worker.rank}] {line}" for worker in workers for line in worker.tail)


atexit.register(shutdown)


# ---------------------------------------------------------------------------------------------------------------------
# The worker's side
# ---------------------------------------------------------------------------------------------------------------------


def _worker(fd: int, parent: int, rank: int, backend: str) -> None:
    """A worker process: answers calls until the connection closes or its parent is gone."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    end_with_caller()
    if os.getppid() != parent:  # it died before the line above
        return
    connection = Connection(fd)
    environment, folder = dict(os.environ), os.getcwd()
    gc.disable()  # what is imported stays
    importlib.import_module("parallel.megatron")
    gc.enable()
    connection.send_bytes(pickle.dumps(("ready", None)))
    frozen = 0  # modules that were imported when all was frozen last
    while True:
        try:
            message = connection.recv_bytes()
        except (EOFError, OSError):
            return
        module, name, args, world_size, port, prefix, timeout = pickle.loads(message)
        try:
            _set_up(rank, world_size, port, prefix, timeout, backend)
            connection.send_bytes(pickle.dumps(("met", None)))
            fn = _resolve(module, name)
            if len(sys.modules) > frozen:  # a collection of all that was imported takes 0.2 s, more than most calls do
                gc.freeze()
                frozen = len(sys.modules)
            answer = pickle.dumps(("result", fn(*pickle.loads(args))))
        except BaseException as error:
            answer = _pickled_error(error)
        connection.send_bytes(answer)
        try:
            assert connection.recv_bytes() == END
            _take_down(environment, folder)
            answer = pickle.dumps(("clean", None))
        except (EOFError, OSError):
            return
        except Exception as error:
            answer = _pickled_error(error)
        _end_output()
        connection.send_bytes(answer)


def _end_output() -> None:
    sys.stderr.flush()
    print(END_OF_RUN, flush=True)


def _resolve(module: str, name: str) -> Callable[..., Any]:
    value: Any = importlib.import_module(module)
    for attribute in name.split("."):
        value = getattr(value, attribute)
    return value


def _pickled_error(error: BaseException) -> bytes:
    text = "".join(traceback.format_exception(error))
    try:
        message = pickle.dumps(("error", (text, error)))
        pickle.loads(message)  # exceptions with their own __init__ often pickle but do not come back
        return message
    except Exception:
        return pickle.dumps(("error", (text, None)))


def _set_up(rank: int, world_size: int, port: int, prefix: str, timeout: float, backend: str) -> None:
    import numpy as np
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    # What torchrun would say.
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size)
    )
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    # Longer than the test's own limit: a hang is then reported with the stacks of all ranks, not as gloo's timeout.
    limit = datetime.timedelta(seconds=timeout + 60)
    store = dist.PrefixStore(prefix, dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit))
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "gloo" if backend == PRETENDED else backend, store=store, rank=rank, world_size=world_size, timeout=limit
    )


def _release_models() -> None:
    """Let go of what tests did not close: each model would keep two threads for every process group to the end."""
    ddp = sys.modules.get("parallel.megatron.ddp")
    if ddp is not None:
        for model in [found for found in gc.get_objects() if type(found) is ddp.DistributedDataParallel]:
            if model._modules:
                ddp.release([model])


def _take_down(environment: dict[str, str], folder: str) -> None:
    import torch
    import torch.distributed as dist

    topology = sys.modules.get("parallel.topology")
    if topology is not None and hasattr(topology, "destroy"):
        topology.destroy()
    _release_models()
    parallel_state = sys.modules.get("megatron.core.parallel_state")
    if parallel_state is not None:
        parallel_state.destroy_model_parallel()
    microbatches = sys.modules.get("megatron.core.num_microbatches_calculator")
    if microbatches is not None:
        microbatches.unset_num_microbatches_calculator()
    moe_utils = sys.modules.get("megatron.core.transformer.moe.moe_utils")
    if moe_utils is not None:
        # A tracker with one entry per layer, and a scale whose shape depends on who sets it first.
        moe_utils.get_moe_layer_wise_logging_tracker().clear()
        moe_utils.MoEAuxLossAutoScaler.main_loss_backward_scale = None
    if dist.is_initialized():
        dist.destroy_process_group()
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    gc.collect()
