"""Trainings whose experts lie off the device, on a virtual accelerator and an emulated link, in processes of their own.

The engine, its copies, host updates and disk are a training's. Products take their operations' time at a given rate
(benchmarks/kit/virtual_device.py), each direction of the link is held to a rate by `CopyStream.rate`, and a rank's disk
is throttled by a blkio control group; where there can be none its streams are held to the rate instead. All rates can
be changed between steps. Ranks are joined by gloo over the loopback device, which nothing holds back.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import multiprocessing
import os
import resource
import socket
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, fields
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.kit.cgroups import DiskCgroup, can_limit_disk
from memory.copy_stream import SAVES
from optim.arrangement.experts import ExpertTraffic

TIMEOUT = 300.0  # seconds for one call
VOCABULARY = 256


@dataclass(frozen=True)
class Rates:
    """FLOP/s of the virtual accelerator; bytes per second of the link, each way, and of a rank's disk, each way."""

    flops: float
    link: float
    disk: float = math.inf


@dataclass(frozen=True)
class StepMoves:
    """A rank's step: seconds, bytes in each direction, seconds of host updates, of the virtual accelerator and of
    cores, and how long the thread that computes waited for weights and for room for gradients."""

    seconds: float = 0.0
    up: float = 0.0
    down: float = 0.0
    read: float = 0.0
    written: float = 0.0
    host: float = 0.0
    device: float = 0.0
    cpu: float = 0.0
    weights_waited: float = 0.0
    grads_waited: float = 0.0


class Training:
    """One rank's engine, and its batches; what a process of `Ranks` does."""

    def __init__(self, overrides: Sequence[str], emulates_disk: bool) -> None:
        """emulates_disk: streams are held to the disk's rate."""
        warnings.filterwarnings("ignore")
        logging.getLogger("megatron").setLevel(logging.ERROR)
        import parallel.megatron  # noqa: F401

        # isort: split
        import torch
        import torch.distributed as dist

        from benchmarks.kit import virtual_device
        from configs.compose import compose
        from configs.validate import validate
        from parallel import topology
        from training.engine import Engine
        from training.starting.dry_run import made_up_batches

        torch.set_num_threads(1)
        config = compose(list(overrides))
        world = int(os.environ["WORLD_SIZE"])
        validate(config, world)
        self._device, self._emulates_disk = virtual_device.DEVICE, emulates_disk
        virtual_device.install(1e12)
        ranks = topology.initialize(config)
        self.engine = Engine(config, ranks, VOCABULARY)
        virtual_device.use_for_experts(self.engine.bare_chunks)
        count = config.training.global_batch_size // config.training.micro_batch_size // ranks.data.size
        self._batches = made_up_batches(config, count, VOCABULARY, seed=ranks.data.rank)
        self._number, self._waited = 0, {"weights": 0.0, "grads": 0.0}
        self._barrier = dist.barrier
        # Bytes that calls of the experts' tier have had moved, each way; whether such a call is under way.
        self._moved, self._of_experts = dict.fromkeys(("up", "down", "read", "written"), 0), False
        if self.engine.experts is not None:
            self._watch_waits()
            self._watch_bytes()

    def _watch_waits(self) -> None:
        from moe.experts.streamed import StreamedExperts

        def timed(name: str, call: Any) -> Any:
            def timing(*args: Any) -> Any:
                before = time.perf_counter()
                try:
                    return call(*args)
                finally:
                    self._waited[name] += time.perf_counter() - before

            return timing

        StreamedExperts.wait = timed("weights", StreamedExperts.wait)  # type: ignore[method-assign]
        StreamedExperts.store = timed("grads", StreamedExperts.store)  # type: ignore[method-assign]

    def _watch_bytes(self) -> None:
        from optim.offload.optimizer import offload_of

        tiers, link = offload_of(self.engine.optimizer), self.engine.host_link
        assert tiers is not None and tiers.experts is not None

        def counted(name: str, submit: Any) -> Any:
            def submitting(work: Any, after: Any = (), num_bytes: int = 0, **others: Any) -> Any:
                counts = num_bytes * self._of_experts

                def working() -> Any:  # once it is done: work may be cancelled
                    self._moved[name] += counts
                    return work()

                return submit(working, after, num_bytes, **others)

            return submitting

        def marked(call: Any) -> Any:
            def calling(*args: Any, **named: Any) -> Any:
                self._of_experts = True
                try:
                    return call(*args, **named)
                finally:
                    self._of_experts = False

            return calling

        for name, stream in zip(self._moved, (link.up, link.down, link.read, link.write), strict=True):
            stream.submit = counted(name, stream.submit)  # type: ignore[method-assign]
        calls: list[tuple[Any, str]] = [(tiers.experts, name) for name in ("bring", "add", "sum_to", "finish")]
        for owner, name in [*calls, (tiers.jobs, "on_records")]:
            setattr(owner, name, marked(getattr(owner, name)))

    def hold(self, rates: Rates) -> None:
        """Everything to these rates from now on; a control group's are its maker's."""
        self._device.clock.flops_per_second = rates.flops
        link = self.engine.host_link
        link.up.rate = link.down.rate = rates.link
        link.read.rate = link.write.rate = rates.disk if self._emulates_disk and math.isfinite(rates.disk) else None

    def steps(self, count: int, updates: bool = True) -> StepMoves:
        """One of so many that follow each other and one more, whose update the first one's passes are beside; without
        updates the passes alone, up to the gradient's norm."""
        self._step(updates)
        self._barrier()
        gc.collect()
        gc.disable()
        before = self._now()
        for _ in range(count):
            self._step(updates)
        after = self._now()
        gc.enable()
        self.engine.synchronize()
        return StepMoves(*((b - a) / count for a, b in zip(before, after, strict=True)))

    def bytes_of(self, count: int) -> tuple[StepMoves, dict[str, int]]:
        """Bytes of so many steps, exactly: nothing of an earlier one is under way at their beginning, nor anything of
        theirs at their end; and what of them is experts'."""
        self._rest()
        before, experts = self._now(), dict(self._moved)
        for _ in range(count):
            self._step(True)
        self._rest()
        moves = StepMoves(*(b - a for a, b in zip(before, self._now(), strict=True)))
        return moves, {name: self._moved[name] - experts[name] for name in experts}

    def expected(self) -> ExpertTraffic | None:
        """What the plan says of a step's experts; None where they lie on the device."""
        from optim.arrangement.experts import expert_traffic

        ranks = self.engine.topology
        return expert_traffic(self.engine.config, ranks.world_size, ranks.pipeline.rank)

    def close(self) -> None:
        """Leave nothing on the disk."""
        self._rest()
        self.engine.close()

    def _step(self, updates: bool) -> None:
        from training.step import gradients, train_step

        self._number += 1
        (train_step if updates else gradients)(self.engine, list(self._batches), self._number)

    def _rest(self) -> None:
        self.engine.synchronize()
        for _ in range(2):
            for stream in self.engine.host_link.all:
                stream.submit(lambda: None, priority=SAVES).wait()
        self._barrier()

    def _now(self) -> list[float]:
        link, used = self.engine.host_link, resource.getrusage(resource.RUSAGE_SELF)
        return [
            time.perf_counter(),
            float(link.up.num_bytes),
            float(link.down.num_bytes),
            float(link.read.num_bytes),
            float(link.write.num_bytes),
            link.host.busy_seconds,
            self._device.clock.busy_seconds,
            used.ru_utime + used.ru_stime,
            self._waited["weights"],
            self._waited["grads"],
        ]


