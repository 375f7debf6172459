"""Keys that earlier versions had and this one has not: what a stored configuration may still say of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from configs.schema import KEYS, ConfigError
from configs.show import show


class DroppedKey(NamedTuple):
    """A key of earlier versions."""

    values: tuple[Any, ...]  # those that a stored config may have: they asked for what is there without the key
    instead: str  # reads on from "is no key any more: "
    example: str  # the key to set


DROPPED = {
    "parallel.context_kind": DroppedKey(
        ("none",),
        "parallel.context says how many ranks share sequences, parallel.context_heads how many of them exchange heads",
        "parallel.context",
    ),
}


def without_dropped(content: Mapping[Any, Any]) -> dict[Any, Any]:
    """A stored configuration less the keys that were dropped since. Raises ConfigError where one has a value that asks
    for something."""
    return _section(content, "")


def _section(content: Mapping[Any, Any], prefix: str) -> dict[Any, Any]:
    kept = {}
    for last, value in content.items():
        name = f"{prefix}{last}"
        if name not in DROPPED:
            kept[last] = _section(value, f"{name}.") if isinstance(value, Mapping) else value
        elif value not in DROPPED[name].values:
            example = DROPPED[name].example
            allowed = " or ".join(map(show, DROPPED[name].values))
            raise ConfigError(
                f"{name} ({show(value)}) must be {allowed} in a configuration of an earlier version; "
                f"{DROPPED[name].instead}. Try {example}={show(KEYS[example].default)} in its place."
            )
    return kept
