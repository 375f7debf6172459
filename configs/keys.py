"""Keys of the schema: type, default, meaning, choices, range, and the effect of a changed value on a resumed run.

`free`, `say`, `refuse` and `architecture` store these properties in the metadata of a dataclass field. `table`
collects all keys in a flat dict, which `--help`, the checks of single values and the tests use.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import operator
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

OnResume = Literal["free", "say", "refuse"]

# Limit of integers without a limit of their own: some rules count up to the value, and a larger one is a typing error.
LARGEST = 2**31 - 1

# Fields of a Key that limit a number: the words for it in a message, and the comparison that must hold.
LIMITS = {
    "low": ("at least", operator.ge),
    "above": ("greater than", operator.gt),
    "high": ("at most", operator.le),
    "below": ("less than", operator.lt),
}
TYPE_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "a text", type(None): "null"}


@dataclass(frozen=True)
class Key:
    """The properties of one configuration key.

    on_resume: the effect on a resumed run of a value that differs from the checkpoint's. free: the results stay the
    same, apart from rounding in a different layout. say: training changes from this step on, which is printed and
    recorded. refuse: the validation documents, or the order or meaning of samples, would change; the run refuses to
    start unless `checkpoint.accept_changes` lists the key. This is the strongest effect that a change can have;
    `changes.on_resume` compares two configurations.
    """

    name: str  # dotted
    type: Any  # the annotation: int, Optional[float], list[int], Any, ...
    default: Any
    meaning: str
    on_resume: OnResume
    choices: tuple[Any, ...] = ()  # (): any value of the type; null is legal as well if the type allows it
    low: float | None = None  # inclusive lower limit of the number, or of each number in a list
    above: float | None = None  # exclusive lower limit
    high: float | None = None  # inclusive upper limit
    below: float | None = None  # exclusive upper limit
    form: str = ""  # description of the legal values if the type is Any
    # determines names, shapes or meaning of the weights: another value is another model, which a resume never accepts
    architecture: bool = False
    # needed to use the trained model, although its weights do not (or not always) depend on it
    stays_with_model: bool = False

    @property
    def of_the_model(self) -> bool:
        """Return whether the key's value belongs to a trained model, not only to its training."""
        return self.architecture or self.stays_with_model

    @property
    def acceptable(self) -> bool:
        """Return whether `checkpoint.accept_changes` may list the key."""
        return self.on_resume == "refuse" and not self.architecture

    @property
    def nullable(self) -> bool:
        """Return whether null is a legal value of the key."""
        return type(None) in self.kinds or (self.type is Any and self.default is None)

    @property
    def kinds(self) -> tuple[Any, ...]:
        """The Python types that a legal value may have."""
        is_union = typing.get_origin(self.type) in (typing.Union, types.UnionType)
        return typing.get_args(self.type) if is_union else (self.type,)

    @property
    def of_items(self) -> Any:
        """The type of the items if the value is a list, else None."""
        return typing.get_args(self.type)[0] if typing.get_origin(self.type) is list else None

    def fresh_default(self) -> Any:
        """Return a copy of the default value."""
        return copy.deepcopy(self.default)

    def kind(self) -> str:
        """Return a description of the type, such as "an integer or null"."""
        if self.type is Any:
            return self.form
        if self.of_items is not None:
            return f"a list of {'integers' if self.of_items is int else 'texts'}"
        return " or ".join(TYPE_NAMES[kind] for kind in self.kinds)

    def rule(self) -> str:
        """Return a description of the legal values that completes "must be" in an error message."""
        null = " or null" if self.nullable else ""
        if self.choices:
            return f"{one_of(self.choices)}{null}"
        limits = self._limits()
        if self.of_items is not None:
            return f"{self.kind()}{f', each {limits}' if limits else ''}"
        first = self.kind().removesuffix(" or null")
        return f"{first}{' of' if limits.startswith('at') else ''} {limits}{null}" if limits else f"{first}{null}"

    def broken_rule(self, value: Any) -> str | None:
        """Return the rule that a value breaks, which completes "must be" in an error message; None if it is legal."""
        if value is None or self.type is Any:
            return None
        values = value if isinstance(value, list) else [value]
        if any(isinstance(item, float) and not math.isfinite(item) for item in values):
            return "a finite number"
        if self.choices and value not in self.choices:
            return one_of(self.choices)
        limits = [(limit, holds) for name, (_, holds) in LIMITS.items() if (limit := getattr(self, name)) is not None]
        if any(isinstance(item, (int, float)) and not holds(item, limit) for item in values for limit, holds in limits):
            return self.rule() if isinstance(value, list) else self._limits()
        if any(isinstance(item, int) and item > LARGEST for item in values):
            return f"at most {LARGEST}"
        return None

    def _limits(self) -> str:
        limits = ((words, getattr(self, name)) for name, (words, _) in LIMITS.items())
        return " and ".join(f"{words} {limit}" for words, limit in limits if limit is not None)


def one_of(choices: tuple[Any, ...]) -> str:
    """Return a list of choices as a phrase: "one of a, b", or just "a" for a single choice."""
    return str(choices[0]) if len(choices) == 1 else f"one of {', '.join(map(str, choices))}"


def _key(on_resume: OnResume, default: Any, meaning: str, **more: Any) -> Any:
    """Return a dataclass field for a configuration key. `more`: further properties of the key, such as its choices and
    limits."""
    metadata = {"meaning": meaning, "on_resume": on_resume, **more}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: copy.deepcopy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


# Constructors of fields, named after the effect of a changed value on a resumed run: `Key.on_resume` explains them.
free = functools.partial(_key, "free")
say = functools.partial(_key, "say")
refuse = functools.partial(_key, "refuse")
architecture = functools.partial(_key, "refuse", architecture=True)


def table(schema: type) -> dict[str, Key]:
    """Return the keys of a dataclass and its nested sections, by dotted name in the order of definition."""
    return {found.name: found for found in _keys(schema, "")}


def get(config: Any, key: str) -> Any:
    """Return the value of a dotted key of a configuration. If a value is a mapping, the rest of the dotted key may be a
    key in it."""
    value: Any = config
    for name in key.split("."):
        value = value[name] if isinstance(value, dict) else getattr(value, name)
    return value


def put(config: Any, key: str, value: Any) -> None:
    """Set the value of a dotted key of a configuration."""
    section, _, last = key.rpartition(".")
    setattr(get(config, section) if section else config, last, value)


def _keys(schema: type, prefix: str) -> Iterator[Key]:
    hints = typing.get_type_hints(schema)
    for item in dataclasses.fields(schema):
        if dataclasses.is_dataclass(hints[item.name]):
            yield from _keys(hints[item.name], f"{prefix}{item.name}.")
        else:
            default = item.default_factory() if callable(item.default_factory) else item.default
            yield Key(name=prefix + item.name, type=hints[item.name], default=default, **item.metadata)
