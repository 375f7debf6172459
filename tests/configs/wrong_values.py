"""Wrong values of every key, made from what the schema says of it: for the table test here and for `benchmarks.wrong_values`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from configs.keys import Key
from configs.schema import KEYS

UNSET = "MIXTRAIN_TESTS_LEAVE_THIS_UNSET"


class WrongValue(NamedTuple):
    key: str
    kind: str
    written: str  # behind key=


def wrong_values(key: Key) -> Iterator[WrongValue]:
    """Five kinds or more: another type, null, a list, a mapping, an unset variable; a key that is none; what is out of range."""
    for kind, written in _written(key):
        yield WrongValue(key.name, kind, written)


def _written(key: Key) -> Iterator[tuple[str, str]]:
    is_text = str in key.kinds and not key.choices and not key.needed_for
    yield "type", "[3]" if is_text else "''" if key.name == "data.corpus" else "some words"
    if not key.nullable:
        yield "null", "null"
    takes_lists = key.of_items is not None or key.type is Any
    yield "list", "[[1],[2]]" if takes_lists else "[1,2]"
    yield "mapping", "{a: 1}"
    yield "unset variable", f"${{oc.env:{UNSET}}}"
    yield "no key", "${nowhere.at.all}"
    yield "itself", f"${{{key.name}}}"
    if key.choices:
        yield "choice", f"{key.choices[0]}x"
    if key.low is not None:
        yield "range", _item(key, key.low - 1)
    if key.above is not None:
        yield "range", _item(key, key.above)
    if key.high is not None:
        yield "range", _item(key, key.high + 1)
    if key.below is not None:
        yield "range", _item(key, key.below)
    if float in key.kinds:
        yield "nan", "nan"
    if key.of_items is int or int in key.kinds:
        yield "huge", _item(key, 10**30)
        yield "fraction", _item(key, 1.5)
    if bool in key.kinds:
        yield "number", "2"


def _item(key: Key, value: float) -> str:
    return f"[{value}]" if key.of_items else str(value)


ALL = [wrong for key in KEYS.values() for wrong in wrong_values(key)]
