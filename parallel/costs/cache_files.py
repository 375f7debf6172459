"""Files of measured costs. The module does not import torch, so that a plan can read them quickly."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

VERSION = 2  # of the files: raise it when a measurement or a model changes its meaning

logger = logging.getLogger(__name__)


def cache_path(folder: str | os.PathLike[str], key: dict[str, Any]) -> Path:
    """Return the path of a key's file."""
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return Path(folder) / f"costs_{name}.json"


def read_cache(path: Path, key: dict[str, Any]) -> dict[str, Any] | None:
    """Return the values in a file; None if it is missing or, with a log line, if `write_cache` did not write it."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        logger.warning("cannot read measured costs from %s (%s); measuring again", path, error)
        return None
    if not isinstance(content, dict) or not isinstance(content.get("values"), dict):
        logger.warning("%s holds no measured costs; measuring again", path)
    elif content.get("version") != VERSION:
        logger.warning(
            "%s has version %s of measured costs, not %d; measuring again", path, content.get("version"), VERSION
        )
    elif content.get("key") != json.loads(json.dumps(key)):
        logger.warning("%s holds measured costs of something else; measuring again", path)
    elif content.get("digest") != _digest(content["values"]):
        logger.warning("the measured costs in %s are damaged; measuring again", path)
    else:
        return content["values"]
    return None


def write_cache(path: Path, key: dict[str, Any], values: dict[str, Any]) -> None:
    """Write values atomically: readers find the old file or the new one. Failures are logged, not raised."""
    content = {"version": VERSION, "key": key, "values": values, "digest": _digest(values)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=path.parent, prefix=path.stem, suffix=".tmp", delete=False
        ) as file:
            json.dump(content, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.replace(file.name, path)
    except OSError as error:
        logger.warning("cannot keep measured costs in %s (%s); the next run measures again", path, error)


def _digest(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
