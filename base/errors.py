"""The exception that every package raises for a mistake of the user."""

from __future__ import annotations


class ConfigError(ValueError):
    """A mistake of the user. The message names the field, its value, the rule and a value that works."""
