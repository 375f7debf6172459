"""Files of measured costs. torch is not imported here, so that a plan can read them in a moment."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

VERSION = 2  # of what the files hold: raise it when a measurement or a model changes its meaning

logger = logging.getLogger(__name__)


def cache_path(folder: str | os.PathLike[str], key: dict[str, Any]) -> Path:
    """The file of a key."""
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return Path(folder) / f"costs_{name}.json"


def read_cache(path: Path, key: dict[str, Any]) -> dict[str, Any] | None:
    """The values in a file; None if there is none, or, with a line in the log, if it is not what `write_cache`
    wrote."""
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
    """Write so that a reader finds the old file or the new one, whole. A folder that cannot be written to costs a line
    in the log."""
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
