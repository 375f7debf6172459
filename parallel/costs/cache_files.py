"""Files of measured costs. The module does not import torch, so that planning a run can read them quickly."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

VERSION = 2  # of the file format: raise it when the meaning of a measurement or model changes

logger = logging.getLogger(__name__)


def cache_path(folder: str | os.PathLike[str], key: dict[str, Any]) -> Path:
    """Return the path of the file for measured costs with this key."""
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return Path(folder) / f"costs_{name}.json"


def read_cache(path: Path, key: dict[str, Any]) -> dict[str, Any] | None:
    """Return the measured costs in a file, or None if it is missing or, with a log line, invalid or for another key."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        logger.warning("cannot read measured costs from %s (%s); measuring again", path, error)
        return None
    if not isinstance(content, dict) or not isinstance(content.get("values"), dict):
        logger.warning("the file %s does not contain measured costs; measuring again", path)
    elif content.get("version") != VERSION:
        message = "measured costs in %s have format version %s instead of %d; measuring again"
        logger.warning(message, path, content.get("version"), VERSION)
    elif content.get("key") != json.loads(json.dumps(key)):
        logger.warning("measured costs in %s are for other hardware or settings; measuring again", path)
    elif content.get("digest") != _digest(content["values"]):
        logger.warning("the measured costs in %s are damaged; measuring again", path)
    else:
        return content["values"]
    return None


def write_cache(path: Path, key: dict[str, Any], values: dict[str, Any]) -> None:
    """Write measured costs to a file atomically: readers get the old file or the new one. Failures are only logged."""
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
        logger.warning("cannot write measured costs to %s (%s); the next run measures again", path, error)


def _digest(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
