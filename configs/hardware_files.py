"""Names and paths of files with hardware figures, which simulator/clock/hardware.py reads."""

from __future__ import annotations

from pathlib import Path

from configs.show import nearest

FOLDER = Path(__file__).resolve().parent / "hardware"
ENDING = ".yaml"


def names() -> list[str]:
    """Return the names of the files of configs/hardware."""
    return sorted(path.stem for path in FOLDER.glob(f"*{ENDING}"))


def find(name: str) -> Path | None:
    """Return the file of a name or path; None if there is none."""
    path = Path(name) if name.endswith(ENDING) else FOLDER / f"{name}{ENDING}"
    return path if path.is_file() and (name.endswith(ENDING) or name in names()) else None


def wrong(name: str) -> tuple[str, str | None] | None:
    """Return the broken rule of a wrong name, to follow it in a message, and the nearest name; None if correct."""
    if find(name) is not None:
        return None
    rule = f"must be one of {', '.join(names())}, or the path of a {ENDING} file that is there"
    return rule, nearest(Path(name).stem, names()) or nearest(name.partition("_")[0], names(), 0.4)
