"""Formatting of values as on the command line, and search for the name that a mistyped one resembles."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


def show(value: Any, width: int | None = 60) -> str:
    """Return a value in the form of the command line. A list or mapping longer than `width` characters is shortened."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if not isinstance(value, (list, dict)):
        return str(value)
    if isinstance(value, list):
        text = f"[{','.join(show(item, None) for item in value)}]"
    else:
        text = "{" + ", ".join(f"{key}: {show(item, None)}" for key, item in value.items()) + "}"
    return text if width is None or len(text) <= width else f"{text[: width - 10]}...{text[-1]}"


def show_both(one: Any, other: Any) -> tuple[str, str]:
    """Return two different values as texts, which are shortened only if they then still differ."""
    shown = show(one), show(other)
    return shown if shown[0] != shown[1] else (show(one, None), show(other, None))


def nearest(name: str, names: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the entry of `names` that is most similar to a mistyped name, or None if none is similar."""
    close = difflib.get_close_matches(name.lower(), list(names), n=1, cutoff=cutoff)
    return close[0] if close else None


def visible(text: str) -> str:
    """Return a text for printing, with unprintable characters (such as direction marks) escaped."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in text
    )
