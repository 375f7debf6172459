"""The last collective that this process started, and how long it has waited for collectives: noted as they are called.

torch keeps this for NCCL alone, and gives it out only after a failure. So each method of a process group that starts a collective
is wrapped, and the wait for one; it costs about a microsecond a call. Installed once per process, and never removed.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

# As torch 2.11 to 2.13 call them; a name that a version does not have is passed over.
_STARTERS = (
    *("allreduce", "allreduce_coalesced", "reduce", "broadcast", "barrier", "gather", "scatter", "send", "recv", "recv_anysource"),
    *("allgather", "_allgather_base", "all_gather_single", "all_gather_single_coalesced", "allgather_into_tensor_coalesced"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single", "reduce_scatter_single_coalesced"),
    *("reduce_scatter_tensor_coalesced", "alltoall", "alltoall_base", "all_to_all_single"),
)


class CollectiveLog:
    """What is known of this process's collectives. `waiting_since` is None unless the host waits for one just now."""

    def __init__(self) -> None:
        self.name = "none"
        self.group_size = 0
        self.count = 0
        self.waited = 0.0  # seconds, in all; on CUDA the device waits, not the host, so it stays near 0
        self.waiting_since: float | None = None  # time.monotonic()
        self.error: BaseException | None = None  # the last one that a collective raised

    @property
    def last(self) -> str:
        """The last collective started, in words."""
        return self.name if self.group_size == 0 else f"{self.name} of {self.group_size} ranks"


log = CollectiveLog()
_installed = False


def install() -> CollectiveLog:
    """Begin to take notes; the log of this process. May be called more than once."""
    global _installed
    if not _installed:
        _installed = True
        for name in _STARTERS:
            starter = getattr(dist.ProcessGroup, name, None)
            if starter is not None:
                setattr(dist.ProcessGroup, name, _noting_start(name.strip("_"), starter))
        dist.Work.wait = _noting_wait(dist.Work.wait)  # type: ignore[method-assign]
    return log


def raised(error: BaseException | None) -> bool:
    """Whether an error came out of a collective, itself or as the cause or context of another."""
    while error is not None:
        if error is log.error or isinstance(error, dist.DistError):
            return True
        error = error.__cause__ or error.__context__
    return False


def _noting_start(name: str, starter: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(starter)
    def start(group: dist.ProcessGroup, *arguments: Any, **keywords: Any) -> Any:
        log.name, log.group_size = name, group.size()
        log.count += 1
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
