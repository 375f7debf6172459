"""The order of rungs, and one call's walk over them within its seconds."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.card import records
from benchmarks.card.records import Record, Records

ROOT = Path(__file__).resolve().parents[2]
MOST_SECONDS = 60.0  # of a rung, unless it says otherwise
SOURCES = (".py", ".cpp", ".h", ".cu", ".yaml")  # that figures depend on
LEEWAY = 1.15  # by which a rung may take longer than the last time
LEAST = 2.0  # seconds that any rung is taken to cost
OVERDUE = 10.0  # seconds after its limit at which a rung that has not ended costs its process
BROKEN = 3  # the exit status of a process that must be started again: it hangs, or its CUDA context is broken

Row = dict[str, Any]


class PartlyDone(Exception):
    """Raised by a rung that has more to do than its seconds allow; its rows are kept, and the next call continues."""


class TimeIsUp(BaseException):
    """Raised inside a rung whose seconds are over; no rung's own `except Exception` catches it."""


@dataclasses.dataclass(frozen=True)
class Task:
    """Arguments of a rung's `measure`.

    Attributes:
        is_small: tiny sizes, for a device without speed.
        seconds: time limit of the rung.
        end: the limit as a time of time.monotonic.
        show: called with a row as soon as it is measured; the row is on the disk when the call returns.
        code: digest of what its figures depend on.
        earlier: rows of an attempt at the same code that was not finished.
        others: all results of this kind of card.
    """

    is_small: bool
    seconds: float
    end: float
    show: Callable[[Row], None]
    code: str = ""
    earlier: tuple[Row, ...] = ()
    others: tuple[Record, ...] = ()


@dataclasses.dataclass(frozen=True)
class Rung:
    """One thing to measure.

    Attributes:
        name: unique.
        seconds: an estimate of its cost, for a card that it was never measured on.
        paths: files and folders, from the repository's root, whose change makes its figures old.
        measure: shows its rows. It may raise PartlyDone, and anything else where it fails.
        model: text of the config that it trains with, whose change counts as that of a file.
        most: seconds that it may take at most.
        made_from: rungs from whose results its own are computed, which are old when one of those is renewed.
    """

    name: str
    seconds: float
    paths: tuple[str, ...]
    measure: Callable[[Task], None]
    model: str = ""
    most: float = MOST_SECONDS
    made_from: tuple[str, ...] = ()

    def code(self, torch_version: str, kept: Records, card: str, known: dict[str, bytes]) -> str:
        """Return the digest of what the figures depend on; `known` holds the digests of paths."""
        digest = hashlib.sha256(f"{torch_version}\n{self.model}\n".encode())
        for name in self.made_from:
            result = kept.result(name, card)
            digest.update(f"{name} {result and (result.code, result.commit, result.rows)}\n".encode())
        for path in self.paths:
            if path not in known:
                known[path] = digest_of(ROOT / path)
            digest.update(known[path])
        return digest.hexdigest()[:16]


def digest_of(path: Path) -> bytes:
    """Return the SHA-256 of a file, or of all sources in a folder; a missing path has the digest of nothing."""
    digest = hashlib.sha256()
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file() and file.suffix in SOURCES:
            digest.update(f"{file.relative_to(ROOT)}\n".encode())
            digest.update(file.read_bytes())
    return digest.digest()


@dataclasses.dataclass(frozen=True)
class State:
    """The cost of a rung in seconds on this kind of card, its turn, and the reason for that turn."""

    rung: Rung
    code: str
    cost: float
    turn: int | None  # the smaller the sooner; None: done
    why: str


NEW, RENEW, AGAIN = range(3)


def state(rung: Rung, kept: Records, card: str, torch_version: str, known: dict[str, bytes] | None = None) -> State:
    """Compare the results on record with the current code."""
    code = rung.code(torch_version, kept, card, {} if known is None else known)
    result, attempt = kept.result(rung.name, card), kept.attempt(rung.name, card)
    cost = rung.seconds if result is None else max(LEAST, LEEWAY * result.seconds)
    cost = min(cost, rung.most)
    if attempt is not None and attempt.code == code and attempt.status != records.PARTLY:
        reasons = {records.STARTED: "its process ended in it", records.LATE: "its time was up"}
        return State(rung, code, cost, AGAIN, reasons.get(attempt.status, f"failed: {attempt.note}"))
    if attempt is not None and attempt.code == code:
        return State(rung, code, cost, NEW, "to be gone on with")
    if result is None:
        return State(rung, code, cost, NEW, "never measured")
    if result.code == code:
        return State(rung, code, cost, None, f"measured at {result.commit}")
    return State(rung, code, cost, RENEW, f"to be renewed: measured at {result.commit}")