class Ranks:
    """A training on so many ranks, each a process that waits for calls; from `__enter__` to `__exit__`."""

    def __init__(self, overrides: Sequence[str], ranks: int = 1, disk: bool = False) -> None:
        """disk: the training uses one, which is throttled."""
        self._overrides, self._count, self._disk = list(overrides), ranks, disk
        self._stack, self._pipes, self._groups = contextlib.ExitStack(), list[Connection](), list[DiskCgroup]()
        folder = Path(tempfile.gettempdir())
        self.emulated = can_limit_disk(folder) if disk else None  # why the disk is emulated, where it is
        self._folder = folder

    def __enter__(self) -> Ranks:
        with contextlib.ExitStack() as stack:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            folder = stack.enter_context(tempfile.TemporaryDirectory(dir=self._folder))
            overrides = [*self._overrides, f"memory.disk_dir={folder}"]
            spawn = multiprocessing.get_context("spawn")
            for rank in range(self._count):
                group = None
                if self._disk and self.emulated is None:
                    group = stack.enter_context(DiskCgroup(None, self._folder))
                    self._groups.append(group)
                ours, theirs = spawn.Pipe()
                environment = {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(self._count),
                    "LOCAL_WORLD_SIZE": str(self._count),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                }
                entrance = None if group is None else str(group.entrance)
                args = (theirs, environment, entrance, overrides, self.emulated is not None)
                process = spawn.Process(target=_serve, args=args, daemon=True)
                process.start()
                theirs.close()
                stack.callback(_end, process, ours)
                self._pipes.append(ours)
            self._answers()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            self.call("close")
        self._stack.close()

    def hold(self, rates: Rates) -> None:
        """Everything to these rates from now on."""
        for group in self._groups:
            group.throttle(rates.disk, rates.disk)
        self.call("hold", rates)

    def call(self, name: str, *args: Any) -> list[Any]:
        """What this method of `Training` returns on each rank. Raises RuntimeError with what a rank raised."""
        for pipe in self._pipes:
            pipe.send((name, args))
        return self._answers()

    def steps(self, count: int, updates: bool = True) -> StepMoves:
        """The most of all ranks, each number by itself."""
        found = self.call("steps", count, updates)
        return StepMoves(*(max(getattr(each, each_field.name) for each in found) for each_field in fields(StepMoves)))

    def _answers(self) -> list[Any]:
        answers = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(TIMEOUT):
                raise RuntimeError(f"rank {rank} has not answered for {TIMEOUT:g} s")
            try:
                answer = pipe.recv()
            except EOFError:
                raise RuntimeError(f"rank {rank} is gone") from None
            if isinstance(answer, Exception):
                raise RuntimeError(f"rank {rank}: {answer}") from answer
            answers.append(answer)
        return answers


def _end(process: Any, pipe: Connection) -> None:
    pipe.close()
    process.join(10)
    if process.is_alive():
        process.kill()
        process.join()


def _serve(
    pipe: Connection, environment: dict[str, str], entrance: str | None, overrides: Sequence[str], emulates: bool
) -> None:
    """What a rank's process does until its pipe is closed."""
    if entrance is not None:
        Path(entrance).write_text(str(os.getpid()))
    os.environ.update(environment, OMP_NUM_THREADS="1")
    training = None
    with contextlib.suppress(EOFError, BrokenPipeError):
        name, args = "", tuple[Any, ...]()
        while True:
            try:
                if training is None:
                    training, answer = Training(overrides, emulates), None
                else:
                    answer = getattr(training, name)(*args)
            except Exception as error:
                answer = RuntimeError(f"{type(error).__name__}: {error}")
            pipe.send(answer)
            name, args = pipe.recv()
