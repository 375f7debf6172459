"""The table of what was found."""

from __future__ import annotations

from benchmarks.kit import tables
from tests.cuda.fake.measure import Found

HEADINGS = (
    "preset",
    "layout",
    "rank",
    "stage",
    "layers",
    "waits",
    "grouped products",
    "peak MiB",
    "planned MiB",
    "found / planned",
    "of activations",
)
MIB = 2**20


def head(markdown: bool) -> str:
    """Of a table whose lines come one by one."""
    return tables.headline(HEADINGS, markdown)


def line(found: Found, markdown: bool) -> str:
    """One rank of a preset."""
    case = found.case
    cells = (
        f"{case.preset}{f', {case.variant}' if case.variant else ''}",
        found.layout,
        f"{found.rank} of {case.world_size}",
        str(found.stage),
        "; ".join(found.layers),
        _waits(found),
        _grouped(found),
        f"{found.peak / MIB:.1f}",
        f"{found.planned / MIB:.1f}",
        f"{found.ratio:.3f}",
        f"{found.activations / found.planned_activations:.3f}",
    )
    return tables.line(cells, HEADINGS, markdown)


def _waits(found: Found) -> str:
    """How many by place, shortly; those that are not as tests/cuda/sync_points.py lists them, with what it lists."""
    if found.waits != found.expected_waits:
        return f"{found.waits}, listed are {found.expected_waits}"
    return " + ".join(f"{count} {call_site.rpartition(':')[2]}" for call_site, count in found.waits.items())


def _grouped(found: Found) -> str:
    known = found.grouped_products == found.expected_grouped_products
    return f"{found.grouped_products}{'' if known else f', not {found.expected_grouped_products}'}"
