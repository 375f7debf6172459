"""Sizes and checksums of the run's files that grow during training, as a checkpoint stores them. A resumed run compares
them to detect damage. A byte is hashed once per process, however many checkpoints are written. Files are only appended
to, except when a run returns to an older checkpoint (training/resilience/recovery.py), which calls `forget`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

# Glob patterns: the metrics, the events, the plans of placement, the traces of routing.
GROWING = ("metrics.jsonl", "events.jsonl", "placement_*.plans", "routing*.trace")
# Rewritten as a whole: a checkpoint records that they exist. They contain their own checksum.
SUMMED = ("experts_chosen.json", "layout_chosen.json", "skipped_samples.json")
BLOCK = 1 << 22  # bytes that are read at once


@dataclass
class _Hashed:
    size: int
    digest: Any  # of xxhash, of the first `size` bytes


class GrowingFiles:
    """Hashes the growing files of a run's folder, continuing each file's hash from the last call."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._hashed: dict[str, _Hashed] = {}

    def sums(self) -> dict[str, dict[str, Any]]:
        """Return the current size in bytes and XXH3 (128 bits) of each file, by name. Bytes that are appended meanwhile
        may be missing. A file that cannot be read is left out, because its writer reports the error."""
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
        """Hash all files from the beginning next time, because the run has removed lines from them."""
        self._hashed.clear()


def changed(run_dir: Path, sums: dict[str, dict[str, Any]]) -> list[str]:
    """Return a clause for each file whose first bytes differ from those that the file had when a checkpoint recorded
    `sums`."""
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
                    found.append(f"{name} differs within its first {entry['size']:,} bytes")
        except FileNotFoundError:
            found.append(f"{name} is missing")
        except OSError as error:
            found.append(f"{name} cannot be read ({error.strerror})")
    return found


def _update(hashed: _Hashed, path: Path, size: int) -> None:
    """Continue a file's hash up to byte `size`. Raises OSError."""
    with open(path, "rb") as stream:
        stream.seek(hashed.size)
        while hashed.size < size and (block := stream.read(min(BLOCK, size - hashed.size))):
            hashed.digest.update(block)
            hashed.size += len(block)
