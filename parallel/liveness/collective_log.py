"""A log of the last collective that this process started, and of the time it has waited for collectives.

torch records this only for NCCL, and reports it only after a failure. So the methods of a process group that start a
collective are wrapped, and so is the wait for one, which costs about a microsecond per call.
"""

from __future__ import annotations

import functools
import struct
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

# Names in torch 2.11 to 2.13; a name that a version does not have is skipped.
_STARTERS = (
    "allreduce allreduce_coalesced reduce broadcast barrier gather scatter send recv recv_anysource "
    "allgather _allgather_base all_gather_single all_gather_single_coalesced allgather_into_tensor_coalesced "
    "reduce_scatter _reduce_scatter_base reduce_scatter_single reduce_scatter_single_coalesced "
    "reduce_scatter_tensor_coalesced alltoall alltoall_base all_to_all_single"
).split()

_RECORD = struct.Struct("<4q")  # step, collectives started, index in _STARTERS, ranks in the group
BOX_BYTES = _RECORD.size


class CollectiveLog:
    """A log of this process's collectives. `waiting_since`: when the host began to wait for a collective, or None."""

    def __init__(self) -> None:
        self.name = "none"
        self.group_size = 0
        self.count = 0
        self.waited = 0.0  # seconds of the host in total; near 0 on CUDA, where the device waits
        self.waiting_since: float | None = None  # time.monotonic()
        self.error: BaseException | None = None  # the last error that a collective raised
        self.step = 0  # number of finished steps
        self.index = 0  # index of the last collective in _STARTERS
        self._box: Any = None

    def write_to(self, box: Any) -> None:
        """Write each collective to `box`, BOX_BYTES bytes of shared memory that other processes can read."""
        self._box = box

    def note_step(self, step: int) -> None:
        """Record the number of finished steps."""
        self.step = step
        self.write_box()

    def write_box(self) -> None:
        if self._box is not None:
            _RECORD.pack_into(self._box, 0, self.step, self.count, self.index, self.group_size)

    @property
    def last(self) -> str:
        """The last collective that was started, as text: its name and its number of ranks."""
        return _describe(self.name, self.group_size)


def read_box(box: Any) -> tuple[int, str]:
    """Read another process's shared memory. Returns (number of finished steps, last collective as text)."""
    step, count, index, group_size = _RECORD.unpack_from(box)
    return step, _describe(_STARTERS[index].strip("_"), group_size) if count else "none"


def _describe(name: str, group_size: int) -> str:
    return name if group_size == 0 else f"{name} of {group_size} ranks"


log = CollectiveLog()
_installed = False


def install() -> CollectiveLog:
    """Start to log collectives, and return the log of this process. Can be called more than once."""
    global _installed
    if not _installed:
        _installed = True
        for index, name in enumerate(_STARTERS):
            starter = getattr(dist.ProcessGroup, name, None)
            if starter is not None:
                setattr(dist.ProcessGroup, name, _noting_start(index, starter))
        dist.Work.wait = _noting_wait(dist.Work.wait)  # type: ignore[method-assign]
    return log


def raised(error: BaseException | None) -> bool:
    """Whether a collective raised this error, directly or as the cause or context of another error."""
    while error is not None:
        if error is log.error or isinstance(error, dist.DistError):
            return True
        error = error.__cause__ or error.__context__
    return False


def _noting_start(index: int, starter: Callable[..., Any]) -> Callable[..., Any]:
    name = _STARTERS[index].strip("_")

    @functools.wraps(starter)
    def start(group: dist.ProcessGroup, *arguments: Any, **keywords: Any) -> Any:
        log.name, log.index, log.group_size = name, index, group.size()
        log.count += 1
        log.write_box()
        try:
            return starter(group, *arguments, **keywords)
        except BaseException as error:
            log.error = error
            raise

    return start


def _noting_wait(wait: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(wait)
    def noted(work: dist.Work, *arguments: Any, **keywords: Any) -> Any:
        begin = time.monotonic()
        log.waiting_since = begin
        try:
            return wait(work, *arguments, **keywords)
        except BaseException as error:
            log.error = error
            raise
        finally:
            log.waiting_since = None
            log.waited += time.monotonic() - begin

    return noted
