"""Wrong values of every key, made from what the schema says of it: for the table test here and for
`benchmarks.checks.wrong_values`."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from omegaconf import DictConfig

from configs.compose import compose_groups
from configs.keys import Key
from configs.overrides import check_override
from configs.schema import Config
from configs.validate import validate
from configs.values import set_values, to_config
from tests.configs import advice

KINDS = ("type", "null", "list", "mapping", "unset variable")  # of every key
UNSET = "MIXTRAIN_TESTS_LEAVE_THIS_UNSET"


class WrongValue(NamedTuple):
    key: str
    kind: str
    written: str  # behind key=


def wrong_values(key: Key) -> Iterator[WrongValue]:
    """Five kinds or more: another type, null, a list, a mapping, an unset variable; a key that is none; what is out of
    range."""
    for kind, written in _written(key):
        yield WrongValue(key.name, kind, written)


def _written(key: Key) -> Iterator[tuple[str, str]]:
    is_text = str in key.kinds and not key.choices
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


def presets_of(model: str) -> DictConfig:
    """The composed presets of a model, to take overrides on."""
    return compose_groups([check_override(f"model={model}", None)])


def take(presets: DictConfig, overrides: Sequence[str], world_size: int = 1) -> Config:
    """The command line's path from overrides to a checked config. Raises ConfigError."""
    composed = copy.deepcopy(presets)
    config = to_config(composed, set_values(composed, [check_override(text, None) for text in overrides]))
    validate(config, world_size)
    return config


def fault(wrong: WrongValue, message: str) -> str:
    """Return the fault of a message about a wrong value; "" if it names key, value and rule and proposes a value."""
    name, _, rest = message.partition(" (")
    value, _, rule = rest.partition(") ")
    written = wrong.written.replace("'", "")
    if name != wrong.key:
        return "does not name the key"
    # numbers are shown as they were read
    if value != written and wrong.kind not in ("range", "huge", "nan", "fraction"):
        return "does not show the value"
    if not rule.startswith("must ") or "\n" in message:
        return "does not say the rule in one line"
    if wrong.kind == "unset variable" and UNSET not in rule:
        return "does not name the variable"
    if wrong.kind == "no key" and "nowhere.at.all" not in rule:
        return "does not name what it refers to"
    fixes = advice.split(message)[1]
    return (
        ""
        if fixes and all(any(advice.key_of(fix) == name for fix in each) for each in fixes)
        else "has no advice for the key"
    )
