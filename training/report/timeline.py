"""One step across ranks, from the traces that `training.profile` writes: phases, parts of layers, and messages on their
way."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from pathlib import Path
from typing import Any

NAME = re.compile(r"step_(\d+)_rank_(\d+)\.json\.gz")
MAX_RANKS = 16  # on one picture; evenly chosen where there are more
MAX_SPANS = 15_000  # of all ranks; the shortest go first
MAX_STEPS = 3  # the newest
PHASES = (
    "evaluation",
    "data",
    "forward",
    "backward",
    "pipeline exchange",
    "gradient reduction",
    "gradient norm",
    "optimizer",
    "checkpoint",
)
PARTS = (
    *("attention", "attention backward", "dispatch", "dispatch wait", "experts", "experts backward"),
    *("experts weight gradients", "combine", "shared expert", "shared expert backward"),
)
LANES = ("step", "layers", "messages")
NAMES = (*PHASES, *PARTS, "message")


def steps_with_traces(run_dir: Path) -> dict[int, dict[int, Path]]:
    """Paths of traces by step and rank."""
    found: dict[int, dict[int, Path]] = {}
    for path in sorted((run_dir / "traces").glob("*.json.gz")):
        match = NAME.fullmatch(path.name)
        if match:
            found.setdefault(int(match[1]), {})[int(match[2])] = path
    return found


def read_steps(run_dir: Path, notes: list[str]) -> list[dict[str, Any]]:
    """The newest traced steps, oldest first; traces that cannot be read are noted and left out."""
    traces = steps_with_traces(run_dir)
    steps = []
    for step in sorted(traces)[-MAX_STEPS:]:
        ranks = sorted(traces[step])
        chosen = ranks if len(ranks) <= MAX_RANKS else [ranks[i * len(ranks) // MAX_RANKS] for i in range(MAX_RANKS)]
        spans: dict[int, list[tuple[int, int, float, float]]] = {}
        for rank in chosen:
            try:
                spans[rank] = read_trace(traces[step][rank])
            except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, AttributeError):
                notes.append(f"{traces[step][rank].name} cannot be read and is left out.")
        spans = {rank: found for rank, found in spans.items() if found}
        if spans:
            steps.append(_picture(step, spans, len(ranks)))
    return steps


def read_trace(path: Path) -> list[tuple[int, int, float, float]]:
    """(lane, name, start, end) in microseconds of absolute time, the long before the short of the same start."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        trace = json.load(file)
    base = trace.get("baseTimeNanoseconds", 0) / 1000
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    # Where a device did the work, its own times count, not those at which the host asked for it.
    device = [event for event in events if event.get("cat") == "gpu_user_annotation"]
    host = [event for event in events if event.get("cat") == "user_annotation"]
    on_device = {event["name"] for event in device}
    index = {name: i for i, name in enumerate(NAMES)}
    spans = []
    for event in device + [event for event in host if event["name"] not in on_device]:
        name = event["name"]
        if name in index:
            spans.append((int(name not in PHASES), index[name], base + event["ts"], base + event["ts"] + event["dur"]))
    messages = [event for event in events if event["name"].startswith(("gloo:", "ncclDevKernel", "ncclKernel"))]
    for start, end in merged((base + event["ts"], base + event["ts"] + event["dur"]) for event in messages):
        spans.append((2, index["message"], start, end))
    return sorted(spans, key=lambda span: (span[2], -span[3]))


def merged(intervals: Any) -> list[tuple[float, float]]:
    """The union of intervals, in order."""
    result: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if result and start <= result[-1][1]:
            result[-1] = result[-1][0], max(end, result[-1][1])
        else:
            result.append((start, end))
    return result


def _picture(step: int, spans: dict[int, list[tuple[int, int, float, float]]], num_traced: int) -> dict[str, Any]:
    first = min(span[2] for found in spans.values() for span in found)
    last = max(span[3] for found in spans.values() for span in found)
    lengths = sorted((end - start for found in spans.values() for _, _, start, end in found), reverse=True)
    shortest = lengths[MAX_SPANS - 1] if len(lengths) > MAX_SPANS else 0.0
    # an evaluation is made of other phases
    exchange, evaluation = (NAMES.index("pipeline exchange"), NAMES.index("evaluation"))
    rows, summary = [], []
    for row, (rank, found) in enumerate(sorted(spans.items())):
        for lane, name, start, end in found:
            if end - start >= shortest:
                rows.append([row * len(LANES) + lane, name, round(start - first, 1), round(end - start, 1)])
        working = merged(
            (start, end) for lane, name, start, end in found if lane == 0 and name not in (exchange, evaluation)
        )
        waiting = merged((start, end) for lane, name, start, end in found if name == exchange)
        sending = merged((start, end) for lane, _, start, end in found if lane == 2)
        hidden = _common(
            sending, merged((start, end) for lane, name, start, end in found if lane == 1 and "wait" not in NAMES[name])
        )
        summary.append(
            {
                "rank": rank,
                "working": _total(working),
                "waiting": _total(waiting),
                "messages": _total(sending),
                "hidden": hidden,
            }
        )
    return {
        "step": step,
        "microseconds": round(last - first, 1),
        "ranks": sorted(spans),
        "num_traced": num_traced,
        "left_out": len(lengths) - len(rows),
        "spans": rows,
        "summary": summary,
    }


def _total(intervals: list[tuple[float, float]]) -> float:
    return sum(end - start for start, end in intervals)


def _common(first: list[tuple[float, float]], second: list[tuple[float, float]]) -> float:
    """Length of what is in both of two unions."""
    return _total(first) + _total(second) - _total(merged([*first, *second]))
