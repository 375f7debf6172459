"""Tables of text, aligned or in markdown, as the benchmarks print them."""

from __future__ import annotations

from collections.abc import Sequence


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], markdown: bool) -> str:
    """One line per row, under the headings; every row has as many cells."""
    if markdown:
        return "\n".join([headline(headings, markdown), *(line(row, headings, markdown) for row in rows)])
    widths = [max(len(row[i]) for row in [headings, *rows]) for i in range(len(headings))]
    return "\n".join(
        "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in [headings, *rows]
    )


def headline(headings: Sequence[str], markdown: bool) -> str:
    """The head of a table whose rows are printed one by one, as they come."""
    return line(headings, headings, markdown) + ("\n|" + " --- |" * len(headings) if markdown else "")


def line(cells: Sequence[str], headings: Sequence[str], markdown: bool) -> str:
    """One row under such a head; in plain text a column is at least 9 wide."""
    if markdown:
        return "| " + " | ".join(cells) + " |"
    return "  ".join(f"{cell:>{max(9, len(heading))}}" for cell, heading in zip(cells, headings, strict=True))
