"""Traces of a predicted step in the format of a real step's traces, for Perfetto and the report's timeline.

There is one file per pipeline stage, `traces_predicted/stage_00000_rank_00000.json.gz`, named after the stage's first
rank. Times are microseconds from the start of the step.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from base.files import spared
from simulator.clock.prediction import PlannedSpan, Prediction

FOLDER = "traces_predicted"
TRACK = re.compile(r"stage (\d+): (.+)")
MESSAGE = "predicted_message"  # category of transfers; all other events are computing
COMPUTE = "compute"  # track of a stage's device; the other tracks are links, host and disk


def trace_path(run_dir: Path, stage: int, rank: int) -> Path:
    """Return the path of the trace of a pipeline stage whose first rank is `rank`."""
    return run_dir / FOLDER / f"stage_{stage:05d}_rank_{rank:05d}.json.gz"


def write_traces(prediction: Prediction, run_dir: Path, first_ranks: Sequence[int]) -> list[Path]:
    """Write the traces of a prediction with spans; return their paths. `first_ranks`: first rank of each stage.

    Files of an earlier prediction are removed. A full disk is logged and does not stop the run.
    """
    paths: list[Path] = []
    with spared(run_dir / FOLDER):
        (run_dir / FOLDER).mkdir(parents=True, exist_ok=True)
        for old in (run_dir / FOLDER).glob("stage_*.json.gz"):
            old.unlink()
        for stage, spans in sorted(of_stages(prediction.spans).items()):
            path = trace_path(run_dir, stage, first_ranks[stage])
            text = json.dumps(_trace(stage, spans, prediction)).encode()
            path.write_bytes(gzip.compress(text, mtime=0))
            paths.append(path)
    return paths


def of_stages(spans: Sequence[PlannedSpan]) -> dict[int, list[tuple[str, PlannedSpan]]]:
    """Return (track without the stage, span) pairs by pipeline stage."""
    found: dict[int, list[tuple[str, PlannedSpan]]] = {}
    for span in spans:
        match = TRACK.fullmatch(span.track)
        assert match is not None, span.track
        found.setdefault(int(match[1]), []).append((match[2], span))
    return found


def _trace(stage: int, spans: Sequence[tuple[str, PlannedSpan]], prediction: Prediction) -> Mapping[str, Any]:
    tracks = list(dict.fromkeys(track for track, _ in spans))
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": stage, "args": {"name": f"stage {stage}, predicted"}}
    ]
    events += [
        {"ph": "M", "name": "thread_name", "pid": stage, "tid": i, "args": {"name": track}}
        for i, track in enumerate(tracks)
    ]
    for track, span in spans:
        kind = {"ph": "X", "cat": "user_annotation" if track == COMPUTE else MESSAGE, "name": span.name}
        times = {"ts": span.start * 1e6, "dur": span.seconds * 1e6}
        events.append({**kind, "pid": stage, "tid": tracks.index(track), **times})
    return {
        "displayTimeUnit": "ms",
        "predicted": {"hardware": prediction.hardware, "step_seconds": prediction.seconds},
        "traceEvents": events,
    }
