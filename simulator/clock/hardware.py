"""Hardware of a cluster as a set of figures with units and sources, and the files in configs/hardware that store them.

A figure is measured while nothing else uses the resource: one rank's device or one group's links. Figures that end in
`shared_by` say how many ranks share a resource. A file is a mapping with `kind` (cuda or cpu), `about` (one line),
`figures` (every name in FIGURES, with `value`, `source` and, if a fit by simulator/fit.py changed the value, the
source's value as `stated`) and `errors` (a list of back-test results).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import yaml

from base.errors import ConfigError
from configs import hardware_files
from configs.overrides import read_mapping
from configs.show import nearest, show

KINDS = ("cuda", "cpu")
STATED = "; stated: "  # in the source of a fitted figure, before the source of the stated value

KEYS = ("kind", "about", "figures", "errors")
FIGURE_KEYS = ("value", "source", "stated")
COUNTS = ("ranks",)  # units of whole numbers
MAY_BE_ZERO = ("disk.memory", "disk.read", "disk.write", "products.tile", "launch.exposed")  # besides all times
# Part of a card's name, as its driver gives it, and the file of its machine; the first that occurs is taken.
CARDS = {"GB200": "gb200", "GH200": "gh200", "H200": "h200_8x", "H100": "h100_8x", "A100-SXM": "a100_8x"}
# Name of a figure: its unit, its meaning, and whether a fit may change it.
FIGURES: dict[str, tuple[str, str, bool]] = {
    "ranks_per_node": ("ranks", "number of devices in a node", False),
    "device.memory": ("bytes", "memory of one device", False),
    "host.memory": ("bytes", "host memory of a node", False),
    "disk.memory": ("bytes", "size of a node's scratch disk; 0: no disk", False),
    "products.fp32": ("FLOP/s", "rate of large matmuls in fp32", True),
    "products.half": ("FLOP/s", "rate of large matmuls in bf16 and fp16", True),
    "products.tile": ("numbers", "c, if a matmul of sizes m, n, k takes 1 + c * (1/m + 1/n + 1/k) times as long", True),
    "attention.half": ("FLOP/s", "rate of fused attention in bf16 and fp16", True),
    "device.rate": ("bytes/s", "rate at which operations read and write device memory", True),
    "device.operation": ("s", "fixed time of each operation on the device", True),
    "launch.operation": ("s", "time in which the host launches an operation", True),
    "launch.exposed": ("share", "share of launching (or of computing, if that is shorter) that is not hidden", True),
    "inside.startup_2": ("s", "start-up time of an all-gather between 2 ranks of a node (all-reduce: doubled)", True),
    "inside.startup_4": ("s", "start-up time of an all-gather between 4 ranks of a node", True),
    "inside.startup_8": ("s", "start-up time of an all-gather between 8 ranks of a node", True),
    "inside.rate": ("bytes/s", "rate at which a rank sends to others in its node, per direction", True),
    "between.startup": ("s", "start-up time of an all-gather between 2 nodes (n nodes: log2(n) times as much)", True),
    "between.rate": ("bytes/s", "rate of a node's network card, per direction", True),
    "between.shared_by": ("ranks", "number of ranks of a node that share a network card", False),
    "host.up": ("bytes/s", "rate of copies from a host to a device", True),
    "host.down": ("bytes/s", "rate of copies from a device to a host", True),
    "host.link_shared_by": ("ranks", "number of ranks that share a link to the host", False),
    "host.rate": ("bytes/s", "rate at which all ranks of a node together read and write its memory", True),
    "host.update": ("bytes/s", "rate at which a rank's update on the host reads and writes", True),
    "disk.read": ("bytes/s", "read rate of a node's scratch disk", True),
    "disk.write": ("bytes/s", "write rate of a node's scratch disk", True),
    "step.startup": ("s", "fixed time of a step, besides passes, reductions and the update", True),
}


@dataclass(frozen=True)
class Figure:
    """A hardware figure with its source. `stated`: the value that the source states, if a fit replaced it."""

    value: float
    source: str
    stated: float | None = None


@dataclass(frozen=True)
class Hardware:
    """A cluster of equal nodes, described by figures such as FLOP/s, bytes/s and start-up seconds.

    `kind`: cuda or cpu. `errors`: errors of predictions with these figures, found by back-tests.
    """

    name: str
    kind: str
    about: str
    figures: Mapping[str, Figure]
    errors: tuple[Mapping[str, Any], ...] = field(default=())

    def __getitem__(self, name: str) -> float:
        return self.figures[name].value

    def as_stated(self) -> Hardware:
        """Return the hardware with every fitted value replaced by its source's value."""
        return replace(self, figures={name: _stated(figure) for name, figure in self.figures.items()}, errors=())

    def with_values(self, values: Mapping[str, float], source: str) -> Hardware:
        """Return the hardware with some values replaced. `source`: the fit or the test that found the values."""
        new = dict(self.figures)
        for name, value in values.items():
            of = _stated(new[name])
            new[name] = Figure(value, f"{source}{STATED}{of.source}", of.value)
        return replace(self, figures=new)


def _stated(figure: Figure) -> Figure:
    if figure.stated is None:
        return figure
    return Figure(figure.stated, figure.source.partition(STATED)[2] or figure.source)


