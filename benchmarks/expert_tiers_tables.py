"""What expert_tiers_step.py has measured, in tables, and its bars."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.tables import table

BAR, OVERLAP, BY_LAYER, SHARDS = 1.08, 0.97, 1.9, {2: 1.7, 4: 3.0}


@dataclass(frozen=True)
class RatioRow:
    """A case of tokens by break-even; seconds."""

    tier: str
    order: str
    ratio: float
    link_rate: float  # bytes per second
    alone: float
    link: float
    disk: float
    filling: float
    phases: float
    step: float
    error: float
    weights_waited: float
    grads_waited: float

    @property
    def bound(self) -> float:
        return max(self.alone, self.link, self.disk) + self.filling

    @property
    def binds(self) -> str:
        """What has most to do."""
        sections = {"computing": self.alone, "link": self.link, "disk": self.disk}
        return max(sections, key=sections.__getitem__)

    @property
    def holds(self) -> bool:
        """Within the bar, or two standard errors of that."""
        return self.within(self.bound)

    def within(self, bound: float) -> bool:
        """The same of another bound."""
        return self.step <= BAR * bound + 2 * self.error


def report(found: dict[str, Any], markdown: bool) -> list[str]:
    """Tables of what was measured."""
    sections = []
    if results := found.get("ratios"):
        headings = ["experts on", "order", "break-evens", "link MB/s", "passes s", "link s", "disk s", "filling s"]
        headings += ["step s", "error s", "step by bound", "by phases", "waits s", "binds", "holds"]
        cells = [
            [
                row.tier,
                row.order,
                f"{row.ratio:g}",
                f"{row.link_rate / 1e6:.1f}",
                *(f"{value:.3f}" for value in (row.alone, row.link, row.disk, row.filling, row.step, row.error)),
                f"{row.step / row.bound:.3f}",
                f"{row.step / row.phases:.3f}",
                f"{row.weights_waited + row.grads_waited:.3f}",
                row.binds,
                "yes" if row.holds else "no",
            ]
            for row in results
        ]
        sections.append(table(headings, cells, markdown))
    if results := found.get("overlap"):
        headings = ["order", "break-evens", "step s", "by resident passes", "by resident steps", "by recompute=none"]
        names = ("passes", "resident", "none")
        cells = [
            [
                row["order"],
                f"{row['ratio']:g}",
                f"{row['step']:.3f}",
                *(f"{row[name]:.3f} +- {row[name + '_error']:.3f}" for name in names),
                "yes" if row["passes"] >= OVERLAP - 2 * row["passes_error"] else "no",
            ]
            for row in results
        ]
        sections.append(table([*headings, "holds"], cells, markdown))
    if results := found.get("layers"):
        headings = [
            "precision",
            "micro-batches",
            "weights by inputs",
            "transfers",
            "slots kept",
            "step s",
            "speedup",
            "holds",
        ]
        cells = [
            [
                row["precision"],
                str(row["micro_batches"]),
                f"{row['weights_by_inputs']:.2f}",
                *(f"{a} : {b}" for a, b in (row["fills"], row["kept"])),
                "{:.3f} : {:.3f}".format(*row["steps"]),
                f"{row['speedup']:.2f} +- {row['error']:.2f}",
                "yes" if row["speedup"] + 2 * row["error"] >= BY_LAYER else "no",
            ]
            for row in results
        ]
        sections.append(table(headings, cells, markdown))
    if results := found.get("shards"):
        headings = ["ranks", "bytes read a rank", "step s", "speedup", "holds"]
        cells = [
            [
                str(row["ranks"]),
                "{:,} : {:,}".format(*row["read"]),
                "{:.3f} : {:.3f}".format(*row["steps"]),
                f"{row['speedup']:.2f} +- {row['error']:.2f}",
                "yes" if row["speedup"] + 2 * row["error"] >= SHARDS[row["ranks"]] else "no",
            ]
            for row in results
        ]
        sections.append(table(headings, cells, markdown))
    return sections
