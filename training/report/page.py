"""The page: what was read becomes numbers by section, and these, with the library that draws them, one HTML file."""

from __future__ import annotations

import html
import json
import math
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from configs.files import write_text
from training.metrics import scalars
from training.report import timeline
from training.report.sources import Line, Source, finite, read

HERE = Path(__file__).parent
MAX_STEPS = 2000  # points of a curve
MAX_WINDOWS = 100  # columns of a picture of all layers
MAX_CELLS = 130_000  # numbers of the picture of each expert of each layer
MAX_EVENTS = 400  # rows of the table
MIB, GIB = 2**20, 2**30
STARTS = ("run_started", "run_goes_on")  # kinds of events with which a process begins

# Sections in order, and their charts: (title, unit, logarithmic, [(key in metrics.jsonl, name)]). A key that ends in / stands
# for all keys that begin so.
Chart = tuple[str, str, bool, list[tuple[str, str]]]
CURVES: dict[str, list[Chart]] = {
    "loss": [
        ("Loss", "nats", False, [("loss", "training"), ("validation_loss", "validation"), ("unigram_entropy", "unigram entropy")]),
        ("Gradient norm", "norm", True, [("grad_norm", "total"), ("grad_norm_by_part/", "")]),
        ("Learning rate", "learning rate", False, [("learning_rate", "learning rate")]),
        (
            "Other losses",
            "loss",
            False,
            [
                (key, key.replace("_", " "))
                for key in ("aux_loss", "sequence_aux_loss", "z_loss", "sentence_loss", "validation_sentence_loss")
            ],
        ),
    ],
    "speed": [
        ("Tokens per second", "tokens/s", False, [("tokens_per_second", "tokens per second")]),
        (
            "Time of a step",
            "s",
            False,
            [("step_seconds", "step"), ("step_seconds_percentiles/", "")],
        ),
        ("Waiting for data", "s", False, [("data_wait_seconds", "waiting for data")]),
        ("Model FLOPs utilization", "share of the peak", False, [("mfu", "MFU")]),
    ],
}
MISSING = {
    "Other losses": "No auxiliary losses: the model is dense, or their coefficients are 0.",
    "Model FLOPs utilization": "No MFU: the peak of this device is not known. Set logging.peak_tflops.",
}
LAYER_PICTURES = (
    ("max_over_mean", "Busiest expert's tokens by the mean"),
    ("router_entropy", "Entropy of the router, nats"),
    ("dropped_share", "Share of assignments dropped, %"),
    ("aux_loss", "Load-balancing loss"),
)


def render(source: Source) -> str:
    """The page's text."""
    data = collect(source)
    text = (HERE / "page.html").read_text(encoding="utf-8")
    # What goes into a script element must not hold its end; JSON may spell any character as an escape.
    embedded = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    parts = {
        "title": html.escape(data["title"]),
        "style": (HERE / "page.css").read_text(encoding="utf-8"),
        "body": _body(data),
        "data": embedded,
        "library": (HERE / "echarts.min.js").read_text(encoding="utf-8"),
        "script": (HERE / "page.js").read_text(encoding="utf-8"),
    }
    before, *rest = text.split("{{")
    pieces = [before]
    for piece in rest:
        name, _, after = piece.partition("}}")
        pieces += [parts[name.strip()], after]
    return "".join(pieces)


def write(run_dir: Path, output: Path | None = None) -> Path:
    """Make the page of a run, whole or not at all, and return its path. Raises sources.NotARun, or OSError where it cannot be written."""
    path = output or run_dir / "report.html"
    text = render(read(run_dir))
    write_text(path, text)
    return path


