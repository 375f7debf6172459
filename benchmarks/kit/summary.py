"""Write docs/results.md and the pages in docs/results/ from the measurements in benchmarks/results/.

`python -m benchmarks.kit.summary [--check]`

No figure is typed: `benchmarks/results/claims.yaml` lists the claims, and for each figure the page, table, row and
column that have it. docs/results.md shows the main claims; docs/results/ has a page of further claims for each area
and a page for each further machine. After a new measurement, replace the table in its page and run this program: it
raises NotFound for a figure whose table, row or column is missing or not unique. With --check it writes nothing and
exits with status 1 if a page is out of date.
"""

from __future__ import annotations

import argparse
import re
import string
import sys
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal, localcontext
from pathlib import Path
from typing import Any

import yaml

from benchmarks.kit import tables

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
GENERATED = (
    "<!-- Written by `python -m benchmarks.kit.summary` from benchmarks/results/claims.yaml. Change that, not this. -->"
)
INTRODUCTION = """\
The thirty claims that matter most for a decision to use Mixtrain. Each row has one claim and its figure on one machine.
A program extracts the figure from the page on the right, and a test compares both. That page has the table, the
command, the settings, further runs and the cases that went less well."""

Value = int | float
Position = dict[str, Any]
NUMBER = re.compile(r"(?<![\w.,-])[-+]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?")
TAKES: dict[str, Callable[[list[Value]], Value]] = {
    "max": max,
    "min": min,
    "sum": sum,
    "last": lambda found: found[-1],
}
KEYS = {"table", "row", "rows", "column", "part", "take"}


class NotFound(ValueError):
    """A figure's table, row, column or number is missing or not unique."""


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
    is_main: bool


@dataclass(frozen=True)
class Table:
    """A table of a page, with the texts that can name it."""

    heading: str  # the heading of its section, with its #
    above: str  # the last line of text between the heading, or the table before it, and this table
    columns: list[str]
    cells: list[list[str]]  # by row

    def column(self, name: str) -> int:
        """The index of the column with this header. Raises NotFound unless there is exactly one."""
        if self.columns.count(name) != 1:
            raise NotFound(f"{self.columns.count(name)} columns have the header {name!r}")
        return self.columns.index(name)

    def selected(self, where: str | dict[str, Any]) -> list[list[str]]:
        """The rows that `where` selects: "all", or {column: value or list of values}. Raises NotFound if a value of
        a list is in no selected row, or two selected rows are equal."""
        found = self.cells
        for name, wanted in {} if isinstance(where, str) else where.items():
            column = self.column(name)
            values = [str(value) for value in (wanted if isinstance(wanted, list) else [wanted])]
            found = [row for row in found if row[column] in values]
            if missing := [value for value in values if value not in {row[column] for row in found}]:
                raise NotFound(f"no row has {missing[0]!r} in the column {name!r}")
        if len({tuple(row) for row in found}) < len(found):
            raise NotFound("two rows are equal")
        return found


def number(text: str) -> Value:
    """Convert a number as the pages write it: 1,296 or 0.87 or 5.9e-16 or +2.12."""
    plain = text.replace(",", "")
    return int(plain) if re.fullmatch(r"[-+]?\d+", plain) else float(plain)


def tables_of(page: str) -> list[Table]:
    """Read all tables of a page in markdown. Raises NotFound if a row has more or fewer cells than the header."""
    found: list[Table] = []
    heading = above = ""
    body: list[list[str]] | None = None  # of the table being read
    for line in page.splitlines():
        if not line.startswith("|"):
            body = None
            heading, above = (line, "") if line.startswith("#") else (heading, line.strip() or above)
            continue
        cells = [cell.strip() for cell in line.strip().removeprefix("|").removesuffix("|").split("|")]
        if body is None:
            body = []
            found.append(Table(heading, above, cells, body))
            above = ""
        elif len(cells) != len(found[-1].columns):
            raise NotFound(f"a row of the table under {heading!r} has {len(cells)} cells: {line}")
        elif not all(re.fullmatch(":?-+:?", cell) for cell in cells):
            body.append(cells)
    return found


def find_table(page: list[Table], names: list[str]) -> Table:
    """Return the table that has each name as the beginning of its heading or of the line above it, or as its first
    column header. Without names, the page must have one table."""
    found = [
        table
        for table in page
        if all(
            table.heading.startswith(name) or table.above.startswith(name) or table.columns[0] == name for name in names
        )
    ]
    if len(found) != 1:
        raise NotFound(f"{len(found)} tables have this name")
    return found[0]


def number_in(cell: str, nth: int | None) -> Value:
    """Return the only number of a cell, or its `nth` number (from 1)."""
    numbers = NUMBER.findall(cell)
    if not numbers or (len(numbers) > 1 if nth is None else len(numbers) < nth):
        raise NotFound(f"{cell!r} has {len(numbers)} numbers, and part is {nth}")
    return number(numbers[(nth or 1) - 1])


