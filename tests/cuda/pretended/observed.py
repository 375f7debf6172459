"""Waits, copied bytes and faults of a run on the pretended device, by call site in the product."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

AT_WAIT: list[Callable[[], object]] = []  # what the host finds done once it has waited for the default stream
ROOT = Path(__file__).resolve().parents[3]
MEGATRON = "/megatron/core/"
VIEWS = (
    "view _unsafe_view slice select split split_with_sizes t transpose permute expand alias detach unsqueeze squeeze"
)
ALLOCATIONS = "empty new_empty empty_strided new_empty_strided empty_like lift_fresh"
NO_LAUNCH = {*VIEWS.split(), "unbind", "as_strided", "_reshape_alias", *ALLOCATIONS.split()}


@dataclass
class Mutant:
    """A call that is left out, to see that it is missed: `what` (wait, wait_event, wait_stream, record_stream,
    event.synchronize, stream.synchronize), made on the way through `place`. Or `order`: on rank 1 the communicator's
    next operation overtakes this one. Or `written`: a record of a store is read before its last change is over."""

    what: str
    call_site: str
    left_out: int = 0
    thread: str | None = None  # by its name, as `from device lane`; None: any


def is_launch(name: str) -> bool:
    """Whether the device does something in an operation: it is neither a view nor an allocation."""
    return name not in NO_LAUNCH


@dataclass
class Observed:
    """What a run did that no number shows."""

    waits: Counter[tuple[str, str]] = field(default_factory=Counter)  # of the main thread, by kind and place
    worker_waits: Counter[tuple[str, str, str]] = field(default_factory=Counter)  # of others, by thread, kind and place
    to_device: Counter[str] = field(default_factory=Counter)  # bytes from the host, by place
    to_host: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    launches: Counter[str] = field(default_factory=Counter)  # by place
    pinned: Counter[str] = field(default_factory=Counter)  # pieces of page-locked memory that were made, by place
    empty_groups: int = 0  # of grouped products that leave them as they were
    mutant: Mutant | None = None
    early: bool = False
    _as_one: int = 0  # inside what a GPU does in kernels that are counted already

    def start(self, mutant: Mutant | None, early: bool = False) -> None:
        """Of a new run; `early`: what may be late is done at once."""
        self.early = early
        self.waits, self.faults, self.launches, self.mutant = Counter(), Counter(), Counter(), mutant
        self.worker_waits, self.to_device, self.to_host = Counter(), Counter(), Counter()
        self.pinned = Counter()
        self.empty_groups = 0

    def fault(self, what: str, count: int = 1) -> None:
        """What no program should do."""
        self.faults += Counter({what: count})  # zeros are left out

    def wait(self, kind: str) -> None:
        """The host would wait here for the device."""
        if threading.current_thread() is threading.main_thread():
            self.waits[kind, call_site()] += 1
        else:
            self.worker_waits[threading.current_thread().name, kind, call_site()] += 1
            if kind != "event.synchronize":
                self.fault(f"a thread beside the main one waited by {kind}, in {call_site()}")
        if kind not in ("event.synchronize", "stream.synchronize"):
            for arrive in AT_WAIT:
                arrive()

    def carry(self, count: int, to_device: bool) -> None:
        """So many bytes go between host and device."""
        (self.to_device if to_device else self.to_host)[call_site()] += count

    def launch(self, name: str) -> None:
        """An operation of the device."""
        if not self._as_one and is_launch(name):
            self.launches[call_site()] += 1

    @contextlib.contextmanager
    def kernels(self, count: int) -> Iterator[None]:
        """What is done inside takes a GPU so many kernels."""
        self.launches[call_site()] += 0 if self._as_one else count
        self._as_one += 1
        try:
            yield
        finally:
            self._as_one -= 1

    def leaves_out(self, what: str) -> bool:
        """Whether the mutant lacks the call that is being made."""
        mutant = self.mutant
        if mutant is None or mutant.what != what or mutant.call_site not in call_sites():
            return False
        if mutant.thread not in (None, threading.current_thread().name):
            return False
        mutant.left_out += 1
        return True


OBSERVED = Observed()


def call_sites() -> Iterator[str]:
    """`file:function` of the calls that are under way in the product and in Megatron-core, innermost first."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if MEGATRON in file:
            yield f"{MEGATRON[1:]}{file.split(MEGATRON)[1]}:{frame.f_code.co_qualname}"
        elif file.startswith(f"{ROOT}/") and not (name := file.removeprefix(f"{ROOT}/")).startswith(
            ("tests/", ".venv/")
        ):
            yield f"{name}:{frame.f_code.co_qualname}"
        frame = frame.f_back  # type: ignore[assignment]


def call_site() -> str:
    """Return the innermost of `call_sites`, or autograd."""
    return next(call_sites(), "autograd")
