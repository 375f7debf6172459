"""The exception that every package raises for a mistake of the user."""

from __future__ import annotations


class ConfigError(ValueError):
    """A mistake of the user. The message names the field or file, its value, the rule, and what to do."""
