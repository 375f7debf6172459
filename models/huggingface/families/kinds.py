"""Kinds of JSON values in a config.json."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Kind:
    """A kind of JSON value. `rule` completes the phrase "must be"."""

    rule: str
    fits: Callable[[Any], bool]


def _is_whole(value: Any) -> bool:
    return type(value) is int and abs(value) < 2**63


def _is_number(value: Any) -> bool:
    return type(value) is float and math.isfinite(value) or _is_whole(value)


ANYTHING = Kind("anything", lambda value: True)
FLAG = Kind("true or false", lambda value: type(value) is bool)
TEXT = Kind("a text", lambda value: isinstance(value, str))
TEXTS = Kind("a list of texts", lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value))
OBJECT = Kind("an object", lambda value: isinstance(value, dict))
CODE = Kind(
    "an object with the names of classes",
    lambda value: OBJECT.fits(value) and all(isinstance(item, str | list) for item in value.values()),
)
LABELS = Kind(
    "an object with numbers as keys", lambda value: OBJECT.fits(value) and all(str(key).isdecimal() for key in value)
)
COUNT = Kind("a whole number from 1 to 2147483647", lambda value: _is_whole(value) and 1 <= value < 2**31)
LAYERS = Kind("a whole number from 1 to 10000", lambda value: _is_whole(value) and 1 <= value <= 10_000)
INDEX = Kind("a whole number from 0 to 2147483647", lambda value: _is_whole(value) and 0 <= value < 2**31)
INDICES = Kind("a list of whole numbers from 0", lambda value: isinstance(value, list) and all(map(INDEX.fits, value)))
TOKEN = Kind("a token id", _is_whole)
TOKENS = Kind(
    "a token id or a list of token ids",
    lambda value: all(map(_is_whole, value if isinstance(value, list) else [value])),
)
NUMBER = Kind("a number", _is_number)
POSITIVE = Kind("a number above 0", lambda value: _is_number(value) and value > 0)
PROBABILITY = Kind("a number of at least 0 and less than 1", lambda value: _is_number(value) and 0 <= value < 1)
# transformers 5 refuses whole numbers for these.
REAL = Kind("a number with a decimal point", lambda value: type(value) is float and math.isfinite(value))
POSITIVE_REAL = Kind("a number above 0 with a decimal point", lambda value: REAL.fits(value) and value > 0)
SPREAD = Kind("a number from 0 to 1 with a decimal point", lambda value: REAL.fits(value) and 0 <= value <= 1)


def or_null(kind: Kind) -> Kind:
    """Return a kind of JSON value that accepts null in addition to `kind`."""
    return Kind(f"{kind.rule}, or null", lambda value: value is None or kind.fits(value))
