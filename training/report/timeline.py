"""One step across ranks, from the traces that `training.profile` writes: phases of the step, phases of layers, and
messages in flight. Below the ranks of a pipeline stage is the predicted step of that stage, if there is one."""

from __future__ import annotations

import gzip
import json
import math
import re
import zlib
from pathlib import Path
from typing import Any, TypeVar

from simulator.clock.trace import FOLDER as PREDICTED_FOLDER
from simulator.clock.trace import MESSAGE

NAME = re.compile(r"step_(\d+)_rank_(\d+)\.json\.gz")
MAX_RANKS = 16  # in one picture; of more ranks, evenly spaced ones are chosen
MAX_SPANS = 15_000  # of all ranks; of more spans, the shortest are left out
MAX_STEPS = 3  # the newest
PHASES = (
    *("evaluation", "data", "forward", "backward", "pipeline exchange", "gradient reduction", "gradient norm"),
    *("optimizer", "checkpoint"),
)
LAYER_PHASES = (
    *("attention", "attention backward", "dispatch", "dispatch wait", "experts", "experts backward"),
    *("experts weight gradients", "combine", "shared expert", "shared expert backward"),
)
LANES = ("step", "layers", "messages")
OTHER = "other"  # work of a predicted step that has no name in a traced one
NAMES = (*PHASES, *LAYER_PHASES, "message", OTHER)
PREDICTED = re.compile(r"stage_(\d+)_rank_(\d+)\.json\.gz")
UNREADABLE = (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, AttributeError)
RankSpans = list[tuple[int, int, float, float]]  # lane, name, start, end
Item = TypeVar("Item")


def read_steps(run_dir: Path, notes: list[str]) -> list[dict[str, Any]]:
    """Return timelines of the newest traced steps, oldest first; without traced steps, the timeline of the predicted
    step. Traces that cannot be read are left out and named in `notes`."""
    traces: dict[int, dict[int, Path]] = {}  # by step and rank
    for path in sorted((run_dir / "traces").glob("*.json.gz")):
        match = NAME.fullmatch(path.name)
        if match:
            traces.setdefault(int(match[1]), {})[int(match[2])] = path
    predicted: dict[int, tuple[int, RankSpans]] = {}  # by stage: the first rank and the spans, which start at 0
    for path in chosen_of(sorted((run_dir / PREDICTED_FOLDER).glob("*.json.gz"))):
        match = PREDICTED.fullmatch(path.name)
        if match:
            try:
                predicted[int(match[1])] = int(match[2]), read_trace(path)
            except UNREADABLE:
                notes.append(f"{path.name} cannot be read and is left out.")
    steps = []
    for step in sorted(traces)[-MAX_STEPS:]:
        ranks = sorted(traces[step])
        spans: dict[int, RankSpans] = {}
        for rank in chosen_of(ranks):
            try:
                spans[rank] = read_trace(traces[step][rank])
            except UNREADABLE:
                notes.append(f"{traces[step][rank].name} cannot be read and is left out.")
        if spans := {rank: found for rank, found in spans.items() if found}:
            steps.append(_picture(step, spans, len(ranks), predicted))
    if not steps and predicted:
        steps.append(_picture("predicted", {}, 0, predicted))
    return steps


