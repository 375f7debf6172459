"""Heat maps of the loads of experts and ranks, and the MoE layers' plans next to measured times."""

from __future__ import annotations

from typing import Any

from training.report.sources import Line, RunFiles, finite

MAX_WINDOWS = 100  # columns of a picture of all layers
MAX_CELLS = 130_000  # numbers of the picture of each expert of each layer
LAYER_PICTURES = (  # key, title, unit
    ("max_over_mean", "Busiest expert's tokens, divided by the mean", "times the mean"),
    ("router_entropy", "Entropy of the router, nats", "nats"),
    ("at_home", "Busiest rank's load without placement, divided by the mean", "times the mean"),
    ("placed", "Busiest rank's load with placement, divided by the mean", "times the mean"),
    ("copies", "Replicas of experts that were sent", "replicas"),
    ("dropped_share", "Share of assignments dropped, %", "%"),
    ("aux_loss", "Load-balancing loss", "loss"),
    ("global_aux_loss", "Load-balancing loss over the global batch", "loss"),
)
RANK_PICTURES = (
    ("ranks_at_home", "Load of each rank without placement, divided by the mean"),
    ("ranks_placed", "Load of each rank with placement, divided by the mean"),
)


def _windows(metrics: list[Line], most: int) -> list[list[Line]]:
    """Split the lines of metrics into at most `most` windows of consecutive steps, nearly equal in length."""
    count = min(most, len(metrics))
    return [metrics[i * len(metrics) // count : (i + 1) * len(metrics) // count] for i in range(count)]


def _bounds(windows: list[list[Line]]) -> list[list[int]]:
    """Return the first and the last step of each window."""
    return [[window[0]["step"], window[-1]["step"]] for window in windows]


def _with_experts(metrics: list[Line]) -> list[Line]:
    loads = ((line, line.get("tokens_per_expert")) for line in metrics)
    return [line for line, load in loads if isinstance(load, dict) and load.get("counts")]


def _layer_numbers(line: Line) -> list[int]:
    counts = line["tokens_per_expert"]["counts"]
    numbers = (line.get("moe_layers") or {}).get("layer")
    return numbers if isinstance(numbers, list) and len(numbers) == len(counts) else list(range(len(counts)))


def layers_of(metrics: list[Line]) -> dict[str, Any] | None:
    """Return heat maps with one row per MoE layer; each column is the mean over a window of steps."""
    lines = _with_experts(metrics)
    if not lines:
        return None
    windows, numbers = _windows(lines, MAX_WINDOWS), _layer_numbers(lines[-1])
    pictures = []
    for key, title, unit in LAYER_PICTURES:
        columns = [_means([_layer_values(line, key) for line in window], len(numbers)) for window in windows]
        if key == "dropped_share" and not any(value for column in columns for value in column):
            continue  # a remark below the pictures says so
        if any(value is not None for column in columns for value in column):
            pictures.append({"key": key, "title": title, "unit": unit, "columns": columns})
    return {"layers": numbers, "windows": _bounds(windows), "pictures": pictures}


def _layer_values(line: Line, key: str) -> list[Any]:
    """Return the metric `key` of each MoE layer in one step, or [] if the step has no such metric."""
    load, table = line["tokens_per_expert"], line.get("moe_layers") or {}
    if key == "max_over_mean":
        return load.get(key) or []
    if key == "dropped_share":
        dropped = table.get("dropped_tokens") or []
        return [100 * gone / max(gone + sum(counts), 1) for gone, counts in zip(dropped, load["counts"])]
    return table.get(key) or []


def ranks_of(source: RunFiles) -> dict[str, Any] | None:
    """Return heat maps of the load of each rank in an expert group: [window][rank], means over windows of steps."""
    lines = [line for line in source.metrics if (line.get("placement") or {}).get("ranks_placed")]
    if not lines:
        return None
    windows, ranks = _windows(lines, MAX_WINDOWS), len(lines[-1]["placement"]["ranks_placed"])
    pictures = []
    for key, title in RANK_PICTURES:
        columns = [_means([line["placement"].get(key) or [] for line in window], ranks) for window in windows]
        pictures.append({"key": key, "title": title, "columns": columns})
    return {"windows": _bounds(windows), "pictures": pictures}


def primaries_of(source: RunFiles) -> dict[str, Any] | None:
    """Return each expert's primary rank at the end of each window of steps: [window][layer][expert]. Key `first`: the
    index of the layer whose experts were the first to migrate, or 0 without migrations. None without plans."""
    lines = [line for line in _with_experts(source.metrics) if isinstance(line.get("placement"), dict)]
    if not lines:
        return None
    counts, ranks = lines[-1]["tokens_per_expert"]["counts"], (source.config.get("parallel") or {}).get("expert") or 1
    start = primaries = [[expert * ranks // len(layer) for expert in range(len(layer))] for layer in counts]
    windows = _windows(lines, max(1, min(MAX_WINDOWS, MAX_CELLS // max(sum(map(len, counts)), 1))))
    columns = []
    for window in windows:
        for line in window:
            found = line["placement"].get("homes")
            primaries = found if found and len(found) == len(counts) else primaries
        columns.append(primaries)
    changed = ([a != b for a, b in zip(column, start, strict=True)] for column in columns)
    return {
        "first": next((layers.index(True) for layers in changed if any(layers)), 0),
        "layers": _layer_numbers(lines[-1]),
        "windows": _bounds(windows),
        "ranks": columns,
    }


def _means(steps: list[list[Any]], count: int) -> list[float | None]:
    """Return the mean over the steps of each of `count` numbers, such as one per rank; None where no step has a finite
    value. `steps` has one list of numbers per step."""
    means: list[float | None] = []
    for i in range(count):
        numbers = [number for step in steps if i < len(step) and (number := finite(step[i])) is not None]
        means.append(float(f"{sum(numbers) / len(numbers):.5g}") if numbers else None)
    return means


def experts_of(metrics: list[Line]) -> dict[str, Any] | None:
    """Return each expert's tokens in % of an even load: [window][layer][expert], means over windows of steps."""
    lines = _with_experts(metrics)
    if not lines:
        return None
    shape = [len(counts) for counts in lines[-1]["tokens_per_expert"]["counts"]]
    lines = [line for line in lines if [len(counts) for counts in line["tokens_per_expert"]["counts"]] == shape]
    windows = _windows(lines, max(1, min(MAX_WINDOWS, MAX_CELLS // max(sum(shape), 1))))
    shares = []
    for window in windows:
        by_layer = zip(*(line["tokens_per_expert"]["counts"] for line in window))
        sums = [[sum(tokens) for tokens in zip(*counts)] for counts in by_layer]
        shares.append([[round(100 * tokens * len(layer) / max(sum(layer), 1)) for tokens in layer] for layer in sums])
    return {"layers": _layer_numbers(lines[-1]), "windows": _bounds(windows), "percent": shares}


def plans_of(
    source: RunFiles, flat: list[dict[str, float | None]], curves: dict[str, list[float | None]]
) -> dict[str, Any]:
    """Return a table of each MoE layer's current plan, and a chart of the predicted and measured seconds of a layer's
    call, as means over layers."""
    table_rows: list[list[Any]] = []
    tables = [line["moe_layers"] for line in source.metrics if isinstance(line.get("moe_layers"), dict)]
    if tables and tables[-1].get("degree"):
        table = tables[-1]
        made = [line for line in source.plans if "load" in line]
        for i, layer in enumerate(table.get("layer") or range(len(table["degree"]))):
            decisions = [line for line in made if line.get("layer") == layer]
            names = [f"{kind}_{way}_seconds" for way in ("forward", "backward") for kind in ("predicted", "measured")]
            seconds = [_entry(table, name, i) for name in names]
            memory = (decisions[-1].get("predicted") or {}).get("memory") if decisions else None
            words = [table.get(name, [""] * (i + 1))[i] for name in ("memory_strategy", "all_to_all")]
            milliseconds = [None if value is None else 1000 * value for value in seconds]
            degrees = table["degree"][i], table["backward_degree"][i]
            table_rows.append([layer, *degrees, *words, *milliseconds, finite(memory), len(decisions)])
    series = []
    pairs = [_predicted_and_measured(line) for line in flat]
    for i, name in enumerate(("predicted", "measured")):
        if any(pair is not None for pair in pairs):
            curves[f"moe_{name}_seconds"] = [None if pair is None else pair[i] for pair in pairs]
            series.append({"key": f"moe_{name}_seconds", "name": name})
    missing = None if series else "No predictions: the plans are fixed by the configuration."
    if not series and any(row[5] is not None for row in table_rows):
        missing = "No layer's time has been measured yet."
    title = "Calls of MoE layers, forward and backward: mean of the layers whose time is known"
    chart = {"title": title, "unit": "seconds", "log": False, "series": series, "missing": missing}
    return {"rows": table_rows, "chart": chart, "decisions": sum("load" in line for line in source.plans)}


def _entry(table: Line, key: str, i: int) -> float | None:
    values = table.get(key) or []
    return finite(values[i]) if i < len(values) else None


def _predicted_and_measured(line: dict[str, float | None]) -> tuple[float, float] | None:
    """Return the predicted and the measured seconds of a layer's call, forward plus backward, as means over the layers
    that have both times; None if no layer has both."""
    keys = ("predicted_forward", "predicted_backward", "measured_forward", "measured_backward")
    layers = [name.rpartition("/")[2] for name in line if name.startswith("moe_layers/predicted_forward_seconds/")]
    known = []
    for layer in layers:
        times = [line.get(f"moe_layers/{key}_seconds/{layer}") for key in keys]
        if all(time is not None for time in times):
            known.append([time or 0.0 for time in times])
    if not known:
        return None
    predicted, measured = (sum(times[i] + times[i + 1] for times in known) / len(known) for i in (0, 2))
    return predicted, measured
