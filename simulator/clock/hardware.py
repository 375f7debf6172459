"""What a machine can do, in figures: files of configs/hardware, each figure with its unit and its source.

A figure is what one rank's device gets when it is alone, or a group's links when only this group uses them; figures
with `shared_by` say how many ranks use the same thing at once. `stated` is what the source says where a fit
(simulator/fit.py) found something else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

KINDS = ("cuda", "cpu")
STATED = "; stated: "  # in the source of a fitted figure, before that of what is stated

# Name of a figure: its unit, what it means, and whether a fit may change it.
FIGURES: dict[str, tuple[str, str, bool]] = {
    "ranks_per_node": ("ranks", "devices of a node", False),
    "device.memory": ("bytes", "memory of a device", False),
    "host.memory": ("bytes", "memory of a node", False),
    "disk.memory": ("bytes", "scratch disk of a node; 0: none", False),
    "products.fp32": ("FLOP/s", "large matrix products in fp32", True),
    "products.half": ("FLOP/s", "large matrix products in bf16 and fp16", True),
    "products.tile": ("numbers", "by so many a product's sizes are worse used: each adds this over itself to 1", True),
    "attention.half": ("FLOP/s", "fused attention in bf16 and fp16", True),
    "device.rate": ("bytes/s", "memory that operations read and write", True),
    "device.operation": ("s", "what each operation takes on the device beside its work", True),
    "launch.operation": ("s", "what the host takes to start an operation", True),
    "launch.exposed": (
        "share",
        "of starting operations, or computing if that is less, that is not hidden",
        True,
    ),
    "inside.startup_2": ("s", "of a gather between 2 ranks of a node; an all-reduce has it twice", True),
    "inside.startup_4": ("s", "between 4", True),
    "inside.startup_8": ("s", "between 8; more ranks go on with this slope", True),
    "inside.rate": ("bytes/s", "that a rank sends to others of its node, each way", True),
    "between.startup": ("s", "of a gather between 2 nodes; between n, log2(n) times as much", True),
    "between.rate": ("bytes/s", "that a node's card carries, each way", True),
    "between.shared_by": ("ranks", "of a node that use the same card", False),
    "host.up": ("bytes/s", "from a host to a device", True),
    "host.down": ("bytes/s", "from a device to a host", True),
    "host.link_shared_by": ("ranks", "that use the same link to the host", False),
    "host.rate": ("bytes/s", "memory of a node that all of its ranks read and write", True),
    "host.update": ("bytes/s", "that a rank's update on the host reads and writes", True),
    "disk.read": ("bytes/s", "of a node's scratch disk", True),
    "disk.write": ("bytes/s", "of a node's scratch disk", True),
    "step.startup": ("s", "what a step takes beside passes, reductions and the update", True),
}


@dataclass(frozen=True)
class Figure:
    """A number, where it is from, and what the source says where a fit changed it."""

    value: float
    source: str
    stated: float | None = None


@dataclass(frozen=True)
class Hardware:
    """A machine of nodes. `kind`: cuda or cpu; `errors`: what back-tests with these figures found."""

    name: str
    kind: str
    about: str
    figures: Mapping[str, Figure]
    errors: tuple[Mapping[str, Any], ...] = field(default=())

    def __getitem__(self, name: str) -> float:
        return self.figures[name].value

    def as_stated(self) -> Hardware:
        """The same machine with what sources say, whatever was fitted."""
        return replace(self, figures={name: _stated(figure) for name, figure in self.figures.items()}, errors=())

    def with_values(self, values: Mapping[str, float], source: str) -> Hardware:
        """The same machine, in whose figures a fit, or a test, found these values."""
        new = dict(self.figures)
        for name, value in values.items():
            of = _stated(new[name])
            new[name] = Figure(value, f"{source}{STATED}{of.source}", of.value)
        return replace(self, figures=new)


def _stated(figure: Figure) -> Figure:
    if figure.stated is None:
        return figure
    return Figure(figure.stated, figure.source.partition(STATED)[2] or figure.source)
