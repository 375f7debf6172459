"""Headings, tables and the places of the charts."""

from __future__ import annotations

import html
from typing import Any

from training.report.page.curves import CURVES
from training.report.page.facts import GIB, MIB

SECTIONS = (
    ("loss", "Loss and gradients"),
    ("speed", "Speed"),
    ("experts", "Expert load"),
    ("placement", "Placement of experts"),
    ("plans", "Plans of the MoE layers"),
    ("timeline", "One step across ranks"),
    ("memory", "Memory against the plan"),
    ("tiers", "Experts off the device"),
    ("events", "Checkpoints and events"),
    ("run", "Versions, hardware and configuration"),
)


def body_of(data: dict[str, Any]) -> str:
    """Headings, tables and the places of the charts; the page's script draws into those."""
    facts = "".join(
        f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd></div>" for name, value in data["facts"]
    )
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
        if name == "placement":
            first = data["homes"]["first"]
            options = "".join(
                f'<option value="{i}"{" selected" if i == first else ""}>{layer}</option>'
                for i, layer in enumerate(data["homes"]["layers"])
            )
            pictures = data["ranks"]["pictures"] if data["ranks"] else []
            shown += [_figure(f"ranks-{i}", picture["title"]) for i, picture in enumerate(pictures)]
            choice = f'<label>Layer <select id="homes-layer">{options}</select></label>'
            shown.append(_figure("homes-chart", "Rank that each expert is at home on", choice, "wide tall"))
        lacking = _remark(" ".join(chart["missing"] for chart in charts if chart["missing"]))
        tables = data["buckets"] if name == "loss" else []
        return (
            _grid(shown)
            + lacking
            + "".join(
                f"<p>{html.escape(table['title'])}</p>{_table(table['heads'], table['rows'])}" for table in tables
            )
        )
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
        return (_remark(chart["missing"]) if chart["missing"] else _figure("plans-chart", chart["title"])) + _table(
            heads, rows
        )
    if name == "timeline":
        options = "".join(f'<option value="{i}">{step["step"]}</option>' for i, step in enumerate(data["timeline"]))
        choice = f'<label>Step <select id="timeline-step">{options}</select></label>'
        text = (
            "Each rank has three rows: what it does, which part of a layer, and messages on their way. Gaps in the "
            "first row, and pipeline exchanges, are waits; messages under computation are hidden behind it. A stage as "
            "it was predicted stands below its ranks. Drag the handles below to zoom."
        )
        return (
            f"<p>{text}</p>"
            + _figure("timeline-chart", "", choice, "wide timeline")
            + '<div id="timeline-table"></div>'
        )
    if name == "memory":
        memory = data["memory"]
        largest = max((row["peak"] or row["plan"]["total"] for row in memory["ranks"]), default=0)
        size, unit = (GIB, "GiB") if largest >= GIB else (MIB, "MiB")
        heads = [
            "Rank",
            f"Measured peak, {unit}",
            f"Planned, {unit}",
            *(f"{kind.capitalize()}, {unit}" for kind in memory["kinds"]),
        ]
        rows = []
        for row in memory["ranks"]:
            plan = row["plan"] or {}
            numbers = [row["peak"], plan.get("total"), *(plan.get(kind) for kind in memory["kinds"])]
            rows.append([row["rank"], *(None if number is None else number / size for number in numbers)])
        chart, title = (
            memory["chart"],
            "Peak by rank" + (": measured, and the parts of the plan" if memory["kinds"] else ""),
        )
        figures = [
            *([] if chart["missing"] else [_figure("memory-0", chart["title"])]),
            *([] if memory["state"]["missing"] else [_figure("memory-1", memory["state"]["title"])]),
            *([_figure("memory-ranks", title)] if rows else []),
        ]
        return _remark(memory["missing"] or "") + _grid(figures) + _table(heads, rows)
    if name == "run":
        run = data["run"]
        lack = (
            ""
            if data["run"]["rows"]
            else "No environment.json in the run's folder: versions and hardware are not known."
        )
        text = (
            f"<details><summary>config.yaml</summary><pre>{html.escape(run['config'])}</pre></details>"
            if run["config"]
            else ""
        )
        return _remark(lack) + (_table(["What", "Which"], run["rows"]) if run["rows"] else "") + text
    kept = data["checkpoints"]
    line = f"On disk now: {', '.join(kept)}." if kept else "No checkpoints on disk."
    heads = ["Time (UTC)", "Step", "Rank", "Kind", "What happened"]
    rows = [
        [event["time"], event["step"], event["rank"], event["kind"].replace("_", " "), event["text"]]
        for event in reversed(data["events"])
    ]
    picture = (
        _figure("events-chart", "", "", "wide short")
        if any(event["step"] is not None for event in data["events"])
        else ""
    )
    return f"<p>{html.escape(line)}</p>" + picture + _table(heads, rows)


def _grid(parts: Any) -> str:
    return f'<div class="grid">{"".join(parts)}</div>'


def _remark(text: str) -> str:
    return f'<p class="missing">{html.escape(text)}</p>' if text else ""


def _figure(name: str, title: str, control: str = "", kind: str = "") -> str:
    return (
        f'<figure class="{kind}"><figcaption>{html.escape(title)}{control}</figcaption><div class="chart" '
        f'id="{name}"></div></figure>'
    )


def _table(heads: list[str], rows: list[list[Any]]) -> str:
    """A table without the columns that hold nothing. Numbers stand under each other, digit under digit, and so do their
    heads."""
    columns = [(head, [row[i] for row in rows]) for i, head in enumerate(heads)]
    columns = [(head, values) for head, values in columns if any(value is not None for value in values)]
    formats = [_format(values) for _, values in columns]
    head = "".join(f"<th{_class(form)}>{html.escape(text)}</th>" for (text, _), form in zip(columns, formats))
    body = "".join(
        "<tr>"
        + "".join(f"<td{_class(form)}>{_cell(values[i], form)}</td>" for (_, values), form in zip(columns, formats))
        + "</tr>"
        for i in range(len(rows))
    )
    return f'<div class="table"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _format(values: list[Any]) -> str | None:
    """How the numbers of a column are written, None for words: whole ones without a point, others with as many digits
    behind it."""
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
