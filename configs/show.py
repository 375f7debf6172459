"""Values as they are written on the command line, and names that a user may have meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


def show(value: Any, width: int | None = 60) -> str:
    """A value as it is written on the command line; a list or mapping of more than `width` characters is cut."""
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
    """Two values that differ: whole where they would be cut to the same words."""
    shown = show(one), show(other)
    return shown if shown[0] != shown[1] else (show(one, None), show(other, None))


def nearest(name: str, names: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The one of `names` that a user who typed `name` most likely meant, if any is near."""
    close = difflib.get_close_matches(name.lower(), list(names), n=1, cutoff=cutoff)
    return close[0] if close else None


def visible(text: str) -> str:
    """A text from a file for a terminal: what is not printable there, such as marks that turn the direction of what
    follows, as an escape."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in text
    )
