"""How long the two passes of a layer's calls take, for planners to compare with what they predicted."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

MOST = 256  # measurements that are held until somebody asks


class PassTimer:
    """Seconds per pass ("forward", "backward"). On a GPU events on the current stream; nobody waits for them before
    `take`."""

    def __init__(self) -> None:
        self._measured: dict[str, list[tuple[Any, Any]]] = {}

    @contextmanager
    def measure(self, name: str, device: torch.device) -> Iterator[None]:
        """Time what runs inside."""
        start = _now(device)
        yield
        measured = self._measured.setdefault(name, [])
        measured.append((start, _now(device)))
        del measured[:-MOST]

    def take(self) -> dict[str, float]:
        """The median of each pass since the last call of this; on a GPU the host waits for the last pass."""
        result = {name: statistics.median(_seconds(*span) for span in spans) for name, spans in self._measured.items()}
        self._measured.clear()
        return result


def _now(device: torch.device) -> Any:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds(start: Any, end: Any) -> float:
    if isinstance(start, float):
        return end - start
    end.synchronize()
    return start.elapsed_time(end) / 1000
