"""Tables of evaluation losses by where a token stands."""

from __future__ import annotations

from typing import Any

from training.report.sources import Line, finite

# Ends of keys in metrics.jsonl, the values of their buckets in a table's head, and what the table is of.
TABLES = (
    ("loss_by_position", "Position", "position in the document's piece, or in the sample where documents are joined"),
    ("loss_by_length", "Length", "length of the document's piece in tokens"),
)


def buckets_of(metrics: list[Line]) -> list[dict[str, Any]]:
    """A table for each of TABLES that an evaluation has: a row for each bucket, and a column for each validation
    text, of its last evaluation."""
    tables = []
    for end, head, what in TABLES:
        last: dict[str, tuple[int, dict[str, float]]] = {}
        for line in metrics:
            for key, values in line.items():
                if key.endswith(end) and isinstance(values, dict):
                    last[_text_of(key)] = line["step"], values
        if not last:
            continue
        names = {name for _, values in last.values() for name in values}
        rows = [
            [name, *(finite(values.get(name)) for _, values in last.values())] for name in sorted(names, key=_first)
        ]
        heads = [head, *(f"{text}, step {step:,}" for text, (step, _) in last.items())]
        tables.append({"title": f"Validation loss by {what}, nats", "heads": heads, "rows": rows})
    return tables


def _text_of(key: str) -> str:
    """The validation text that a key is of."""
    return key.split("/")[1] if key.startswith("valid/") else "validation"


def _first(name: str) -> int:
    """The first value of a bucket, by which they are sorted."""
    first = name.partition("-")[0]
    return int(first) if first.isdigit() else 0
