"""Facts of the run for the top of the page; its events, hosts and configuration for the end."""

from __future__ import annotations

import math
from collections import Counter
from datetime import UTC, datetime
from typing import Any

from base.units import GIB
from training.report.sources import Line, RunFiles, finite

MAX_EVENTS = 400  # rows of the table
STARTS = ("run_started", "run_goes_on")  # kinds of events that a process starts with


def facts_of(source: RunFiles) -> list[list[str]]:
    """Return the facts in the header of the report page, as pairs of name and value."""
    config, metrics = source.config, source.metrics
    model, moe, layout, training = (config.get(key) or {} for key in ("model", "moe", "parallel", "training"))
    facts: list[tuple[str, str]] = []
    if metrics:
        total = training.get("steps")
        facts.append(("Steps", f"{metrics[-1]['step']:,}" + (f" of {total:,}" if isinstance(total, int) else "")))
        losses = [line for line in metrics if finite(line.get("loss")) is not None]
        if losses:
            facts.append(("Last loss", f"{losses[-1]['loss']:.4f}"))
        validations = [line["validation_loss"] for line in metrics if finite(line.get("validation_loss")) is not None]
        if validations:
            facts.append(("Last validation loss", f"{validations[-1]:.4f}"))
        last_of = {
            key.split("/")[1]: line[key]
            for line in metrics
            for key in line
            if key.startswith("valid/") and key.endswith("/loss") and finite(line[key]) is not None
        }
        facts += [(f"Last validation loss of {name}", f"{loss:.4f}") for name, loss in last_of.items()]
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
    facts.append(("Page made", datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")))
    return [list(fact) for fact in facts]


def _ranks_on(devices: dict[str, int]) -> str:
    return ", ".join(f"{count} {'rank' if count == 1 else 'ranks'} on {name}" for name, count in devices.items())


def _hosts(source: RunFiles) -> list[Line]:
    hosts = source.environment.get("hosts")
    hosts = hosts if isinstance(hosts, list) else []
    return [host for host in hosts if isinstance(host, dict) and isinstance(host.get("devices"), dict)]


def run_of(source: RunFiles) -> dict[str, Any]:
    """Return a table of versions and hardware, and the text of config.yaml."""
    table_rows: list[list[str]] = []
    if source.record.get("id"):
        table_rows.append(["Run", str(source.record["id"])])
    versions = source.environment.get("versions")
    table_rows += [[str(name), str(number)] for name, number in versions.items()] if isinstance(versions, dict) else []
    for host in _hosts(source):
        memory = finite(host.get("memory_bytes"))
        about = f"{_ranks_on(host['devices'])}; {host.get('cores')} cores of {host.get('processor')}"
        about += f"; {memory / GIB:.0f} GiB of memory" if memory else ""
        table_rows.append([f"Host {host.get('host')}", about])
    return {"rows": table_rows, "config": source.config_text}


def wall_time(source: RunFiles) -> tuple[float, int]:
    """Return the seconds during which the run was active, and the number of its starts. An active time lasts from a
    start to the last event, status or heartbeat before the next start."""
    events = [event for event in source.events if finite(event.get("time")) is not None]
    starts = sorted(event["time"] for event in events if event.get("kind") in STARTS)
    ends = [finite(source.status.get("time")), finite(source.record.get("heartbeat")), *(e["time"] for e in events)]
    total = 0.0
    for start, end in zip(starts, [*starts[1:], math.inf]):
        total += max((when for when in ends if when is not None and start <= when < end), default=start) - start
    return total, len(starts)


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {seconds:02} s"


def events_of(source: RunFiles) -> list[dict[str, Any]]:
    """Return the newest MAX_EVENTS events, with their time as text."""
    result = []
    for event in source.events[-MAX_EVENTS:]:
        when = finite(event.get("time"))
        text = datetime.fromtimestamp(when, UTC).strftime("%Y-%m-%d %H:%M:%S") if when is not None else ""
        step = event.get("step") if isinstance(event.get("step"), int) else None
        words = {key: str(event.get(key, "")) for key in ("kind", "text")}
        result.append({"time": text, "rank": event.get("rank"), "step": step, **words})
    return result
