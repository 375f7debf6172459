"""Tables of text, aligned or in markdown, as the benchmarks print them."""

from __future__ import annotations

from collections.abc import Sequence


def table(headings: Sequence[str], table_rows: Sequence[Sequence[str]], markdown: bool) -> str:
    """Return a table with one line per row under the headings; every row has a cell per heading."""
    if markdown:
        return "\n".join([headline(headings, markdown), *(line(row, headings, markdown) for row in table_rows)])
    widths = [max(len(row[i]) for row in [headings, *table_rows]) for i in range(len(headings))]
    return "\n".join(
        "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))
        for row in [headings, *table_rows]
    )


def headline(headings: Sequence[str], markdown: bool) -> str:
    """Return the head of a table whose rows are printed one by one."""
    return line(headings, headings, markdown) + ("\n|" + " --- |" * len(headings) if markdown else "")


def line(cells: Sequence[str], headings: Sequence[str], markdown: bool) -> str:
    """Return one row of a table with these headings; in plain text a column has at least 9 characters."""
    if markdown:
        return "| " + " | ".join(cells) + " |"
    return "  ".join(f"{cell:>{max(9, len(heading))}}" for cell, heading in zip(cells, headings, strict=True))
