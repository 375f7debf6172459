"""Names and paths of the YAML files with hardware figures, from which simulator/clock/hardware.py predicts times."""

from __future__ import annotations

from pathlib import Path

from configs.show import nearest

FOLDER = Path(__file__).resolve().parent / "hardware"
ENDING = ".yaml"


def names() -> list[str]:
    """Return the names of the shipped files of hardware figures, sorted."""
    return sorted(path.stem for path in FOLDER.glob(f"*{ENDING}"))


def find(name: str) -> Path | None:
    """Return the path of the hardware file with this name or path, or None if there is no such file."""
    path = Path(name) if name.endswith(ENDING) else FOLDER / f"{name}{ENDING}"
    return path if path.is_file() and (name.endswith(ENDING) or name in names()) else None


def wrong(name: str) -> tuple[str, str | None] | None:
    """Return the rule that the value of `hardware` breaks (the end of an error message) and the most similar name, if
    any. Returns None if the value is legal."""
    if find(name) is not None:
        return None
    rule = f"must be one of {', '.join(names())}, or the path of an existing {ENDING} file"
    return rule, nearest(Path(name).stem, names()) or nearest(name.partition("_")[0], names(), 0.4)