def chosen_of(every: list[Item]) -> list[Item]:
    """Return the list `every` or, if it is longer than MAX_RANKS, MAX_RANKS evenly spaced elements of it."""
    return every if len(every) <= MAX_RANKS else [every[i * len(every) // MAX_RANKS] for i in range(MAX_RANKS)]


def read_trace(path: Path) -> RankSpans:
    """Read a trace's spans as (lane, index of the name in NAMES, start, end), with absolute times in microseconds. The
    lane is an index in LANES. Spans are sorted by start; of spans with equal starts, the longest is first."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        trace = json.load(file)
    base = trace.get("baseTimeNanoseconds", 0) / 1000
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    # For work on a device, the device's times count, not those of the host's launches.
    device = [event for event in events if event.get("cat") == "gpu_user_annotation"]
    host = [event for event in events if event.get("cat") == "user_annotation"]
    on_device = {event["name"] for event in device}
    index = {name: i for i, name in enumerate(NAMES)}
    spans = []
    for event in device + [event for event in host if event["name"] not in on_device]:
        name, start = event["name"], base + event["ts"]
        if "predicted" in trace:  # such as "forward 3 of chunk 1"
            whole = {"update": "optimizer"}.get(name, name)
            fitting = [known for known in NAMES if whole == known or whole.startswith(f"{known} ")]
            name = max(fitting, key=len, default=OTHER)
        if name in index:
            spans.append((int(name in LAYER_PHASES), index[name], start, start + event["dur"]))
    names = ("gloo:", "ncclDevKernel", "ncclKernel")
    messages = [event for event in events if event["name"].startswith(names) or event.get("cat") == MESSAGE]
    times = merged((base + event["ts"], base + event["ts"] + event["dur"]) for event in messages)
    spans += [(2, index["message"], start, end) for start, end in times]
    return sorted(spans, key=lambda span: (span[2], -span[3]))


def merged(intervals: Any) -> list[tuple[float, float]]:
    """Return the union of the intervals, sorted by start."""
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
    """Return the drawing data of one step's timeline. It has a row for each rank in `traced`, and a predicted row for
    each pipeline stage below its ranks. `num_traced`: the number of ranks with a trace, including ranks without a
    row."""
    first = min((span[2] for found in traced.values() for span in found), default=0.0)
    shifted: dict[int, RankSpans] = {}
    for rank, found in traced.items():
        shifted[rank] = [(lane, name, start - first, end - first) for lane, name, start, end in found]
    # Labels and spans: each rank, and the predicted stage after its last rank.
    picture_rows: list[tuple[str, RankSpans]] = []
    firsts = sorted((begin, stage) for stage, (begin, _) in predicted.items())
    ends = [*(begin for begin, _ in firsts[1:]), math.inf]
    for (begin, stage), end in zip(firsts, ends):
        picture_rows += [(f"rank {rank}", shifted[rank]) for rank in sorted(shifted) if begin <= rank < end]
        picture_rows.append((f"stage {stage}, predicted", predicted[stage][1]))
    picture_rows = picture_rows or [(f"rank {rank}", found) for rank, found in sorted(shifted.items())]
    last = max((span[3] for _, found in picture_rows for span in found), default=0.0)
    lengths = sorted((end - start for _, found in picture_rows for _, _, start, end in found), reverse=True)
    shortest = lengths[MAX_SPANS - 1] if len(lengths) > MAX_SPANS else 0.0
    spans = [
        [row * len(LANES) + lane, name, round(start, 1), round(end - start, 1)]
        for row, (_, found) in enumerate(picture_rows)
        for lane, name, start, end in found
        if end - start >= shortest
    ]
    return {
        "step": step,
        "microseconds": round(last, 1),
        "ranks": sorted(traced),
        "labels": [label for label, _ in picture_rows],
        "num_traced": num_traced,
        "left_out": len(lengths) - len(spans),
        "spans": spans,
        "summary": [{"rank": label.removeprefix("rank "), **_summary(found)} for label, found in picture_rows],
    }


def _summary(found: RankSpans) -> dict[str, float]:
    """Return the microseconds that one timeline row spends computing, waiting for the pipeline, with messages in
    flight, and with messages in flight while layers compute."""
    exchange = NAMES.index("pipeline exchange")
    others = (exchange, NAMES.index("evaluation"))  # an evaluation consists of other phases
    working = merged((start, end) for lane, name, start, end in found if lane == 0 and name not in others)
    waiting = merged((start, end) for lane, name, start, end in found if name == exchange)
    sending = merged((start, end) for lane, _, start, end in found if lane == 2)
    layers = merged((start, end) for lane, name, start, end in found if lane == 1 and "wait" not in NAMES[name])
    return {
        "working": _total(working),
        "waiting": _total(waiting),
        "messages": _total(sending),
        # Length of the intersection of two unions of intervals.
        "hidden": _total(sending) + _total(layers) - _total(merged([*sending, *layers])),
    }


def _total(intervals: list[tuple[float, float]]) -> float:
    return sum(end - start for start, end in intervals)
