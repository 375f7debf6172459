"""The files of a run's folder that grow while it trains, as a checkpoint found them: their length, and what was in
them. A resume compares, so that damage to them is named.

A byte is hashed once in a process, however often a checkpoint is written. Files are only appended to, but where a run
goes back to an older checkpoint (training/resilience/recovery.py): then `forget`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

# As glob has them: the metrics, the events, the plans of placement, the traces of routing.
GROWING = ("metrics.jsonl", "events.jsonl", "placement_*.plans", "routing*.trace")
# Written anew as a whole: a checkpoint knows that they are there. They hold a checksum of themselves.
SUMMED = ("experts_chosen.json", "layout_chosen.json", "skipped_samples.json")
BLOCK = 1 << 22  # bytes that are read at once


@dataclass
class _Hashed:
    size: int
    digest: Any  # of xxhash, of the first `size` bytes


class GrowingFiles:
    """The growing files of a run's folder, as far as they have been hashed."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._hashed: dict[str, _Hashed] = {}

    def sums(self) -> dict[str, dict[str, Any]]:
        """Size in bytes and XXH3 (128 bits) of each file as it is now, by name; what grows meanwhile counts or not. A
        file that cannot be read is left out: whoever writes it says so."""
        found: dict[str, dict[str, Any]] = {}
        for path in sorted({path for pattern in GROWING for path in self._run_dir.glob(pattern)}):
            try:
                size = path.stat().st_size
                hashed = self._hashed.get(path.name)
                if hashed is None or hashed.size > size:
                    hashed = self._hashed[path.name] = _Hashed(0, xxhash.xxh3_128())
                _update(hashed, path, size)
            except OSError:
                self._hashed.pop(path.name, None)
                continue
            found[path.name] = {"size": hashed.size, "xxh3": hashed.digest.hexdigest()}
        return found | {name: {"size": 0} for name in SUMMED if (self._run_dir / name).exists()}

    def forget(self) -> None:
        """Hash all again: the run has taken lines off the files."""
        self._hashed.clear()


def changed(run_dir: Path, sums: dict[str, dict[str, Any]]) -> list[str]:
    """Describe each file that does not begin with what a checkpoint found in it, in a few words each; `sums` as it
    kept them."""
    found = []
    for name, entry in sums.items():
        path = run_dir / name
        try:
            size = path.stat().st_size
            if size < entry["size"]:
                found.append(f"{name} has {size:,} of its {entry['size']:,} bytes")
            elif entry["size"]:
                hashed = _Hashed(0, xxhash.xxh3_128())
                _update(hashed, path, entry["size"])
                if hashed.digest.hexdigest() != entry["xxh3"]:
                    found.append(f"{name} has other bytes among its first {entry['size']:,}")
        except FileNotFoundError:
            found.append(f"{name} is gone")
        except OSError as error:
            found.append(f"{name} cannot be read ({error.strerror})")
    return found


def _update(hashed: _Hashed, path: Path, size: int) -> None:
    """Hash what a file has up to `size`. Raises OSError."""
    with open(path, "rb") as stream:
        stream.seek(hashed.size)
        while hashed.size < size and (block := stream.read(min(BLOCK, size - hashed.size))):
            hashed.digest.update(block)
            hashed.size += len(block)
