"""What a run on the pretended device did that no number shows, by the places in the product where it happened."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MEGATRON = "/megatron/core/"


@dataclass
class Mutant:
    """A call that is left out, to see that it is missed: `what` (wait, wait_event, record_stream), made on the way
    through `place`."""

    what: str
    place: str
    left_out: int = 0


@dataclass
class Observed:
    """What a run did that no number shows."""

    waits: Counter[tuple[str, str]] = field(default_factory=Counter)  # of the host, by kind and place
    faults: Counter[str] = field(default_factory=Counter)
    mutant: Mutant | None = None

    def start(self, mutant: Mutant | None) -> None:
        """Of a new run."""
        self.waits, self.faults, self.mutant = Counter(), Counter(), mutant

    def fault(self, what: str, count: int = 1) -> None:
        """What no program should do."""
        self.faults += Counter({what: count})  # zeros are left out

    def wait(self, kind: str) -> None:
        """The host would wait here for the device."""
        self.waits[kind, place()] += 1

    def leaves_out(self, what: str) -> bool:
        """Whether the mutant lacks the call that is being made."""
        mutant = self.mutant
        if mutant is None or mutant.what != what or mutant.place not in places():
            return False
        mutant.left_out += 1
        return True


OBSERVED = Observed()


def places() -> Iterator[str]:
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


def place() -> str:
    """The innermost of `places`."""
    return next(places(), "autograd")
