"""The error for a file of a corpus that cannot be read."""

from __future__ import annotations

from pathlib import Path

from base.errors import ConfigError


def unreadable(path: str | Path, error: OSError) -> ConfigError:
    """Return the ConfigError for a corpus file that the system could not open or read."""
    reason = error.strerror or error
    return ConfigError(f"data.corpus: {path} cannot be read: {reason}. Check the file and its permissions")