def collect(source: Source) -> dict[str, Any]:
    """All numbers of the page, by section; a section that has none says why under `missing`."""
    notes = list(source.notes)
    kept = thin(source.metrics)
    flat = [_plain(line) for line in kept]
    missing: dict[str, str] = {}
    data: dict[str, Any] = {
        "title": str(source.config.get("name") or source.run_dir.resolve().name),
        "facts": _facts(source),
        "steps": [line["step"] for line in kept],
        "curves": {},
        "charts": {},
    }
    if not source.metrics:
        missing["loss"] = missing["speed"] = "No steps yet: metrics.jsonl is missing or empty."
    elif len(kept) < len(source.metrics):
        notes.append(
            f"Curves show {len(kept)} of {len(source.metrics)} steps: of each stretch those with the least and the greatest loss and the "
            "longest time."
        )
    for section, charts in CURVES.items() if kept else ():
        data["charts"][section] = [_chart(chart, flat, data["curves"]) for chart in charts]
    data["layers"], data["experts"] = _layers(source.metrics), _experts(source.metrics)
    if data["experts"] is None:
        dense = (source.config.get("moe") or {}).get("num_experts") is None and bool(source.config)
        missing["experts"] = "No experts: a dense model." if dense else "No expert loads in metrics.jsonl."
    data["plans"] = _plans(source, flat, data["curves"])
    if not data["plans"]["rows"]:
        missing["plans"] = "No plans: the model is dense." if data["experts"] is None else "No plans of MoE layers in metrics.jsonl."
    data["timeline"] = timeline.read_steps(source.run_dir, notes)
    if not data["timeline"]:
        missing["timeline"] = "No traces. Train with training.profile.steps=[100] to see how the ranks spend step 100."
    data["memory"] = _memory(source, flat, data["curves"])
    if not kept:
        missing["memory"] = "No steps yet: nothing was measured."
    data["run"] = _run(source)
    if not data["run"]["rows"] and not data["run"]["config"]:
        missing["run"] = "Neither config.yaml nor environment.json is there."
    data["events"], data["checkpoints"] = _events(source), source.checkpoints
    if not data["events"]:
        missing["events"] = "No events."
    data["missing"], data["notes"] = missing, notes
    return data


# -- sections ------------------------------------------------------------------------------------------------------------------


