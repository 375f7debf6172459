"""A whole process on the pretended device, all its threads: what `python -m tests.cuda.run` makes of each."""

from __future__ import annotations

import atexit
import functools
import os
import pickle
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.cuda.pretended import exchanges, memory, streams, stubs
from tests.cuda.pretended.device import Device
from tests.cuda.pretended.logs import Log, compare
from tests.cuda.pretended.observed import OBSERVED

NCCL = "nccl"
OF_NCCL = ("device_id", "pg_options")
OF_JOB = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")


def install() -> None:
    """Put the device in the place of torch's for the rest of this process; what was observed is left at its end."""
    stubs.install()
    # Every rank sees one card, as the only one of its node.
    os.environ.pop("LOCAL_RANK", None)
    dist.init_process_group = _over_gloo(dist.init_process_group)
    dist.new_group = dist.distributed_c10d.new_group = _over_gloo(dist.new_group)
    Device().__enter__()
    torch.autograd.set_multithreading_enabled(False)
    OBSERVED.start(None, early=os.environ["PRETENDED_MODE"] == "early")
    memory.start()
    atexit.register(_report, Path(os.environ["PRETENDED_REPORTS"]))


def _over_gloo(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        kwargs = {name: value for name, value in kwargs.items() if value != NCCL and name not in OF_NCCL}
        return make(*("gloo" if argument == NCCL else argument for argument in args), **kwargs)

    return made


@dataclass
class Report:
    """What one process of a command leaves. `job`: of the ranks that met, or None of a process alone."""

    waits: Counter[tuple[str, str]]
    worker_waits: Counter[tuple[str, str, str]]
    faults: Counter[str]
    job: tuple[str | None, ...] | None
    rank: int
    world_size: int
    log: Log


def _report(folder: Path) -> None:
    OBSERVED.fault("exchanges that nobody waited for", exchanges.run_all())
    OBSERVED.fault("copies on side streams that nobody waited for", streams.run_all())
    if not OBSERVED.launches:
        return
    rank, world_size = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    job = tuple(map(os.environ.get, OF_JOB)) if world_size > 1 else None
    report = Report(OBSERVED.waits, OBSERVED.worker_waits, OBSERVED.faults, job, rank, world_size, exchanges.take_log())
    (folder / f"{os.getpid()}.pickle").write_bytes(pickle.dumps(report))


def differences(reports: Sequence[Report]) -> list[str]:
    """Where ranks of a job told a communicator other things than each other; of jobs all of whose ranks came to their
    end."""
    found = []
    for job in {report.job for report in reports} - {None}:
        logs = {report.rank: report.log for report in reports if report.job == job}
        if len(logs) == next(report.world_size for report in reports if report.job == job):
            found += compare([logs[rank] for rank in sorted(logs)])
    return found
