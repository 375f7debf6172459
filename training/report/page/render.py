"""Collect a run's numbers for each section of the page, and write them with the chart library into one HTML file."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

from base.files import write_text
from training.report import timeline
from training.report.page.charts import CURVES, buckets_of, chart_of, memory_of, plain, thin
from training.report.page.facts import events_of, facts_of, run_of
from training.report.page.layers import experts_of, layers_of, plans_of, primaries_of, ranks_of
from training.report.page.markup import body_of
from training.report.sources import RunFiles, read

ASSETS = Path(__file__).parents[1] / "assets"


def collect(source: RunFiles) -> dict[str, Any]:
    """Return all data of the report page by section. `missing` maps each empty section to the reason why it is
    empty."""
    notes = list(source.notes)
    kept = thin(source.metrics)
    flat = [plain(line) for line in kept]
    missing: dict[str, str] = {}
    data: dict[str, Any] = {
        "title": str(source.config.get("name") or source.run_dir.resolve().name),
        "facts": facts_of(source),
        "steps": [line["step"] for line in kept],
        "curves": {},
        "charts": {},
    }
    if not source.metrics:
        missing["loss"] = missing["speed"] = "No steps yet: metrics.jsonl is missing or empty."
    elif len(kept) < len(source.metrics):
        notes.append(
            f"Curves show {len(kept)} of {len(source.metrics)} steps: in each interval, those with the least and "
            "the greatest loss, and with the longest time."
        )
    for section, charts in CURVES.items() if kept else ():
        data["charts"][section] = [chart_of(chart, flat, data["curves"]) for chart in charts]
    data["buckets"] = buckets_of(source.metrics)
    data["layers"], data["experts"] = layers_of(source.metrics), experts_of(source.metrics)
    if data["experts"] is None:
        dense = (source.config.get("moe") or {}).get("num_experts") is None and bool(source.config)
        missing["experts"] = "No experts: a dense model." if dense else "No expert loads in metrics.jsonl."
    data["homes"], data["ranks"] = primaries_of(source), ranks_of(source)
    if data["homes"] is None:
        missing["placement"] = "Every expert is computed on its primary rank: moe.placement.policy is static."
    if not any(line.get("expert_tiers/up") is not None for line in flat):
        missing["tiers"] = "No experts off the device: moe.weights_device is device."
    data["plans"] = plans_of(source, flat, data["curves"])
    if not data["plans"]["rows"]:
        dense = data["experts"] is None
        missing["plans"] = "No plans: the model is dense." if dense else "No plans of MoE layers in metrics.jsonl."
    data["timeline"] = timeline.read_steps(source.run_dir, notes)
    if not data["timeline"]:
        missing["timeline"] = "No traces. Train with training.profile.steps=[100] to see how the ranks spend step 100."
    data["memory"] = memory_of(source, flat, data["curves"])
    if not kept:
        missing["memory"] = "No steps yet: nothing was measured."
    data["run"] = run_of(source)
    if not data["run"]["rows"] and not data["run"]["config"]:
        missing["run"] = "The run's folder has neither config.yaml nor environment.json."
    data["events"], data["checkpoints"] = events_of(source), source.checkpoints
    if not data["events"]:
        missing["events"] = "No events."
    data["missing"], data["notes"] = missing, notes
    return data


def render(source: RunFiles) -> str:
    """Return the report page of a run as HTML."""
    data = collect(source)
    text = (ASSETS / "page.html").read_text(encoding="utf-8")
    contents = {
        "title": html.escape(data["title"]),
        "style": (ASSETS / "page.css").read_text(encoding="utf-8"),
        "body": body_of(data),
        # A script element must not contain its end tag; JSON may spell any character as an escape.
        "data": json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c"),
        "library": (ASSETS / "echarts.min.js").read_text(encoding="utf-8"),
        "script": (ASSETS / "page.js").read_text(encoding="utf-8"),
    }
    # One pass: what is filled in may itself contain braces.
    return re.sub(r"\{\{(.*?)\}\}", lambda match: contents[match[1].strip()], text)


def write(run_dir: Path, output: Path | None = None) -> Path:
    """Write the report page of a run to `output` (default: run_dir/report.html), and return its path. Raises
    sources.NotARun or OSError."""
    path = output or run_dir / "report.html"
    write_text(path, render(read(run_dir)))
    return path
