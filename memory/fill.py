"""Which tier each record lies in. Pure, and without torch: the plan of a run asks it too."""

from __future__ import annotations

from collections.abc import Sequence


def fill(sizes: Sequence[int], rooms: Sequence[tuple[str, float]]) -> list[str] | None:
    """A tier's name for each record, in the order of first use: `rooms` are the tiers from fast to slow, with the bytes
    that each has left. Whole records; those used last leave a fast tier first. None where they do not fit."""
    left = iter(rooms)
    tier, room = next(left)
    filled = []
    for size in sizes:
        while size > room:
            following = next(left, None)
            if following is None:
                return None
            tier, room = following
        room -= size
        filled.append(tier)
    return filled
