"""One step across ranks, from the traces that `training.profile` writes: phases, parts of layers, and messages on their
way. Below a rank stands its stage in the step that the clock predicted, where there is one."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from pathlib import Path
from typing import Any, TypeVar

from simulator.clock.output.trace import FOLDER as PREDICTED_FOLDER
from simulator.clock.output.trace import MESSAGE

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
OTHER = "other"  # in a predicted step, work that a traced one does not name
NAMES = (*PHASES, *PARTS, "message", OTHER)
PREDICTED = re.compile(r"stage_(\d+)_rank_(\d+)\.json\.gz")
UNREADABLE = (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, AttributeError)
RankSpans = list[tuple[int, int, float, float]]  # lane, name, start, end
Item = TypeVar("Item")


def steps_with_traces(run_dir: Path) -> dict[int, dict[int, Path]]:
    """Paths of traces by step and rank."""
    found: dict[int, dict[int, Path]] = {}
    for path in sorted((run_dir / "traces").glob("*.json.gz")):
        match = NAME.fullmatch(path.name)
        if match:
            found.setdefault(int(match[1]), {})[int(match[2])] = path
    return found


def read_steps(run_dir: Path, notes: list[str]) -> list[dict[str, Any]]:
    """The newest traced steps, oldest first, or the predicted one alone; traces that cannot be read are noted and left
    out."""
    traces, predicted = steps_with_traces(run_dir), read_predicted(run_dir, notes)
    steps = []
    for step in sorted(traces)[-MAX_STEPS:]:
        ranks = sorted(traces[step])
        chosen = chosen_of(ranks)
        spans: dict[int, RankSpans] = {}
        for rank in chosen:
            try:
                spans[rank] = read_trace(traces[step][rank])
            except UNREADABLE:
                notes.append(f"{traces[step][rank].name} cannot be read and is left out.")
        spans = {rank: found for rank, found in spans.items() if found}
        if spans:
            steps.append(_picture(step, spans, len(ranks), predicted))
    if not steps and predicted:
        steps.append(_picture("predicted", {}, 0, predicted))
    return steps


def chosen_of(every: list[Item]) -> list[Item]:
    """All of a list, or MAX_RANKS of it, evenly."""
    return every if len(every) <= MAX_RANKS else [every[i * len(every) // MAX_RANKS] for i in range(MAX_RANKS)]


def read_predicted(run_dir: Path, notes: list[str]) -> dict[int, tuple[int, RankSpans]]:
    """The predicted step: by stage its first rank and its spans, which begin at 0; of many stages some."""
    found: dict[int, tuple[int, RankSpans]] = {}
    for path in chosen_of(sorted((run_dir / PREDICTED_FOLDER).glob("*.json.gz"))):
        match = PREDICTED.fullmatch(path.name)
        if match:
            try:
                found[int(match[1])] = int(match[2]), read_trace(path)
            except UNREADABLE:
                notes.append(f"{path.name} cannot be read and is left out.")
    return found


def read_trace(path: Path) -> RankSpans:
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
        name = _known(event["name"]) if "predicted" in trace else event["name"]
        if name in index:
            spans.append((int(name in PARTS), index[name], base + event["ts"], base + event["ts"] + event["dur"]))
    names = ("gloo:", "ncclDevKernel", "ncclKernel")
    messages = [event for event in events if event["name"].startswith(names) or event.get("cat") == MESSAGE]
    for start, end in merged((base + event["ts"], base + event["ts"] + event["dur"]) for event in messages):
        spans.append((2, index["message"], start, end))
    return sorted(spans, key=lambda span: (span[2], -span[3]))


def _known(name: str) -> str:
    """The name of a traced step for one of a predicted step, such as "forward 3 of chunk 1"."""
    whole = {"update": "optimizer"}.get(name, name)
    fitting = [known for known in NAMES if whole == known or whole.startswith(f"{known} ")]
    return max(fitting, key=len, default=OTHER)


def merged(intervals: Any) -> list[tuple[float, float]]:
    """The union of intervals, in order."""
    result: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if result and start <= result[-1][1]:
            result[-1] = result[-1][0], max(end, result[-1][1])
        else:
            result.append((start, end))
    return result


def _picture(
    step: int | str, traced: dict[int, RankSpans], num_traced: int, predicted: dict[int, tuple[int, RankSpans]]
) -> dict[str, Any]:
    """What the page draws: rows of ranks, and of stages as predicted below the ranks that they hold."""
    first = min((span[2] for found in traced.values() for span in found), default=0.0)
    rows = _rows({rank: _from(found, first) for rank, found in traced.items()}, predicted)
    last = max((span[3] for _, found in rows for span in found), default=0.0)
    lengths = sorted((end - start for _, found in rows for _, _, start, end in found), reverse=True)
    shortest = lengths[MAX_SPANS - 1] if len(lengths) > MAX_SPANS else 0.0
    spans = [
        [row * len(LANES) + lane, name, round(start, 1), round(end - start, 1)]
        for row, (_, found) in enumerate(rows)
        for lane, name, start, end in found
        if end - start >= shortest
    ]
    return {
        "step": step,
        "microseconds": round(last, 1),
        "ranks": sorted(traced),
        "labels": [label for label, _ in rows],
        "num_traced": num_traced,
        "left_out": len(lengths) - len(spans),
        "spans": spans,
        "summary": [{"rank": label.removeprefix("rank "), **_summary(found)} for label, found in rows],
    }


def _from(spans: RankSpans, first: float) -> RankSpans:
    return [(lane, name, start - first, end - first) for lane, name, start, end in spans]


def _rows(traced: dict[int, RankSpans], predicted: dict[int, tuple[int, RankSpans]]) -> list[tuple[str, RankSpans]]:
    """Labels and spans: each rank, and behind the last one of a stage what was predicted for the stage."""
    rows: list[tuple[str, RankSpans]] = []
    firsts = sorted((first, stage) for stage, (first, _) in predicted.items())
    for place, (first, stage) in enumerate(firsts):
        end = firsts[place + 1][0] if place + 1 < len(firsts) else None
        inside = [rank for rank in sorted(traced) if rank >= first and (end is None or rank < end)]
        rows += [(f"rank {rank}", traced[rank]) for rank in inside]
        rows.append((f"stage {stage}, predicted", predicted[stage][1]))
    return rows or [(f"rank {rank}", found) for rank, found in sorted(traced.items())]


def _summary(found: RankSpans) -> dict[str, float]:
    """Microseconds that a row spends on what."""
    # an evaluation is made of other phases
    exchange, evaluation = (NAMES.index("pipeline exchange"), NAMES.index("evaluation"))
    working = merged(
        (start, end) for lane, name, start, end in found if lane == 0 and name not in (exchange, evaluation)
    )
    waiting = merged((start, end) for lane, name, start, end in found if name == exchange)
    sending = merged((start, end) for lane, _, start, end in found if lane == 2)
    layers = merged((start, end) for lane, name, start, end in found if lane == 1 and "wait" not in NAMES[name])
    return {
        "working": _total(working),
        "waiting": _total(waiting),
        "messages": _total(sending),
        "hidden": _common(sending, layers),
    }


def _total(intervals: list[tuple[float, float]]) -> float:
    return sum(end - start for start, end in intervals)


def _common(first: list[tuple[float, float]], second: list[tuple[float, float]]) -> float:
    """Length of what is in both of two unions."""
    return _total(first) + _total(second) - _total(merged([*first, *second]))