def load_hardware(name_or_path: str) -> Hardware:
    """Return the hardware that a file describes. The file is given by its name in configs/hardware, or by a .yaml path.

    Raises:
        ConfigError: in one line with file and key, if the file does not exist, a key is unknown or missing, a figure
            has no source, or a value is outside the range of its unit.
    """
    if (wrong := hardware_files.wrong(name_or_path)) is not None:
        rule, close = wrong
        tried = f"hardware={close or hardware_files.names()[0]}"
        raise ConfigError(f"hardware ({show(name_or_path)}) {rule}. Try {tried}.")
    path = hardware_files.find(name_or_path)
    assert path is not None
    return _parse(read_mapping(path), path)


def file_of_card(name: str) -> str | None:
    """Return the name of the hardware file for a card such as "NVIDIA H100 80GB HBM3"; None if there is none."""
    return next((file for model, file in CARDS.items() if model in name), None)


def _parse(content: Mapping[Any, Any], path: Path) -> Hardware:
    """Return the hardware that a file's mapping describes.

    Raises ConfigError for a wrong key or value, a figure without a source, or a value outside its unit's range.
    """
    _check_keys(path, "", content, KEYS)
    kind = content.get("kind")
    if kind not in KINDS:
        _refuse(path, "kind", kind, f"be one of {', '.join(KINDS)}", "kind: cuda")
    about, errors = content.get("about"), content.get("errors", [])
    if not isinstance(about, str) or not about.strip():
        _refuse(path, "about", about, "describe in one line which machine this is", "about: eight cards in a node")
    if not isinstance(errors, list) or not all(isinstance(error, Mapping) for error in errors):
        _refuse(path, "errors", errors, "be a list of mappings, as python -m simulator.fit writes them", "errors: []")
    found = content.get("figures")
    if not isinstance(found, Mapping):
        rule = "be a mapping from each figure to its value and source"
        _refuse(path, "figures", found, rule, f"a copy of the figures in {hardware_files.FOLDER / 'h100_8x.yaml'}")
    _check_keys(path, "figures.", found, tuple(FIGURES))
    for name, (unit, meaning, _) in FIGURES.items():
        if name not in found:
            raise ConfigError(
                f"{path}: figures.{name} ({meaning}, in {unit}) is missing. Give its value and source, as the files "
                "in configs/hardware do."
            )
    figures = {name: _figure(path, name, found[name]) for name in FIGURES}
    return Hardware(path.stem, kind, about, figures, tuple(dict(error) for error in errors))


def _figure(path: Path, name: str, content: Any) -> Figure:
    key, unit = f"figures.{name}", FIGURES[name][0]
    if not isinstance(content, Mapping):
        _refuse(path, key, content, "have a value and a source", "{value: 1.0e+9, source: datasheet}")
    _check_keys(path, f"{key}.", content, FIGURE_KEYS)
    source = content.get("source")
    if not isinstance(source, str) or not source.strip():
        _refuse(path, f"{key}.source", source, "name where the value is from", "source: datasheet")
    value = _number(path, f"{key}.value", name, unit, content.get("value"))
    stated = content.get("stated")
    return Figure(value, source, None if stated is None else _number(path, f"{key}.stated", name, unit, stated))


def _number(path: Path, key: str, name: str, unit: str, value: Any) -> float:
    """Return a figure's value; raise ConfigError if it is outside the range of its unit."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        _refuse(path, key, value, f"be a number, in {unit}", f"{key.rpartition('.')[2]}: {_usual(unit)}")
    zero = name in MAY_BE_ZERO or unit == "s"
    # Values outside the range are in a different unit.
    high = {"share": 1.0, "s": 60.0}.get(unit, math.inf)
    low = 1e5 if unit in ("FLOP/s", "bytes/s") and not (zero and value <= 0) else 0.0
    if unit in COUNTS and value != int(value) or not low <= value <= high or value == 0 and not zero:
        what = f"a whole number, in {unit}" if unit in COUNTS else f"in {unit}"
        least = f"at least {low:g}" if low or zero else "above 0"
        most = "" if math.isinf(high) else f" and at most {high:g}"
        _refuse(path, key, value, f"be {least}{most}, {what}", f"{key.rpartition('.')[2]}: {_usual(unit)}")
    return float(value)


def _usual(unit: str) -> str:
    return {"ranks": "8", "share": "0.2", "numbers": "64", "s": "1.0e-5"}.get(unit, "1.0e+11")


def _check_keys(path: Path, prefix: str, content: Mapping[Any, Any], known: tuple[str, ...]) -> None:
    for key in content:
        if key not in known:
            close = nearest(str(key), known)
            advice = f"Did you mean {prefix}{close}?" if close else f"Use one of {', '.join(known)}."
            raise ConfigError(f"{path}: {prefix}{key} ({show(content[key])}) is not a known key. {advice}")


def _refuse(path: Path, key: str, value: Any, rule: str, example: str) -> NoReturn:
    raise ConfigError(f"{path}: {key} ({show(value)}) must {rule}. Try {example}.")


def hardware_yaml(hardware: Hardware) -> str:
    """Return the YAML text of a hardware file, which `load_hardware` can read."""
    figures = {
        name: {key: value for key, value in asdict(hardware.figures[name]).items() if value is not None}
        for name in FIGURES
    }
    errors = [dict(error) for error in hardware.errors]
    content = {"kind": hardware.kind, "about": hardware.about, "figures": figures, "errors": errors}
    return str(yaml.safe_dump(content, sort_keys=False, width=120))
