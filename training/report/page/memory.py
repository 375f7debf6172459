"""Memory against the plan."""

from __future__ import annotations

from typing import Any

from training.report.page.curves import chart_of
from training.report.sources import RunFiles, finite

STATE = [
    ("memory/state_device", "optimizer state, device"),
    ("memory/state_host", "optimizer state, host"),
    ("memory/state_disk", "optimizer state, disk"),
    ("memory/layer_inputs_device_peak", "layer inputs, device, peak"),
    ("memory/layer_inputs_host", "layer inputs, host"),
]


def memory_of(
    source: RunFiles, flat: list[dict[str, float | None]], curves: dict[str, list[float | None]]
) -> dict[str, Any]:
    keys = [
        ("memory/device_peak", "device, peak"),
        ("memory/device", "device, in use"),
        ("memory/host", "host"),
        ("memory/disk", "disk: the run's folder"),
    ]
    if not any(line.get("memory/device_peak") is not None for line in flat):
        keys = [("peak_memory_bytes", "device, peak")]
    chart = _chart("Memory by tier, of the rank with most", keys, flat, curves)
    state = _chart("State by tier, of the rank with most", STATE, flat, curves)
    peaks: dict[int, float] = {}
    for line in source.metrics:
        for rank, value in enumerate((line.get("memory") or {}).get("device_peak_by_rank") or []):
            peaks[rank] = value
    if not peaks and source.metrics and finite(source.metrics[-1].get("peak_memory_bytes")) is not None:
        peaks[0] = source.metrics[-1]["peak_memory_bytes"]
    kinds = [
        kind
        for kind in ("weights", "gradients", "optimizer", "activations", "buffers")
        if any(kind in rank for rank in source.memory_plan)
    ]
    planned = {
        rank["rank"]: {**{kind: finite(rank.get(kind)) for kind in kinds}, "total": rank["total"]}
        for rank in source.memory_plan
    }
    ranks = sorted({*peaks, *planned})
    rows = [{"rank": rank, "peak": peaks.get(rank), "plan": planned.get(rank)} for rank in ranks]
    missing = None
    if not planned:
        missing = "No plan.json in the run's folder: the peaks stand alone. python train.py plan=true works it out."
    elif source.plan_device == "cpu":
        missing = (
            "On a CPU the measured peak is that of the whole process, with Python and its libraries; the plan is "
            "the model's part."
        )
    return {"chart": chart, "state": state, "kinds": kinds, "ranks": rows, "missing": missing}


def _chart(
    title: str,
    keys: list[tuple[str, str]],
    flat: list[dict[str, float | None]],
    curves: dict[str, list[float | None]],
) -> dict[str, Any]:
    # a tier that nothing lay in is no curve
    keys = [(key, name) for key, name in keys if any(line.get(key) for line in flat)]
    return chart_of((title, "bytes", False, keys), flat, curves)
