"""The exception that every package raises for a mistake of the user."""

from __future__ import annotations


class ConfigError(ValueError):
    """A mistake of the user. The message names the field or file, its value, the rule, and what to do."""


def reason_of(error: Exception) -> str:
    """Return why content of a file was not as expected, as a clause: the key that it lacks, else the error's text."""
    return f"it lacks {error}" if isinstance(error, KeyError) else f"{type(error).__name__}: {error}"
