"""Whether boxes make up a matrix. Without torch."""

from __future__ import annotations

from collections.abc import Iterable

Box = tuple[int, int, int, int]  # first row, first column, end of the rows, end of the columns


def wrong_cover(boxes: Iterable[Box], rows: int, columns: int) -> str | None:
    """Why boxes do not make up a matrix, each number of it once, in words; None if they do."""
    active: list[Box] = []
    held = 0
    for box in sorted(box for box in boxes if box[0] < box[2] and box[1] < box[3]):
        if box[0] < 0 or box[1] < 0 or box[2] > rows or box[3] > columns:
            return f"rows {box[0]} to {box[2]} and columns {box[1]} to {box[3]} lie outside [{rows}, {columns}]"
        active = [other for other in active if other[2] > box[0]]
        if any(box[1] < other[3] and other[1] < box[3] for other in active):
            return f"row {box[0]} is there twice"
        active.append(box)
        held += (box[2] - box[0]) * (box[3] - box[1])
    return None if held == rows * columns else f"{held} of its {rows * columns} numbers are there"
