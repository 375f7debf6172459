"""The page as one HTML file, with the library that draws it."""

from __future__ import annotations

import html
import json
from pathlib import Path

from configs.files import write_text
from training.report.page.collect import collect
from training.report.page.markup import body_of
from training.report.sources import RunFiles, read

ASSETS = Path(__file__).parents[1] / "assets"


def render(source: RunFiles) -> str:
    """The page's text."""
    data = collect(source)
    text = (ASSETS / "page.html").read_text(encoding="utf-8")
    # What goes into a script element must not hold its end; JSON may spell any character as an escape.
    embedded = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    parts = {
        "title": html.escape(data["title"]),
        "style": (ASSETS / "page.css").read_text(encoding="utf-8"),
        "body": body_of(data),
        "data": embedded,
        "library": (ASSETS / "echarts.min.js").read_text(encoding="utf-8"),
        "script": (ASSETS / "page.js").read_text(encoding="utf-8"),
    }
    before, *rest = text.split("{{")
    pieces = [before]
    for piece in rest:
        name, _, after = piece.partition("}}")
        pieces += [parts[name.strip()], after]
    return "".join(pieces)


def write(run_dir: Path, output: Path | None = None) -> Path:
    """Make the page of a run, whole or not at all, and return its path. Raises sources.NotARun, or OSError where it
    cannot be written."""
    path = output or run_dir / "report.html"
    text = render(read(run_dir))
    write_text(path, text)
    return path
