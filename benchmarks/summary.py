"""Every claim with its figure, taken out of the files in benchmarks/results/: writes docs/results.md and a page for
each further machine.

`python -m benchmarks.summary [--check]`

Nothing is typed in. `benchmarks/results/claims.yaml` names each claim, the file that holds its figure, and a regular
expression that finds it there; one that takes a value out of a table names its column. After a new measurement, put its
table into the file and run this; a figure that is no longer found, or stands in another column, ends with its name.
With --check nothing is written, and the status is 1 if a page is out of date.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks import tables

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
GENERATED = (
    "<!-- Written by `python -m benchmarks.summary` from benchmarks/results/claims.yaml. Change that, not this. -->"
)
INTRODUCTION = """\
Each row is one claim, with the figure of one machine. A program takes the figure out of the file on the right, and a
test compares them. That file has the whole table, the settings, other runs and what went less well."""

Value = int | float
TAKES: dict[str, Callable[[list[Value]], Value]] = {
    "max": max,
    "min": min,
    "sum": sum,
    "count": len,
    "last": lambda found: found[-1],
}


@dataclass(frozen=True)
class Figure:
    """One claim on one machine."""

    group: str
    claim: str
    machine: str
    command: str
    file: str
    text: str  # the figure in words
    readme: str | None  # what the README says of it


class NotFound(ValueError):
    """A figure is not where the claims say that it is."""


def number(text: str) -> Value:
    """A number as the results write it: 1,296 or 0.87 or 5.9e-16 or +2.12."""
    plain = text.replace(",", "")
    return int(plain) if re.fullmatch(r"[-+]?\d+", plain) else float(plain)


def section(text: str, under: str | None, until: str | None) -> str:
    """The lines from the one that holds `under` to the next heading, or to the line that holds `until`; without both,
    all."""
    if under is None and until is None:
        return text
    lines = text.splitlines()
    start = 0
    if under is not None:
        start = next((i for i, line in enumerate(lines) if under in line), -1)
        if start < 0:
            raise NotFound(f"no line holds {under!r}")
    end = next((i for i in range(start + 1, len(lines)) if _ends(lines[i], until)), len(lines))
    return "\n".join(lines[start:end])


def _ends(line: str, until: str | None) -> bool:
    return line.startswith("#") if until is None else until in line


def find(text: str, where: Any, columns: list[str] | None = None) -> Value:
    """The value of an expression with one group: its first match, or what `take` makes of all of them. `columns`: the
    headings of the columns of a table that it is taken from, without which it must stand outside of tables.

    Raises:
        NotFound: nothing matches, or a value stands in another column.
    """
    pattern, take = (where, None) if isinstance(where, str) else (where["all"], where["take"])
    lines = text.splitlines()
    found: list[tuple[str, str | None]] = []  # with the heading of its column
    headings: list[str] = []
    for i, line in enumerate(lines):
        if line.startswith("|") and re.fullmatch(r"[| :-]+", "".join(lines[i + 1 : i + 2])):
            headings = [cell.strip() for cell in line.strip("|").split("|")]
        for match in re.finditer(pattern, line):
            cell = line[: match.start(match.re.groups)].count("|") - 1
            heading = headings[cell] if line.startswith("|") and cell < len(headings) else None
            found.append((match[match.re.groups], heading))
    if not found:
        raise NotFound(f"nothing is like {pattern!r}")
    if take == "count":
        return len(found)
    found = found if take else found[:1]
    for value, heading in found:
        if heading not in columns if columns else heading is not None:
            is_named = f"not {' or '.join(map(repr, columns))}" if columns else "which `columns` does not name"
            raise NotFound(f"{pattern!r} takes {value!r} out of the column {heading!r}, {is_named}")
    values = [number(value) for value, _ in found]
    return values[0] if take is None else TAKES[take](values)


def values_of(text: str, expressions: dict[str, Any], columns: dict[str, Any] | None = None) -> dict[str, Value]:
    """The named values; those that divide two others come last. `columns`: name -> heading, or headings."""
    found: dict[str, Value] = {}
    for name, where in expressions.items():
        if isinstance(where, dict) and "divide" in where:
            upper, lower = where["divide"]
            found[name] = found[upper] / found[lower]
        else:
            headings = (columns or {}).get(name)
            found[name] = find(text, where, [headings] if isinstance(headings, str) else headings)
    return found


def figures(results: Path = RESULTS) -> list[Figure]:
    """All figures, in the order of the claims; of each claim the first machine's first.

    Raises:
        NotFound: naming the claim, its file and the expression that finds nothing there.
    """
    claims = yaml.safe_load((results / "claims.yaml").read_text(encoding="utf-8"))
    found: list[Figure] = []
    for group in claims["groups"]:
        for claim in group["claims"]:
            if claim["claim"] in {figure.claim for figure in found}:
                raise ValueError(f"{claim['claim']!r} is claimed twice")
            text = (results / claim["file"]).read_text(encoding="utf-8")
            for i, (machine, span) in enumerate(claim["machines"].items()):
                span = span or {}
                try:
                    text_section = section(text, span.get("under"), span.get("until"))
                    values = values_of(text_section, claim["values"], claim.get("columns"))
                except NotFound as error:
                    raise NotFound(f"{claim['file']}, {claim['claim']!r} on {machine}: {error}") from None
                quoted = claim["readme"].format(**values) if i == 0 and "readme" in claim else None
                found.append(
                    Figure(
                        group["title"],
                        claim["claim"],
                        claims["machines"][machine],
                        claim["command"],
                        claim["file"],
                        claim["figure"].format(**values),
                        quoted,
                    )
                )
    return found


def pages(results: Path = RESULTS) -> dict[str, str]:
    """The text of each page under docs/, by its path there."""
    claims = yaml.safe_load((results / "claims.yaml").read_text(encoding="utf-8"))
    about = {group["title"]: group["about"] for group in claims["groups"]}
    every = figures(results)
    first: dict[str, Figure] = {}
    for figure in every:
        first.setdefault(figure.claim, figure)
    others = {}
    for key, machine in claims["machines"].items():
        rest = [figure for figure in every if figure.machine == machine and figure != first[figure.claim]]
        if rest:
            mine = [figure for figure in every if figure.machine == machine]
            others[f"results/{key}.md"] = (machine, mine)
    links = [f"* [{machine[0].upper()}{machine[1:]}]({path})" for path, (machine, _) in others.items()]
    main = _page(
        "Results", [INTRODUCTION, "The same claims on other machines:", "\n".join(links)], first.values(), about, ".."
    )
    pages = {"results.md": main}
    for path, (machine, mine) in others.items():
        title = f"Results on {machine}"
        pages[path] = _page(
            title, ["The first machine of each claim is in [results.md](../results.md)."], mine, about, "../.."
        )
    return pages


def _page(title: str, words: list[str], shown: Iterable[Figure], about: dict[str, str], up: str) -> str:
    paragraphs = [f"# {title}", GENERATED, *words]
    shown = list(shown)
    for group in dict.fromkeys(figure.group for figure in shown):
        cells = [
            [
                figure.claim,
                figure.text,
                figure.machine,
                f"`{figure.command}`",
                f"[{figure.file}]({up}/benchmarks/results/{figure.file})",
            ]
            for figure in shown
            if figure.group == group
        ]
        paragraphs += [
            f"## {group}",
            textwrap.fill(about[group], 120),
            tables.table(["claim", "figure", "machine", "command", "file"], cells, True),
        ]
    return "\n\n".join(paragraphs) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.summary", description=str(__doc__).split("\n\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 if a page is out of date")
    arguments = parser.parse_args()
    stale = []
    for path, text in pages().items():
        page = ROOT / "docs" / path
        if page.is_file() and page.read_text(encoding="utf-8") == text:
            continue
        stale.append(path)
        if not arguments.check:
            page.parent.mkdir(exist_ok=True)
            page.write_text(text, encoding="utf-8")
    if stale:
        print(f"summary: {'out of date' if arguments.check else 'written'}: {', '.join(stale)}")
    return int(arguments.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
