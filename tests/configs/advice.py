"""Reading the advice of an error message back, so that tests can take it."""

from __future__ import annotations

import re
import shlex


def split(line: str) -> tuple[str, list[list[str]]]:
    """Return the field that a message starts with, and each alternative after "Try" as a list of overrides or
    [WORLD_SIZE=n]."""
    found = re.search(r"^(?:.*config error: )?(.*?)[ =].*?(?: Try (.*))?$", line.strip())
    assert found, line
    alternatives = []
    for alternative in re.split(r",? or (?=\S)", (found[2] or "").rstrip(".")):
        assert not re.match(r"(null|true|false)\b", alternative), f"a value without its key cannot be typed: {line}"
        processes = re.match(r"(\d+) processes", alternative)
        overrides = [f"WORLD_SIZE={processes[1]}"] if processes else []
        overrides += [word for word in shlex.split(alternative) if re.match(r"[\w./]+=", word)]
        if overrides:
            alternatives.append(overrides)
    return found[1], alternatives


def key_of(override: str) -> str:
    """The key or group of an override, without its + or ~, also as a message starts with it."""
    return override.partition("=")[0].strip("+~:")