def value_at(page: list[Table], position: Position, names: list[str]) -> Value:
    """Return the value at one position of claims.yaml; `names` are the texts that name the table."""
    if not position.keys() <= KEYS or {"row", "take"} & position.keys() not in ({"row"}, {"take"}):
        raise ValueError(f"a position has a row, or rows and take, and no other keys than {sorted(KEYS)}: {position}")
    table = find_table(page, names)
    columns = [table.column(name) for name in as_list(position["column"])]
    if "row" in position:
        row = position["row"]
        found = table.selected(row if isinstance(row, dict) else {table.columns[0]: row})
        if len(found) != 1:
            raise NotFound(f"{len(found)} rows are like this")
        return number_in(found[0][columns[0]], position.get("part"))
    cells = [row[column] for row in table.selected(position["rows"]) for column in columns]
    cells = [cell for cell in cells if cell]  # an empty cell is a case that does not exist
    if not cells:
        raise NotFound("all cells are empty")
    if position["take"] == "count":
        return len(cells)
    return TAKES[position["take"]]([number_in(cell, position.get("part")) for cell in cells])


def values_of(page: list[Table], positions: dict[str, Position], under: list[str]) -> dict[str, Value]:
    """Return the values by name. `under`: texts that name the table of each position, in addition to its own."""
    found: dict[str, Value] = {}
    for name, position in positions.items():
        if "divide" in position:
            upper, lower = position["divide"]
            found[name] = found[upper] / found[lower]
            continue
        names = [*under, *as_list(position.get("table", []))]
        try:
            found[name] = value_at(page, position, names)
        except NotFound as error:
            row = position.get("row", position.get("rows"))
            raise NotFound(f"{name}: table {names}, row {row!r}, column {position['column']!r}: {error}") from None
    return found


class _Words(string.Formatter):
    """Format halves away from zero, so that 0.15 becomes 0.2, where Python's format of floats gives 0.1."""

    def format_field(self, value: object, format_spec: str) -> str:
        if isinstance(value, float) and format_spec.endswith(("f", "%")):
            value = Decimal(repr(value))
        with localcontext(rounding=ROUND_HALF_UP):
            return str(super().format_field(value, format_spec))


def as_list(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts


def figures(results: Path = RESULTS) -> list[Figure]:
    """Return all figures, in the order of the claims; of each claim the first machine's first.

    Raises:
        NotFound: naming the page, claim, machine, table, row and column of a figure that is not there.
        ValueError: two claims are the same.
    """
    claims = yaml.safe_load((results / "claims.yaml").read_text(encoding="utf-8"))
    read: dict[str, list[Table]] = {}  # the tables of each page
    found: list[Figure] = []
    for group in claims["groups"]:
        for claim in group["claims"]:
            if claim["claim"] in {figure.claim for figure in found}:
                raise ValueError(f"{claim['claim']!r} is claimed twice")
            file = claim["file"]
            for i, (machine, under) in enumerate(claim["machines"].items()):
                try:
                    if file not in read:
                        read[file] = tables_of((results / file).read_text(encoding="utf-8"))
                    values = values_of(read[file], claim["values"], as_list(under or []))
                except NotFound as error:
                    raise NotFound(f"{file}, {claim['claim']!r} on {machine}: {error}") from None
                found.append(
                    Figure(
                        group["title"],
                        claim["claim"],
                        claims["machines"][machine],
                        claim["command"],
                        file,
                        _Words().format(claim["figure"], **values),
                        _Words().format(claim["readme"], **values) if i == 0 and "readme" in claim else None,
                        claim.get("main", False),
                    )
                )
    return found


def pages(results: Path = RESULTS) -> dict[str, str]:
    """Return the text of each page, by its path under docs/."""
    claims = yaml.safe_load((results / "claims.yaml").read_text(encoding="utf-8"))
    about = {group["title"]: group["about"] for group in claims["groups"]}
    every = figures(results)
    first: dict[str, Figure] = {}
    for figure in every:
        first.setdefault(figure.claim, figure)
    main = [figure for figure in first.values() if figure.is_main]
    written = {}
    links = ["Further claims, by area:"]
    for group in claims["groups"]:
        shown = [figure for figure in first.values() if figure.group == group["title"] and not figure.is_main]
        if shown:
            path = f"results/{group['page']}.md"
            words = "The most important claims of all areas are in [results.md](../results.md)."
            written[path] = _page("Further results", [words], shown, about, "../..")
            links.append(f"* [{group['title']}]({path})")
    links.append("\nThe same claims on other machines:")
    for key, machine in claims["machines"].items():
        shown = [figure for figure in every if figure.machine == machine]
        if any(figure != first[figure.claim] for figure in shown):
            path = f"results/{key}.md"
            words = "The figures of other machines are linked in [results.md](../results.md)."
            written[path] = _page(f"Results on {machine}", [words], shown, about, "../..")
            links.append(f"* [{machine[0].upper()}{machine[1:]}]({path})")
    listed = "\n".join(links).replace(":\n*", ":\n\n*")
    return {"results.md": _page("Results", [INTRODUCTION, listed], main, about, ".."), **written}


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
            tables.table(["claim", "figure", "machine", "command", "page"], cells, True),
        ]
    return "\n\n".join(paragraphs) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kit.summary", description=str(__doc__).split("\n\n")[0])
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
