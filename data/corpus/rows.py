"""The text of a row: a line of JSON, or a value of a Parquet column."""

from __future__ import annotations

import json
from typing import Any


def json_text(line: bytes, text_key: str) -> tuple[str, str]:
    """The text of a line of JSON, or the reason why there is none."""
    try:
        row = json.loads(line)
    except UnicodeDecodeError as error:
        return "", f"not UTF-8 ({error.reason} at byte {error.start} of the line)"
    except (ValueError, RecursionError) as error:
        return "", f"not JSON ({error})"
    if not isinstance(row, dict):
        return "", f"a JSON {type(row).__name__}, not an object with the field {text_key!r} (data.text_key)"
    if text_key not in row:
        has = ", ".join(map(repr, list(row)[:8])) or "none"
        return "", f"no field {text_key!r} (data.text_key); the line has {has}{other_key(row)}"
    return check_text(row[text_key], text_key)


def other_key(row: dict[str, Any]) -> str:
    """Advice which field or column to take: the longest text of a row that has no data.text_key."""
    texts = {key: value for key, value in row.items() if isinstance(value, str) and value.strip()}
    return f". Try data.text_key={max(texts, key=lambda key: len(texts[key]))}" if texts else ""


def check_text(text: Any, text_key: str) -> tuple[str, str]:
    if isinstance(text, bytes):
        return "", f"{text_key!r} is not UTF-8"
    if not isinstance(text, str):
        return "", f"{text_key!r} is {'null' if text is None else type(text).__name__}, not a text"
    if not text.strip():
        return "", f"{text_key!r} is empty"
    if "\0" in text:
        return "", f"{text_key!r} holds a NUL character"
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return "", f"{text_key!r} holds half of a surrogate pair, which is no character"
    return text, ""
