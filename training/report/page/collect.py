"""What was read becomes the numbers of the page, by section."""

from __future__ import annotations

from typing import Any

from training.report import timeline
from training.report.page.buckets import buckets_of
from training.report.page.curves import CURVES, chart_of, plain, thin
from training.report.page.facts import events_of, facts_of, run_of
from training.report.page.layers import experts_of, homes_of, layers_of, plans_of, ranks_of
from training.report.page.memory import memory_of
from training.report.sources import RunFiles


def collect(source: RunFiles) -> dict[str, Any]:
    """All numbers of the page, by section; a section that has none says why under `missing`."""
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
            f"Curves show {len(kept)} of {len(source.metrics)} steps: of each stretch those with the least and the "
            "greatest loss and the longest time."
        )
    for section, charts in CURVES.items() if kept else ():
        data["charts"][section] = [chart_of(chart, flat, data["curves"]) for chart in charts]
    data["buckets"] = buckets_of(source.metrics)
    data["layers"], data["experts"] = layers_of(source.metrics), experts_of(source.metrics)
    if data["experts"] is None:
        dense = (source.config.get("moe") or {}).get("num_experts") is None and bool(source.config)
        missing["experts"] = "No experts: a dense model." if dense else "No expert loads in metrics.jsonl."
    data["homes"], data["ranks"] = homes_of(source), ranks_of(source)
    if data["homes"] is None:
        missing["placement"] = "Every expert is computed at its home: moe.placement.policy is static."
    if not any(line.get("expert_tiers/up") is not None for line in flat):
        missing["tiers"] = "No experts off the device: moe.weights_device is device."
    data["plans"] = plans_of(source, flat, data["curves"])
    if not data["plans"]["rows"]:
        missing["plans"] = (
            "No plans: the model is dense." if data["experts"] is None else "No plans of MoE layers in metrics.jsonl."
        )
    data["timeline"] = timeline.read_steps(source.run_dir, notes)
    if not data["timeline"]:
        missing["timeline"] = "No traces. Train with training.profile.steps=[100] to see how the ranks spend step 100."
    data["memory"] = memory_of(source, flat, data["curves"])
    if not kept:
        missing["memory"] = "No steps yet: nothing was measured."
    data["run"] = run_of(source)
    if not data["run"]["rows"] and not data["run"]["config"]:
        missing["run"] = "Neither config.yaml nor environment.json is there."
    data["events"], data["checkpoints"] = events_of(source), source.checkpoints
    if not data["events"]:
        missing["events"] = "No events."
    data["missing"], data["notes"] = missing, notes
    return data
