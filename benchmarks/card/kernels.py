"""Kernels of a GPU by time, and the gaps between them with the Python function that ended each.

From a trace of torch's profiler (Kineto's JSON). A kernel is tied to the call that launched it by its correlation, and
that call to the functions of Python that were running in its thread.
"""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from training.report.timeline import merged

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")
GAP = 20.0  # microseconds: shorter ones are not listed
SKIPPED = ("torch/", "<built-in", "<string>", "contextlib.py", "functools.py")  # say nothing of who launched


@dataclass(frozen=True)
class Kernel:
    """One kernel or copy: microseconds of the trace, and the number of its launch."""

    name: str
    start: float
    end: float
    correlation: int
    is_kernel: bool


@dataclass
class Trace:
    """Kernels in order; `launches`: time and thread by correlation; `python`: the calls of each thread, by start."""

    kernels: list[Kernel] = field(default_factory=list)
    launches: dict[int, tuple[float, Any]] = field(default_factory=dict)
    python: dict[Any, list[tuple[float, float, str]]] = field(default_factory=lambda: defaultdict(list))

    @classmethod
    def read(cls, events: Sequence[dict[str, Any]]) -> Trace:
        """Read the list `traceEvents` of a trace."""
        found = cls()
        for event in events:
            kind = event.get("cat")
            if event.get("ph") != "X" or not isinstance(kind, str):
                continue
            start, end = float(event["ts"]), float(event["ts"]) + float(event.get("dur", 0.0))
            correlation = event.get("args", {}).get("correlation", 0)
            if kind in ON_DEVICE:
                found.kernels.append(Kernel(event["name"], start, end, correlation, kind == "kernel"))
            elif kind in LAUNCHES and correlation:
                found.launches[correlation] = start, event.get("tid")
            elif kind == "python_function":
                found.python[event.get("tid")].append((start, end, event["name"]))
        found.kernels.sort(key=lambda kernel: kernel.start)
        for calls in found.python.values():
            calls.sort()
        return found

    @property
    def busy(self) -> float | None:
        """Return the share of the time, from the first kernel to the last one's end, in which any kernel runs."""
        if not self.kernels:
            return None
        spans = merged((kernel.start, kernel.end) for kernel in self.kernels)
        return sum(end - start for start, end in spans) / (spans[-1][1] - spans[0][0])

    @property
    def count(self) -> int:
        """Return the number of kernels; copies and fills are not counted."""
        return sum(kernel.is_kernel for kernel in self.kernels)

    def longest(self, number: int) -> list[dict[str, Any]]:
        """Return the kernels with the most time: name, calls, milliseconds, share of all kernels' time."""
        by_name: dict[str, list[float]] = defaultdict(list)
        for kernel in self.kernels:
            by_name[kernel.name].append(kernel.end - kernel.start)
        total = sum(map(sum, by_name.values()))
        ordered = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:number]
        return [
            {"kernel": name, "calls": len(times), "ms": sum(times) / 1e3, "share": sum(times) / total}
            for name, times in ordered
        ]

    def gaps(self, least: float = GAP) -> list[dict[str, Any]]:
        """Sum the gaps longer than `least` microseconds, by the function that launched the kernel after each."""
        behind: list[tuple[Kernel, float]] = []
        end = self.kernels[0].end if self.kernels else 0.0
        for kernel in self.kernels:
            if kernel.start - end > least:
                behind.append((kernel, kernel.start - end))
            end = max(end, kernel.end)
        lines = self._lines_of([kernel for kernel, _ in behind])
        by_line: dict[tuple[str, str], list[float]] = defaultdict(list)
        for kernel, length in behind:
            by_line[lines[kernel.correlation], kernel.name].append(length)
        ordered = sorted(by_line.items(), key=lambda item: -sum(item[1]))
        return [
            {"line": line, "before": name, "gaps": len(times), "ms": sum(times) / 1e3, "longest_us": max(times)}
            for (line, name), times in ordered
        ]

    def _lines_of(self, kernels: Sequence[Kernel]) -> dict[int, str]:
        """Return, by correlation, `file(line): function` of the innermost function of ours, or of any, that ran when a
        kernel was launched."""
        found = {kernel.correlation: "unknown" for kernel in kernels}
        by_thread: dict[Any, list[tuple[float, int]]] = defaultdict(list)
        for number in found.keys() & self.launches.keys():
            time, thread = self.launches[number]
            by_thread[thread].append((time, number))
        for thread, launches in by_thread.items():
            calls, next_call = self.python.get(thread, []), 0
            running: list[tuple[float, str]] = []  # calls that have not ended, the innermost last: they are nested
            for time, number in sorted(launches):
                while next_call < len(calls) and calls[next_call][0] <= time:
                    start, end, name = calls[next_call]
                    while running and running[-1][0] < start:
                        running.pop()
                    running.append((end, name))
                    next_call += 1
                while running and running[-1][0] < time:
                    running.pop()
                names = [name for _, name in running]
                ours = [name for name in names if not any(skipped in name for skipped in SKIPPED)]
                found[number] = (ours or names or ["a thread without Python"])[-1]
        return found


def traced(work: Callable[[], Any], with_stack: bool) -> Trace:
    """Return the trace of `work`; without kernels if the device has none."""
    from torch import profiler

    kinds = [profiler.ProfilerActivity.CUDA]
    if kinds[0] not in profiler.supported_activities():
        work()
        return Trace()
    if with_stack:
        kinds.append(profiler.ProfilerActivity.CPU)
    with profiler.profile(activities=kinds, with_stack=with_stack) as found:
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        found.export_chrome_trace(str(path))
        return Trace.read(json.loads(path.read_text(encoding="utf-8", errors="replace"))["traceEvents"])
