"""The body of the page as HTML: headings, tables and empty figures for the charts."""

from __future__ import annotations

import html
from typing import Any

from base.units import GIB, MIB

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
    """Return the page's body as HTML: headings, tables and empty figures, into which the page's script draws the
    charts."""
    facts = [f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd></div>" for name, value in data["facts"]]
    lines = [f"<header><h1>{html.escape(data['title'])}</h1><dl>{''.join(facts)}</dl>"]
    lines += [f'<p class="note">{html.escape(note)}</p>' for note in data["notes"]]
    links = "".join(f'<a href="#{name}">{title}</a>' for name, title in SECTIONS)
    lines.append(f"<nav>{links}</nav></header><main>")
    own = {"experts": _experts, "plans": _plans, "timeline": _timeline, "memory": _memory}  # others: charts alone
    own |= {"run": _run, "events": _events}
    for name, title in SECTIONS:
        if missing := data["missing"].get(name):
            content = f'<p class="missing">{html.escape(missing)}</p>'
        else:
            content = own[name](data) if name in own else _charts(name, data)
        lines.append(f'<section id="{name}"><h2>{title}</h2>{content}</section>')
    return "".join(lines) + "</main>"


def _charts(name: str, data: dict[str, Any]) -> str:
    """Return the HTML of all charts in the report section `name`. The section of losses also has tables of losses by
    bucket; the section of placement also has heat maps of ranks."""
    charts = data["charts"][name]
    figures = [_figure(f"{name}-{i}", chart["title"]) for i, chart in enumerate(charts) if not chart["missing"]]
    if name == "placement":
        pictures = data["ranks"]["pictures"] if data["ranks"] else []
        figures += [_figure(f"ranks-{i}", picture["title"]) for i, picture in enumerate(pictures)]
        choice = _choice("Layer", "homes-layer", data["homes"]["layers"], data["homes"]["first"])
        figures.append(_figure("homes-chart", "Rank of each expert's primary", choice, "wide tall"))
    lacking = _remark(" ".join(chart["missing"] for chart in charts if chart["missing"]))
    tables = data["buckets"] if name == "loss" else []
    below = [f"<p>{html.escape(table['title'])}</p>{_table(table['heads'], table['rows'])}" for table in tables]
    return _grid(figures) + lacking + "".join(below)


def _experts(data: dict[str, Any]) -> str:
    pictures = data["layers"]["pictures"]
    figures = [_figure(f"layers-{i}", picture["title"]) for i, picture in enumerate(pictures)]
    choice = _choice("Layer", "expert-layer", data["experts"]["layers"])
    figures.append(_figure("experts-chart", "Tokens of each expert, % of an even share", choice, "wide tall"))
    dropped = any(picture["key"] == "dropped_share" for picture in pictures)
    return _grid(figures) + _remark("" if dropped else "No tokens were dropped.")


def _plans(data: dict[str, Any]) -> str:
    plans = data["plans"]
    heads = ["Layer", "Chunks forward", "Chunks backward", "Memory strategy", "All-to-all"]
    heads += [f"{way} {kind}, ms" for way in ("Forward", "Backward") for kind in ("predicted", "measured")]
    heads += ["Buffers, MiB", "Decisions"]
    table_rows = [[*row[:-2], None if row[-2] is None else row[-2] / MIB, row[-1]] for row in plans["rows"]]
    chart = plans["chart"]
    figure = _remark(chart["missing"]) if chart["missing"] else _figure("plans-chart", chart["title"])
    return figure + _table(heads, table_rows)


def _timeline(data: dict[str, Any]) -> str:
    choice = _choice("Step", "timeline-step", [step["step"] for step in data["timeline"]])
    text = (
        "Each rank has three rows: what it does, which part of a layer, and messages in transfer. Gaps in the "
        "first row, and pipeline exchanges, are waits; messages during a computation are hidden behind it. The "
        "predicted stage is below its ranks. Drag the handles below to zoom."
    )
    figure = _figure("timeline-chart", "", choice, "wide timeline")
    return f'<p>{text}</p>{figure}<div id="timeline-table"></div>'


def _memory(data: dict[str, Any]) -> str:
    memory = data["memory"]
    largest = max((row["peak"] or row["plan"]["total"] for row in memory["ranks"]), default=0)
    size, unit = (GIB, "GiB") if largest >= GIB else (MIB, "MiB")
    heads = ["Rank", f"Measured peak, {unit}", f"Planned, {unit}"]
    heads += [f"{kind.capitalize()}, {unit}" for kind in memory["kinds"]]
    table_rows = []
    for row in memory["ranks"]:
        plan = row["plan"] or {}
        numbers = [row["peak"], plan.get("total"), *(plan.get(kind) for kind in memory["kinds"])]
        table_rows.append([row["rank"], *(None if number is None else number / size for number in numbers)])
    title = "Peak by rank" + (": measured, and the parts of the plan" if memory["kinds"] else "")
    charts = enumerate((memory["chart"], memory["state"]))
    figures = [_figure(f"memory-{i}", chart["title"]) for i, chart in charts if not chart["missing"]]
    figures += [_figure("memory-ranks", title)] if table_rows else []
    return _remark(memory["missing"] or "") + _grid(figures) + _table(heads, table_rows)


def _run(data: dict[str, Any]) -> str:
    run = data["run"]
    table = _table(["Fact", "Value"], run["rows"]) if run["rows"] else ""
    lacking = "" if table else "No environment.json in the run's folder: versions and hardware are not known."
    config = f"<details><summary>config.yaml</summary><pre>{html.escape(run['config'])}</pre></details>"
    return _remark(lacking) + table + (config if run["config"] else "")


def _events(data: dict[str, Any]) -> str:
    kept, events = data["checkpoints"], data["events"]
    line = f"On disk now: {', '.join(kept)}." if kept else "No checkpoints on disk."
    heads = ["Time (UTC)", "Step", "Rank", "Kind", "What happened"]
    table_rows = [
        [event["time"], event["step"], event["rank"], event["kind"].replace("_", " "), event["text"]]
        for event in reversed(events)
    ]
    has_steps = any(event["step"] is not None for event in events)
    picture = _figure("events-chart", "", "", "wide short") if has_steps else ""
    return f"<p>{html.escape(line)}</p>" + picture + _table(heads, table_rows)


def _choice(label: str, name: str, values: list[Any], selected: int | None = None) -> str:
    """Return the HTML of a drop-down list of `values` with the id `name`. `selected`: the index of the value that is
    selected at first."""
    options = "".join(
        f'<option value="{i}"{" selected" if i == selected else ""}>{value}</option>' for i, value in enumerate(values)
    )
    return f'<label>{label} <select id="{name}">{options}</select></label>'


def _grid(figures: list[str]) -> str:
    return f'<div class="grid">{"".join(figures)}</div>'


def _remark(text: str) -> str:
    return f'<p class="missing">{html.escape(text)}</p>' if text else ""


def _figure(name: str, title: str, control: str = "", kind: str = "") -> str:
    return (
        f'<figure class="{kind}"><figcaption>{html.escape(title)}{control}</figcaption><div class="chart" '
        f'id="{name}"></div></figure>'
    )


def _table(heads: list[str], table_rows: list[list[Any]]) -> str:
    """Return an HTML table without its empty columns. Cells of numbers have the class `number`, which aligns digits."""
    columns = [(head, [row[i] for row in table_rows]) for i, head in enumerate(heads)]
    columns = [(head, values) for head, values in columns if any(value is not None for value in values)]
    formats = [_format(values) for _, values in columns]
    marks = ["" if form is None else ' class="number"' for form in formats]
    head = "".join(f"<th{mark}>{html.escape(text)}</th>" for (text, _), mark in zip(columns, marks))
    body = ""
    for i in range(len(table_rows)):
        texts = (_cell(values[i], form) for (_, values), form in zip(columns, formats))
        body += f"<tr>{''.join(f'<td{mark}>{text}</td>' for mark, text in zip(marks, texts))}</tr>"
    return f'<div class="table"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _format(values: list[Any]) -> str | None:
    """Return the format specification of a column of integers or of other numbers; None for a column of text."""
    present = [value for value in values if value is not None]
    if not all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in present):
        return None
    return "," if all(isinstance(value, int) for value in present) else ",.3f"


def _cell(value: Any, form: str | None) -> str:
    if value is None:
        return "-"
    return html.escape(str(value) if form is None else format(value, form))