def thin(metrics: list[Line], most: int = MAX_STEPS) -> list[Line]:
    """At most so many lines: the first and the last, and of each stretch those of least and greatest loss and of longest time."""
    if len(metrics) <= most:
        return metrics
    stretches = (most - 2) // 3
    keep = {0, len(metrics) - 1}
    for i in range(stretches):
        stretch = range(i * len(metrics) // stretches, (i + 1) * len(metrics) // stretches)
        keep.add(min(stretch, key=lambda j: finite(metrics[j].get("loss")) or 0.0))
        keep.add(max(stretch, key=lambda j: finite(metrics[j].get("loss")) or 0.0))
        keep.add(max(stretch, key=lambda j: finite(metrics[j].get("step_seconds")) or 0.0))
    return [metrics[j] for j in sorted(keep)]


def _plain(line: Line) -> dict[str, float | None]:
    return {name: finite(value) for name, value in scalars(line).items()}


def _facts(source: Source) -> list[list[str]]:
    config, metrics = source.config, source.metrics
    model, moe, layout, training = (config.get(key) or {} for key in ("model", "moe", "parallel", "training"))
    facts: list[tuple[str, str]] = []
    if metrics:
        last = metrics[-1]
        total = training.get("steps")
        facts.append(("Steps", f"{last['step']:,}" + (f" of {total:,}" if isinstance(total, int) else "")))
        losses = [line for line in metrics if finite(line.get("loss")) is not None]
        if losses:
            facts.append(("Last loss", f"{losses[-1]['loss']:.4f}"))
        validations = [line["validation_loss"] for line in metrics if finite(line.get("validation_loss")) is not None]
        if validations:
            facts.append(("Last validation loss", f"{validations[-1]:.4f}"))
        speeds = sorted(speed for line in metrics if (speed := finite(line.get("tokens_per_second"))) is not None)
        if speeds:
            facts.append(("Tokens/s (median)", f"{speeds[len(speeds) // 2]:,.0f}"))
        facts.append(("Time in steps", _duration(sum(finite(line.get("step_seconds")) or 0 for line in metrics))))
        wall, starts = wall_time(source)
        if starts:
            facts.append(("Wall time", _duration(wall) + (f" in {starts} starts" if starts > 1 else "")))
        tokens = sum(finite(line.get("tokens")) or 0 for line in metrics)
        facts.append(("Tokens", f"{tokens:,.0f}"))
    if model:
        size = f"{model.get('family')}, {model.get('num_layers')} layers of {model.get('hidden_size')}"
        if moe.get("num_experts"):
            size += f", {moe['num_experts']} experts, {moe.get('top_k')} a token"
        facts.append(("Model", size))
        facts.append(("Sequence", str(model.get("sequence_length"))))
    if layout:
        sizes = {name: layout.get(name) for name in ("tensor", "pipeline", "context", "expert")}
        used = [f"{name} {number}" for name, number in sizes.items() if isinstance(number, int) and number > 1]
        facts.append(("Layout", " x ".join(used) or "data parallel only"))
    hosts = _hosts(source)
    if hosts:
        devices: Counter[str] = Counter()
        for host in hosts:
            devices.update(host["devices"])
        facts.append(("Hardware", _ranks_on(devices) + (f", {len(hosts)} hosts" if len(hosts) > 1 else "")))
    if training:
        facts.append(("Batch", f"{training.get('global_batch_size')} samples, {training.get('precision')}"))
    facts.append(("Folder", str(source.run_dir)))
    facts.append(("Page made", datetime.fromtimestamp(time.time(), UTC).strftime("%Y-%m-%d %H:%M UTC")))
    return [list(fact) for fact in facts]


def _ranks_on(devices: dict[str, int]) -> str:
    return ", ".join(f"{count} {'rank' if count == 1 else 'ranks'} on {name}" for name, count in devices.items())


def _hosts(source: Source) -> list[Line]:
    hosts = source.environment.get("hosts")
    return [h for h in hosts if isinstance(h, dict) and isinstance(h.get("devices"), dict)] if isinstance(hosts, list) else []


def _run(source: Source) -> dict[str, Any]:
    """Versions and hardware, a row each, and the text of config.yaml."""
    rows: list[list[str]] = []
    if source.record.get("id"):
        rows.append(["Run", str(source.record["id"])])
    versions = source.environment.get("versions")
    rows += [[str(name), str(number)] for name, number in versions.items()] if isinstance(versions, dict) else []
    for host in _hosts(source):
        memory = finite(host.get("memory_bytes"))
        about = f"{_ranks_on(host['devices'])}; {host.get('cores')} cores of {host.get('processor')}"
        rows.append([f"Host {host.get('host')}", about + (f"; {memory / GIB:.0f} GiB of memory" if memory else "")])
    return {"rows": rows, "config": source.config_text}


def wall_time(source: Source) -> tuple[float, int]:
    """Seconds from each start of the run to its last sign of life, added up, and how many starts there were; 0 where none is on record."""
    signs = sorted((when, event.get("kind")) for event in source.events if (when := finite(event.get("time"))) is not None)
    starts = [when for when, kind in signs if kind in STARTS]
    late = [finite(source.status.get("time")), finite(source.record.get("heartbeat")), *(when for when, _ in signs)]
    total = 0.0
    for start, end in zip(starts, [*starts[1:], math.inf]):
        total += max((when for when in late if when is not None and start <= when < end), default=start) - start
    return total, len(starts)


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {seconds:02} s"


def _chart(chart: Chart, flat: list[dict[str, float | None]], curves: dict[str, list[float | None]]) -> dict[str, Any]:
    """One chart's series; puts their numbers into `curves`."""
    title, unit, logarithmic, keys = chart
    series: list[dict[str, str]] = []
    for key, name in keys:
        names = sorted({found for line in flat for found in line if found.startswith(key)}) if key.endswith("/") else [key]
        for found in names:
            if any(line.get(found) is not None for line in flat):
                curves[found] = [line.get(found) for line in flat]
                series.append({"key": found, "name": name or found.removeprefix(key).replace("_", " ")})
    missing = None if series else MISSING.get(title, f"No {title.lower()} in metrics.jsonl.")
    return {"title": title, "unit": unit, "log": logarithmic, "series": series, "missing": missing}


def _windows(metrics: list[Line], most: int) -> list[list[Line]]:
    """The steps, cut into at most so many stretches of nearly the same length."""
    count = min(most, len(metrics))
    return [metrics[i * len(metrics) // count : (i + 1) * len(metrics) // count] for i in range(count)]


def _with_experts(metrics: list[Line]) -> list[Line]:
    return [line for line in metrics if isinstance(line.get("tokens_per_expert"), dict) and line["tokens_per_expert"].get("counts")]


def _layer_numbers(line: Line) -> list[int]:
    counts = line["tokens_per_expert"]["counts"]
    numbers = (line.get("moe_layers") or {}).get("layer")
    return numbers if isinstance(numbers, list) and len(numbers) == len(counts) else list(range(len(counts)))


def _layers(metrics: list[Line]) -> dict[str, Any] | None:
    """Pictures of a number of each MoE layer over the steps: the mean of each stretch of steps."""
    lines = _with_experts(metrics)
    if not lines:
        return None
    windows = _windows(lines, MAX_WINDOWS)
    numbers = _layer_numbers(lines[-1])
    pictures = []
    for key, title in LAYER_PICTURES:
        columns = []
        for window in windows:
            rows = [_of_layers(line, key) for line in window]
            columns.append([_mean([row[i] for row in rows if i < len(row)]) for i in range(len(numbers))])
        if key == "dropped_share" and not any(value for column in columns for value in column):
            continue  # said below
        if any(value is not None for column in columns for value in column):
            pictures.append({"key": key, "title": title, "columns": columns})
    return {"layers": numbers, "windows": [[window[0]["step"], window[-1]["step"]] for window in windows], "pictures": pictures}


def _of_layers(line: Line, key: str) -> list[Any]:
    load, table = line["tokens_per_expert"], line.get("moe_layers") or {}
    if key == "max_over_mean":
        return load.get(key) or []
    if key == "dropped_share":
        dropped = table.get("dropped_tokens") or []
        return [100 * gone / max(gone + sum(counts), 1) for gone, counts in zip(dropped, load["counts"])]
    return table.get(key) or []


def _mean(values: list[Any]) -> float | None:
    numbers = [number for value in values if (number := finite(value)) is not None]
    return float(f"{sum(numbers) / len(numbers):.5g}") if numbers else None


def _experts(metrics: list[Line]) -> dict[str, Any] | None:
    """Each expert's tokens by an even share, in percent: the mean of each stretch of steps, [stretch][layer][expert]."""
    lines = _with_experts(metrics)
    if not lines:
        return None
    shape = [len(counts) for counts in lines[-1]["tokens_per_expert"]["counts"]]
    lines = [line for line in lines if [len(counts) for counts in line["tokens_per_expert"]["counts"]] == shape]
    windows = _windows(lines, max(1, min(MAX_WINDOWS, MAX_CELLS // max(sum(shape), 1))))
    shares = []
    for window in windows:
        sums = [[sum(tokens) for tokens in zip(*layers)] for layers in zip(*(line["tokens_per_expert"]["counts"] for line in window))]
        shares.append([[round(100 * tokens * len(layer) / max(sum(layer), 1)) for tokens in layer] for layer in sums])
    return {
        "layers": _layer_numbers(lines[-1]),
        "windows": [[window[0]["step"], window[-1]["step"]] for window in windows],
        "percent": shares,
    }


def _plans(source: Source, flat: list[dict[str, float | None]], curves: dict[str, list[float | None]]) -> dict[str, Any]:
    """How each layer runs now, and what was predicted and measured over the steps, added up over layers."""
    rows: list[list[Any]] = []
    tables = [line["moe_layers"] for line in source.metrics if isinstance(line.get("moe_layers"), dict)]
    if tables and tables[-1].get("degree"):
        table = tables[-1]
        made = [line for line in source.plans if "load" in line]
        for i, layer in enumerate(table.get("layer") or range(len(table["degree"]))):
            of_layer = [line for line in made if line.get("layer") == layer]
            seconds = [_entry(table, f"{kind}_{way}_seconds", i) for way in ("forward", "backward") for kind in ("predicted", "measured")]
            memory = (of_layer[-1].get("predicted") or {}).get("memory") if of_layer else None
            words = [table.get(name, [""] * (i + 1))[i] for name in ("memory_strategy", "all_to_all")]
            numbers = [None if value is None else 1000 * value for value in seconds]
            rows.append([layer, table["degree"][i], table["backward_degree"][i], *words, *numbers, finite(memory), len(of_layer)])
    series = []
    pairs = [_predicted_and_measured(line) for line in flat]
    for i, name in enumerate(("predicted", "measured")):
        if any(pair is not None for pair in pairs):
            curves[f"moe_{name}_seconds"] = [None if pair is None else pair[i] for pair in pairs]
            series.append({"key": f"moe_{name}_seconds", "name": name})
    missing = None
    if not series:
        planned = any(row[5] is not None for row in rows)
        missing = "No layer's time was measured yet." if planned else "No predictions: the plans are fixed by the configuration."
    title = "Calls of MoE layers, forward and backward: mean of the layers whose time is known"
    chart = {"title": title, "unit": "s", "log": False, "series": series, "missing": missing}
    return {"rows": rows, "chart": chart, "decisions": sum("load" in line for line in source.plans)}


def _entry(table: Line, key: str, i: int) -> float | None:
    values = table.get(key) or []
    return finite(values[i]) if i < len(values) else None


def _predicted_and_measured(line: dict[str, float | None]) -> tuple[float, float] | None:
    """Seconds of a call, forward and backward: means over the layers of which both are known."""
    keys = ("predicted_forward", "predicted_backward", "measured_forward", "measured_backward")
    layers = [name.rpartition("/")[2] for name in line if name.startswith("moe_layers/predicted_forward_seconds/")]
    known = []
    for layer in layers:
        times = [line.get(f"moe_layers/{key}_seconds/{layer}") for key in keys]
        if all(time is not None for time in times):
            known.append([time or 0.0 for time in times])
    if not known:
        return None
    return sum(times[0] + times[1] for times in known) / len(known), sum(times[2] + times[3] for times in known) / len(known)


def _memory(source: Source, flat: list[dict[str, float | None]], curves: dict[str, list[float | None]]) -> dict[str, Any]:
    keys = [("memory/device_peak", "device, peak"), ("memory/device", "device, in use"), ("memory/host", "host"), ("memory/disk", "disk")]
    if not any(line.get("memory/device_peak") is not None for line in flat):
        keys = [("peak_memory_bytes", "device, peak")]
    keys = [(key, name) for key, name in keys if any(line.get(key) for line in flat)]  # a tier that nothing lay in is no curve
    chart = _chart(("Memory by tier, of the rank with most", "bytes", False, keys), flat, curves)
    peaks: dict[int, float] = {}
    for line in source.metrics:
        for rank, value in enumerate((line.get("memory") or {}).get("device_peak_by_rank") or []):
            peaks[rank] = value
    if not peaks and source.metrics and finite(source.metrics[-1].get("peak_memory_bytes")) is not None:
        peaks[0] = source.metrics[-1]["peak_memory_bytes"]
    kinds = [
        kind for kind in ("weights", "gradients", "optimizer", "activations", "buffers") if any(kind in rank for rank in source.memory_plan)
    ]
    planned = {rank["rank"]: {**{kind: finite(rank.get(kind)) for kind in kinds}, "total": rank["total"]} for rank in source.memory_plan}
    ranks = sorted({*peaks, *planned})
    rows = [{"rank": rank, "peak": peaks.get(rank), "plan": planned.get(rank)} for rank in ranks]
    missing = None
    if not planned:
        missing = "No plan.json in the run's folder: the peaks stand alone. python train.py plan=true works it out."
    elif source.plan_device == "cpu":
        missing = "On a CPU the measured peak is that of the whole process, with Python and its libraries; the plan is the model's part."
    return {"chart": chart, "kinds": kinds, "ranks": rows, "missing": missing}


def _events(source: Source) -> list[dict[str, Any]]:
    result = []
    for event in source.events[-MAX_EVENTS:]:
        when = finite(event.get("time"))
        text = datetime.fromtimestamp(when, UTC).strftime("%Y-%m-%d %H:%M:%S") if when is not None else ""
        step = event.get("step")
        result.append(
            {"time": text, "rank": event.get("rank"), "kind": str(event.get("kind", "")), "text": str(event.get("text", ""))}
            | {"step": step if isinstance(step, int) else None}
        )
    return result


# -- HTML ----------------------------------------------------------------------------------------------------------------------

SECTIONS = (
    ("loss", "Loss and gradients"),
    ("speed", "Speed"),
    ("experts", "Expert load"),
    ("plans", "Plans of the MoE layers"),
    ("timeline", "One step across ranks"),
    ("memory", "Memory against the plan"),
    ("events", "Checkpoints and events"),
    ("run", "Versions, hardware and configuration"),
)


def _body(data: dict[str, Any]) -> str:
    """Headings, tables and the places of the charts; the page's script draws into those."""
    facts = "".join(f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd></div>" for name, value in data["facts"])
    parts = [f"<header><h1>{html.escape(data['title'])}</h1><dl>{facts}</dl>"]
    parts += [f'<p class="note">{html.escape(note)}</p>' for note in data["notes"]]
    links = "".join(f'<a href="#{name}">{title}</a>' for name, title in SECTIONS)
    parts.append(f"<nav>{links}</nav></header><main>")
    for name, title in SECTIONS:
        parts.append(f'<section id="{name}"><h2>{title}</h2>')
        missing = data["missing"].get(name)
        parts.append(f'<p class="missing">{html.escape(missing)}</p>' if missing else _section(name, data))
        parts.append("</section>")
    return "".join(parts) + "</main>"


def _section(name: str, data: dict[str, Any]) -> str:
    if name in CURVES:
        charts = data["charts"][name]
        shown = [_figure(f"{name}-{i}", chart["title"]) for i, chart in enumerate(charts) if not chart["missing"]]
        return _grid(shown) + _remark(" ".join(chart["missing"] for chart in charts if chart["missing"]))
    if name == "experts":
        places = [_figure(f"layers-{i}", picture["title"]) for i, picture in enumerate(data["layers"]["pictures"])]
        options = "".join(f'<option value="{i}">{layer}</option>' for i, layer in enumerate(data["experts"]["layers"]))
        choice = f'<label>Layer <select id="expert-layer">{options}</select></label>'
        figure = _figure("experts-chart", "Tokens of each expert, % of an even share", choice, "wide tall")
        dropped = any(picture["key"] == "dropped_share" for picture in data["layers"]["pictures"])
        return _grid([*places, figure]) + _remark("" if dropped else "No tokens were dropped.")
    if name == "plans":
        plans = data["plans"]
        heads = ["Layer", "Chunks forward", "Chunks backward", "Memory strategy", "All-to-all"]
        heads += [f"{way} {kind}, ms" for way in ("Forward", "Backward") for kind in ("predicted", "measured")] + [
            "Buffers, MiB",
            "Decisions",
        ]
        rows = [[*row[:-2], None if row[-2] is None else row[-2] / MIB, row[-1]] for row in plans["rows"]]
        chart = plans["chart"]
        return (_remark(chart["missing"]) if chart["missing"] else _figure("plans-chart", chart["title"])) + _table(heads, rows)
    if name == "timeline":
        options = "".join(f'<option value="{i}">{step["step"]}</option>' for i, step in enumerate(data["timeline"]))
        choice = f'<label>Step <select id="timeline-step">{options}</select></label>'
        text = (
            "Each rank has three rows: what it does, which part of a layer, and messages on their way. Gaps in the first row, and "
            "pipeline exchanges, are waits; messages under computation are hidden behind it. Drag the handles below to zoom."
        )
        return f"<p>{text}</p>" + _figure("timeline-chart", "", choice, "wide timeline") + '<div id="timeline-table"></div>'
    if name == "memory":
        memory = data["memory"]
        largest = max((row["peak"] or row["plan"]["total"] for row in memory["ranks"]), default=0)
        size, unit = (GIB, "GiB") if largest >= GIB else (MIB, "MiB")
        heads = ["Rank", f"Measured peak, {unit}", f"Planned, {unit}", *(f"{kind.capitalize()}, {unit}" for kind in memory["kinds"])]
        rows = []
        for row in memory["ranks"]:
            plan = row["plan"] or {}
            numbers = [row["peak"], plan.get("total"), *(plan.get(kind) for kind in memory["kinds"])]
            rows.append([row["rank"], *(None if number is None else number / size for number in numbers)])
        chart, title = memory["chart"], "Peak by rank" + (": measured, and the parts of the plan" if memory["kinds"] else "")
        figures = [
            *([] if chart["missing"] else [_figure("memory-0", chart["title"])]),
            *([_figure("memory-ranks", title)] if rows else []),
        ]
        return _remark(memory["missing"] or "") + _grid(figures) + _table(heads, rows)
    if name == "run":
        run = data["run"]
        lack = "" if data["run"]["rows"] else "No environment.json in the run's folder: versions and hardware are not known."
        text = f"<details><summary>config.yaml</summary><pre>{html.escape(run['config'])}</pre></details>" if run["config"] else ""
        return _remark(lack) + (_table(["What", "Which"], run["rows"]) if run["rows"] else "") + text
    kept = data["checkpoints"]
    line = f"On disk now: {', '.join(kept)}." if kept else "No checkpoints on disk."
    heads = ["Time (UTC)", "Step", "Rank", "Kind", "What happened"]
    rows = [
        [event["time"], event["step"], event["rank"], event["kind"].replace("_", " "), event["text"]] for event in reversed(data["events"])
    ]
    picture = _figure("events-chart", "", "", "wide short") if any(event["step"] is not None for event in data["events"]) else ""
    return f"<p>{html.escape(line)}</p>" + picture + _table(heads, rows)


def _grid(parts: Any) -> str:
    return f'<div class="grid">{"".join(parts)}</div>'


def _remark(text: str) -> str:
    return f'<p class="missing">{html.escape(text)}</p>' if text else ""


def _figure(name: str, title: str, control: str = "", kind: str = "") -> str:
    return f'<figure class="{kind}"><figcaption>{html.escape(title)}{control}</figcaption><div class="chart" id="{name}"></div></figure>'


def _table(heads: list[str], rows: list[list[Any]]) -> str:
    """A table without the columns that hold nothing. Numbers stand under each other, digit under digit, and so do their heads."""
    columns = [(head, [row[i] for row in rows]) for i, head in enumerate(heads)]
    columns = [(head, values) for head, values in columns if any(value is not None for value in values)]
    formats = [_format(values) for _, values in columns]
    head = "".join(f"<th{_class(form)}>{html.escape(text)}</th>" for (text, _), form in zip(columns, formats))
    body = "".join(
        "<tr>" + "".join(f"<td{_class(form)}>{_cell(values[i], form)}</td>" for (_, values), form in zip(columns, formats)) + "</tr>"
        for i in range(len(rows))
    )
    return f'<div class="table"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _format(values: list[Any]) -> str | None:
    """How the numbers of a column are written, None for words: whole ones without a point, others with as many digits behind it."""
    present = [value for value in values if value is not None]
    if not all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in present):
        return None
    return "," if all(isinstance(value, int) for value in present) else ",.3f"


def _class(form: str | None) -> str:
    return "" if form is None else ' class="number"'


def _cell(value: Any, form: str | None) -> str:
    if value is None:
        return "-"
    return html.escape(str(value) if form is None else format(value, form))
