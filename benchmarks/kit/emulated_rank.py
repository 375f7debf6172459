"""A rank's side of emulated_step.py: the real training of one config after the other, without files and checkpoints, on
a virtual accelerator."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import resource
import time
import warnings
from typing import Any

import parallel.megatron  # noqa: F401  (before anything else of Megatron-core: see parallel/megatron/startup.py)
from configs.job import Job

# isort: split
import torch.distributed as dist

from benchmarks.kit import full_duplex, virtual_device
from benchmarks.kit.emulated_settings import Machine, Setting
from optim.offload.optimizer import offload_of
from parallel import topology
from simulator import run_plan
from training.engine import Engine
from training.starting.dry_run import made_up_batches
from training.step import Batch, train_step

SLICE = 100_000  # nanoseconds


class _Training:
    """An engine and its batches."""

    def __init__(self, setting: Setting, machine: Machine) -> None:
        config = setting.config(dist.get_world_size())
        virtual_device.install(machine.flops_per_second)
        self._groups = set(dist.distributed_c10d._world.pg_map)
        axes = topology.initialize(config)
        full_duplex.install()
        plan = run_plan.make_plan(Job(config, axes.world_size, setting.vocab_size, axes.device.type))
        headroom = run_plan.state_headroom(plan.memory[axes.rank], plan.capacity)
        self.engine = Engine(config, axes, setting.vocab_size, headroom)
        virtual_device.use_for_experts(self.engine.bare_chunks)
        for stream in self.engine.host_link.all:
            stream.rate = machine.of_stream(stream.name)
        count = config.training.global_batch_size // config.training.micro_batch_size // axes.data.size
        self.batches: list[Batch] = made_up_batches(config, count, setting.vocab_size, seed=axes.data.rank)
        self.number = 0

    def steps(self, count: int) -> float:
        """Seconds of one of so many that follow each other."""
        dist.barrier()
        before = time.perf_counter()
        for _ in range(count):
            self.number += 1
            train_step(self.engine, list(self.batches), self.number)
        seconds = (time.perf_counter() - before) / count
        if (tiers := offload_of(self.engine.optimizer)) is not None and (problem := tiers.problem()) is not None:
            raise RuntimeError(problem)
        return seconds

    def close(self) -> None:
        """Leave nothing of it."""
        self.engine.synchronize()
        dist.barrier()
        self.engine.close()
        del self.engine
        topology.leave_layout()
        dist.barrier()
        full_duplex.forget(self._groups)
        world = dist.distributed_c10d._world
        for group in [group for group in world.pg_map if group not in self._groups]:
            dist.destroy_process_group(group)
        gc.collect()


def run(setting: Setting, machine: Machine, steps: int, warm_up: int = 2) -> dict[str, Any]:
    """Build the training, take `warm_up` steps and then `steps`; seconds of one of these, and what they were made of on
    this rank."""
    warnings.filterwarnings("ignore")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    start = time.perf_counter()
    training = _Training(setting, machine)
    try:
        for _ in range(warm_up):
            training.steps(1)
            give_way()
        built = time.perf_counter() - start
        gc.collect()
        gc.disable()
        clock = virtual_device.DEVICE.clock
        busy, cpu, products = clock.busy_seconds, _cpu_seconds(), virtual_device.DEVICE.num_products
        seconds = training.steps(steps)
        return {
            "step": seconds,
            "device": (clock.busy_seconds - busy) / steps,
            "cpu": (_cpu_seconds() - cpu) / steps,
            "products": (virtual_device.DEVICE.num_products - products) / steps,
            "start": built,
        }
    finally:
        gc.enable()
        training.close()


class _Attributes(ctypes.Structure):
    """struct sched_attr of <linux/sched/types.h>."""

    _fields_ = [
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("slice", ctypes.c_uint64),
        ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    ]


def give_way() -> None:
    """Let this process's threads come before gloo's that waits for packets.

    While another thread sends, that one asks again and again for the connection's lock. Where both share a core, the
    other comes to run at the next tick, after up to 4 ms: what took 0.2 ms takes 4, now and then. Linux 6.12 lets the
    thread with the shorter slice come first. Nothing happens on an older one.
    """
    libc, sched_setattr = ctypes.CDLL(None), 314  # on x86-64
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):
            with open(f"/proc/self/task/{thread}/comm") as file:
                waits_for_packets = file.read().startswith("gloo_tcp")
            if not waits_for_packets:
                attributes = _Attributes(size=ctypes.sizeof(_Attributes), nice=os.nice(0), slice=SLICE)
                libc.syscall(sched_setattr, int(thread), ctypes.byref(attributes), 0)


def _cpu_seconds() -> float:
    """Of this process's threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
