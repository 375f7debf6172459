"""Files of hardware's figures: read from configs/hardware or a path, and made for others to read.

A file is a mapping: `kind` (cuda or cpu), `about` (one line), `figures` (each of simulator/clock/hardware.py's
FIGURES, with `value`, `source` and, where a fit changed it, `stated`) and `errors` (a list of what back-tests found).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import yaml

from configs import hardware_files
from configs.presets import read_mapping
from configs.schema import ConfigError
from configs.show import nearest, show
from simulator.clock.hardware import FIGURES, KINDS, Figure, Hardware

KEYS = ("kind", "about", "figures", "errors")
FIGURE_KEYS = ("value", "source", "stated")
COUNTS = ("ranks",)  # units of whole numbers
MAY_BE_ZERO = ("disk.memory", "disk.read", "disk.write", "products.tile", "launch.exposed")  # and every time
# Part of a card's name, as its driver gives it, and the file of the machine that has it. The first that is found.
CARDS = {
    "GB200": "gb200",
    "GH200": "gh200",
    "H200": "h200_8x",
    "H100": "h100_8x",
    "A100-SXM": "a100_8x",
}


def load(name_or_path: str) -> Hardware:
    """A machine by the name of its file in configs/hardware, or by the path of a .yaml file.

    Raises:
        ConfigError: where there is no such file; for a key that is unknown or missing, a figure without a source, or a
        value out of its unit's range, in one line that names file and key.
    """
    if (wrong := hardware_files.wrong(name_or_path)) is not None:
        rule, close = wrong
        tried = f"hardware={close or hardware_files.names()[0]}"
        raise ConfigError(f"hardware ({show(name_or_path)}) {rule}. Try {tried}.")
    path = hardware_files.find(name_or_path)
    assert path is not None
    return checked(read_mapping(path), path)


def of_card(name: str) -> str | None:
    """The file of the machine that has a card of this name, such as "NVIDIA H100 80GB HBM3"; None where none has."""
    return next((file for part, file in CARDS.items() if part in name), None)


def checked(content: Mapping[Any, Any], path: Path) -> Hardware:
    """The machine that a file's mapping describes. Raises ConfigError as `load` does."""
    _only(path, "", content, KEYS)
    kind = content.get("kind")
    if kind not in KINDS:
        _refuse(path, "kind", kind, f"be one of {', '.join(KINDS)}", "kind: cuda")
    about, errors = content.get("about"), content.get("errors", [])
    if not isinstance(about, str) or not about.strip():
        _refuse(path, "about", about, "say in a line which machine this is", "about: eight cards in a node")
    if not isinstance(errors, list) or not all(isinstance(error, Mapping) for error in errors):
        _refuse(path, "errors", errors, "be a list of mappings, as python -m simulator.fit writes them", "errors: []")
    found = content.get("figures")
    if not isinstance(found, Mapping):
        _refuse(path, "figures", found, "be a mapping of figures to value and source", "a copy of another file's")
    _only(path, "figures.", found, tuple(FIGURES))
    for name, (unit, meaning, _) in FIGURES.items():
        if name not in found:
            raise ConfigError(
                f"{path}: figures.{name} ({meaning}, in {unit}) is missing. Give its value and source, as the files "
                f"of {hardware_files.FOLDER.name} do."
            )
    figures = {name: _figure(path, name, found[name]) for name in FIGURES}
    return Hardware(path.stem, kind, about, figures, tuple(dict(error) for error in errors))


def _figure(path: Path, name: str, content: Any) -> Figure:
    key, unit = f"figures.{name}", FIGURES[name][0]
    if not isinstance(content, Mapping):
        _refuse(path, key, content, "have a value and a source", "{value: 1.0e+9, source: datasheet}")
    _only(path, f"{key}.", content, FIGURE_KEYS)
    source = content.get("source")
    if not isinstance(source, str) or not source.strip():
        _refuse(path, f"{key}.source", source, "say where the value is from", "source: datasheet")
    value = _number(path, f"{key}.value", name, unit, content.get("value"))
    stated = content.get("stated")
    return Figure(value, source, None if stated is None else _number(path, f"{key}.stated", name, unit, stated))


def _number(path: Path, key: str, name: str, unit: str, value: Any) -> float:
    """A figure's value, in the range of its unit."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        _refuse(path, key, value, f"be a number, in {unit}", f"{key.rpartition('.')[2]}: {_usual(unit)}")
    zero = name in MAY_BE_ZERO or unit == "s" or unit.startswith("s ")
    low, high = (0.0, 1.0) if unit == "share" else (0.0, math.inf)
    if unit == "s":
        high = 60.0  # what is more was given in another unit
    if unit in ("FLOP/s", "bytes/s") and not zero or unit in ("FLOP/s", "bytes/s") and value > 0:
        low = 1e5  # what is less was given in another unit
    if unit in COUNTS and value != int(value) or not low <= value <= high or value == 0 and not zero:
        what = f"a whole number, in {unit}" if unit in COUNTS else f"in {unit}"
        least = "at least 0" if zero and low == 0 else f"at least {low:g}" if low else "above 0"
        most = "" if math.isinf(high) else f" and at most {high:g}"
        _refuse(path, key, value, f"be {least}{most}, {what}", f"{key.rpartition('.')[2]}: {_usual(unit)}")
    return float(value)


def _usual(unit: str) -> str:
    return {"ranks": "8", "share": "0.2", "numbers": "64", "s": "1.0e-5"}.get(unit, "1.0e+11")


def _only(path: Path, prefix: str, content: Mapping[Any, Any], known: tuple[str, ...]) -> None:
    for key in content:
        if key not in known:
            close = nearest(str(key), known)
            advice = f"Did you mean {prefix}{close}" if close else f"There are {', '.join(known)}"
            raise ConfigError(f"{path}: {prefix}{key} ({show(content[key])}) must be a known key. {advice}.")


def _refuse(path: Path, key: str, value: Any, rule: str, example: str) -> NoReturn:
    raise ConfigError(f"{path}: {key} ({show(value)}) must {rule}. Try {example}.")


def as_yaml(hardware: Hardware) -> str:
    """The text of a file that `load` reads back."""
    figures: dict[str, dict[str, Any]] = {}
    for name in FIGURES:
        figure = hardware.figures[name]
        figures[name] = {"value": figure.value, "source": figure.source}
        if figure.stated is not None:
            figures[name]["stated"] = figure.stated
    content = {
        "kind": hardware.kind,
        "about": hardware.about,
        "figures": figures,
        "errors": [dict(error) for error in hardware.errors],
    }
    return str(yaml.safe_dump(content, sort_keys=False, width=120))
