"""Results of the rungs: one JSON object per line, the last good result for each rung and kind of card.

A rung whose last attempt did not end well has a second line for it. The file is rewritten each time, completely or not
at all, so a process that is killed keeps all earlier results.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from base import files
from base.errors import ConfigError

STARTED, WELL, PARTLY, FAILED, LATE = "begun", "well", "partly", "failed", "late"
STATUSES = (STARTED, WELL, PARTLY, FAILED, LATE)


@dataclasses.dataclass(frozen=True)
class Record:
    """One attempt at a rung.

    Attributes:
        rung: its name.
        card: the kind of card, as `kind_of_card` calls it.
        status: one of STATUSES; `begun` until it ends, and for ever where its process was killed.
        code: digest of the files and of the model that the rung depends on, and of torch's version.
        commit: of the working tree, with `+` where that had changes.
        date: UTC day.
        seconds: that it took, or had taken when its last row came.
        machine: driver, versions of torch, CUDA and Python, memory.
        rows: figures; the keys depend on the rung.
        note: the reason where it did not end well, or what the figures leave out.
        renews: the commit whose figures these replace.
    """

    rung: str
    card: str
    status: str
    code: str
    commit: str
    date: str
    seconds: float = 0.0
    machine: dict[str, Any] = dataclasses.field(default_factory=dict)
    rows: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    note: str = ""
    renews: str | None = None


class Records:
    """The file of results."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError for a path where no such file can be, and naming the line where the file holds something
        else."""
        self.path = path
        self._records: list[Record] = []
        folder = next(each for each in path.parents if each.exists())
        if not folder.is_dir():
            raise ConfigError(f"--results ({path.parent}) must be a folder, and {folder} is a file. Give another.")
        if path.is_symlink() and not path.exists() or path.exists() and not path.is_file():
            raise ConfigError(f"{path} is no regular file, which results are kept in. Move it away.")
        try:
            lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} cannot be read as results of rungs ({error}). Move the file away.") from None
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                self._records.append(_read(line))
            except (ValueError, TypeError, RecursionError) as error:
                raise ConfigError(
                    f"line {number} of {path} is no result of a rung as this version writes it ({error}). Move the "
                    "file away, or take the line out."
                ) from None

    def __iter__(self) -> Any:
        return iter(self._records)

    def result(self, rung: str, card: str) -> Record | None:
        """Return the last good result."""
        return self._one(rung, card, (WELL,))

    def attempt(self, rung: str, card: str) -> Record | None:
        """Return the attempt after the last good result, which did not end well."""
        return self._one(rung, card, (STARTED, PARTLY, FAILED, LATE))

    def put(self, record: Record) -> None:
        """Write an attempt, while it runs, over the rung's earlier one; a good one also over the result before it.
        Raises WriteError."""
        before = self.result(record.rung, record.card)
        if record.status == WELL and before is not None:
            record = dataclasses.replace(record, renews=before.commit)
        replaced = {id(self.attempt(record.rung, record.card))}
        if record.status == WELL:
            replaced.add(id(before))
        kept = [other for other in self._records if id(other) not in replaced]
        self._records = [*kept, record]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        files.write_text(self.path, "".join(f"{json.dumps(dataclasses.asdict(each))}\n" for each in self._records))

    def _one(self, rung: str, card: str, statuses: Iterable[str]) -> Record | None:
        found = [each for each in self._records if (each.rung, each.card) == (rung, card) and each.status in statuses]
        return found[-1] if found else None


def _read(line: str) -> Record:
    """Return the record of a line. Raises ValueError or TypeError for a line that is no record."""
    content = json.loads(line)
    if not isinstance(content, dict):
        raise ValueError("it is no JSON object")
    record = Record(**content)
    for field in dataclasses.fields(Record):
        value, kind = getattr(record, field.name), _KINDS.get(field.name, str)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ValueError(f"{field.name} ({value!r}) is of another kind")
    if record.status not in STATUSES:
        raise ValueError(f"status ({record.status!r}) must be one of {', '.join(STATUSES)}")
    if not all(isinstance(row, dict) for row in record.rows):
        raise ValueError("rows must be JSON objects")
    return record


_KINDS: dict[str, Any] = {"seconds": (int, float), "machine": dict, "rows": list, "renews": (str, type(None))}


def kind_of_card(device: str, is_small: bool) -> str:
    """Return the name under which results of a device are kept; those of tiny sizes have a name of their own."""
    return f"{device}, tiny sizes" if is_small else device
