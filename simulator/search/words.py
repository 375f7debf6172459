"""The answer of a search in words."""

from __future__ import annotations

from simulator.search.answer import LayoutAnswer


def text(answer: LayoutAnswer) -> str:
    """Lines for people: the best layout with what to type, the runners-up with why they lose, and the counts."""
    raise NotImplementedError