def in_order(states: Sequence[State]) -> list[State]:
    """Return the rungs to be measured: new ones, then those to be renewed, then those that failed with this code."""
    return sorted((each for each in states if each.turn is not None), key=lambda each: each.turn or 0)


class Walk:
    """One call: rungs until the time is up."""

    def __init__(
        self, kept: Records, card: str, machine: dict[str, Any], commit: str, end: float, is_small: bool
    ) -> None:
        """end: in time.monotonic's seconds. machine: as a record has it, with `torch`."""
        self.kept, self.card, self.machine, self.commit = kept, card, machine, commit
        self.end, self.is_small = end, is_small
        self.ended: dict[str, str] = {}  # the status of each rung of this call

    def run(self, rungs: Sequence[Rung], clear: Callable[[], None] = lambda: None) -> str:
        """Measure what fits, in order, and `clear` after each; a rung that fails does not stop the others. Return what
        is left, in words."""
        known: dict[str, bytes] = {}  # no code changes while it runs
        while True:
            states = [state(rung, self.kept, self.card, self.machine["torch"], known) for rung in rungs]
            left = self.end - time.monotonic()
            due = [each for each in in_order(states) if each.rung.name not in self.ended]
            fitting = [each for each in due if each.cost <= left]
            if not fitting:
                if not due:
                    cut = sum(status == records.PARTLY for status in self.ended.values())
                    return f"{cut} to be gone on with" if cut else "nothing is left to measure"
                least = min(each.cost for each in due)
                return f"{len(due)} rungs are left, and the shortest needs {least:.0f} of {max(left, 0.0):.0f} s"
            self._measure(fitting[0], min(fitting[0].rung.most, left))
            clear()

    def _measure(self, chosen: State, seconds: float) -> None:
        rung = chosen.rung
        attempt = self.kept.attempt(rung.name, self.card)
        earlier = list(attempt.rows) if attempt is not None and attempt.code == chosen.code else []
        record = Record(
            rung=rung.name,
            card=self.card,
            status=records.STARTED,
            code=chosen.code,
            commit=self.commit,
            date=datetime.datetime.now(datetime.UTC).date().isoformat(),
            machine=self.machine,
        )
        record.rows.extend(earlier)  # they stand until this attempt has one
        has_own = False
        began = time.monotonic()

        def put(status: str, note: str = "") -> None:
            nonlocal record
            taken = round(time.monotonic() - began, 2)
            record = dataclasses.replace(record, status=status, seconds=taken, note=note)
            self.kept.put(record)

        def show(row: Row) -> None:
            nonlocal has_own
            if not has_own:
                record.rows.clear()
                has_own = True
            record.rows.append(row)
            put(records.STARTED)

        put(records.STARTED)
        others = tuple(each for each in self.kept if each.card == self.card and each.status == records.WELL)
        task = Task(self.is_small, seconds, time.monotonic() + seconds, show, chosen.code, tuple(earlier), others)
        status, note = records.WELL, ""
        try:
            with limited(seconds):
                rung.measure(task)
        except PartlyDone as error:
            status, note = records.PARTLY, str(error)
        except TimeIsUp:
            status, note = records.LATE, f"its time was up after {seconds:.0f} s"
        except Exception as error:
            status, note = records.FAILED, f"{type(error).__name__}: {error}".splitlines()[0][:300]
            traceback.print_exc(file=sys.stderr)
        put(status, note)
        self.ended[rung.name] = status
        said = f"{status}{f': {note}' if note else ''}"
        print(f"card: {rung.name}: {said}, {record.seconds:.1f} s, {len(record.rows)} rows", flush=True)


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise TimeIsUp in this thread after `seconds`, when Python next runs in it. A call that does not return to Python
    within OVERDUE seconds more, such as a hung call of CUDA, ends the process with status BROKEN."""

    def stop(signum: int, frame: Any) -> None:
        raise TimeIsUp

    overdue = threading.Timer(seconds + OVERDUE, os._exit, (BROKEN,))
    overdue.daemon = True
    overdue.start()
    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        overdue.cancel()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def listing(states: Sequence[State]) -> list[list[str]]:
    """Return a row for each rung: its turn, name, cost in seconds and state."""
    order = [each.rung.name for each in in_order(states)]
    return [
        [
            str(order.index(each.rung.name) + 1) if each.rung.name in order else "-",
            each.rung.name,
            f"{each.cost:.0f}",
            each.why,
        ]
        for each in states
    ]
