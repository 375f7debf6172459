"""What the schema says of each key beside its type and default: meaning, choices, range, and what a change means to a
run.

`key` puts it into a dataclass field's metadata, `table` reads it back as one flat table. `--help`, the checks of single
values and the tests' tables of wrong and of changed values come from it.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

OnResume = Literal["free", "say", "refuse"]

# of integers without a limit of their own: what is beyond is a slip of the hand, and rules count up to a value
LARGEST = 2**31 - 1

WORDS = {int: "an integer", float: "a number", bool: "true or false", str: "a text", type(None): "null"}


@dataclass(frozen=True)
class Key:
    """One key of the schema.

    on_resume says what it means when a run goes on with another value than its checkpoint's config has:
    free: the same is computed, but for what a layout may change. say: what is trained from here on changes; it is said
    and recorded. refuse: validation documents, the order of samples or their meaning would move; refused unless
    `checkpoint.accept_changes` lists the key. It is the most that a change may mean: `changes.on_resume` weighs two
    configurations.
    """

    name: str  # dotted
    type: Any  # the annotation: int, Optional[float], list[int], Any, ...
    default: Any
    meaning: str
    on_resume: OnResume
    choices: tuple[Any, ...] = ()  # () is: any value of the type, and null counts beside them where the type allows it
    low: float | None = None  # of a number, or of each number of a list
    above: float | None = None  # the same, not included
    high: float | None = None
    below: float | None = None
    form: str = ""  # what a value of a key of type Any looks like
    # names, shapes or meaning of the weights: another value is another model, which nothing accepts
    architecture: bool = False
    # no weight depends on it, or not always, but whoever uses the trained model asks for it
    stays_with_model: bool = False

    @property
    def of_the_model(self) -> bool:
        """Whether the value belongs to a trained model, and not to how it was trained."""
        return self.architecture or self.stays_with_model

    @property
    def acceptable(self) -> bool:
        """Whether `checkpoint.accept_changes` may list the key."""
        return self.on_resume == "refuse" and not self.architecture

    @property
    def nullable(self) -> bool:
        """Whether null is a value of the key."""
        return type(None) in self.kinds or (self.type is Any and self.default is None)

    @property
    def kinds(self) -> tuple[Any, ...]:
        """The types that a value may have."""
        is_union = typing.get_origin(self.type) in (typing.Union, types.UnionType)
        return typing.get_args(self.type) if is_union else (self.type,)

    @property
    def of_items(self) -> Any:
        """The type of the items of a key that takes a list; else None."""
        return typing.get_args(self.type)[0] if typing.get_origin(self.type) is list else None

    def fresh_default(self) -> Any:
        """The default, for the caller to keep."""
        return copy.deepcopy(self.default)

    def kind(self) -> str:
        """The type in words."""
        if self.type is Any:
            return self.form
        if self.of_items is not None:
            return f"a list of {'integers' if self.of_items is int else 'texts'}"
        return " or ".join(WORDS[kind] for kind in self.kinds)

    def rule(self) -> str:
        """What a value must be, in words that read on from "must be"."""
        null = " or null" if self.nullable else ""
        if self.choices:
            return f"{one_of(self.choices)}{null}"
        limits = self._limits()
        if self.of_items is not None:
            return f"{self.kind()}{f', each {limits}' if limits else ''}"
        first = self.kind().removesuffix(" or null")
        return f"{first}{' of' if limits.startswith('at') else ''} {limits}{null}" if limits else f"{first}{null}"

    def broken_rule(self, value: Any) -> str | None:
        """What a value of the right type must be and is not, in words that read on from "must be"; None for a legal
        value."""
        if value is None or self.type is Any:
            return None
        values = value if isinstance(value, list) else [value]
        if any(isinstance(item, float) and not math.isfinite(item) for item in values):
            return "a finite number"
        if self.choices and value not in self.choices:
            return one_of(self.choices)
        if any(isinstance(item, (int, float)) and not self._within(item) for item in values):
            return self.rule() if isinstance(value, list) else self._limits()
        if any(isinstance(item, int) and item > LARGEST for item in values):
            return f"at most {LARGEST}"
        return None

    def _within(self, value: float) -> bool:
        return (
            (self.low is None or value >= self.low)
            and (self.above is None or value > self.above)
            and (self.high is None or value <= self.high)
            and (self.below is None or value < self.below)
        )

    def _limits(self) -> str:
        words = (
            ("at least", self.low),
            ("greater than", self.above),
            ("at most", self.high),
            ("less than", self.below),
        )
        return " and ".join(f"{word} {limit}" for word, limit in words if limit is not None)


def one_of(choices: tuple[Any, ...]) -> str:
    """Choices in words."""
    return str(choices[0]) if len(choices) == 1 else f"one of {', '.join(map(str, choices))}"


def key(
    default: Any, meaning: str, on_resume: OnResume | None = None, *, architecture: bool = False, **more: Any
) -> Any:
    """A dataclass field with what `Key` says of it; `architecture` alone is a key that a resume refuses."""
    assert (on_resume is None) == architecture, "on_resume, or architecture"
    metadata = {"meaning": meaning, "on_resume": on_resume or "refuse", "architecture": architecture, **more}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: copy.deepcopy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def table(schema: type) -> dict[str, Key]:
    """Every key of a dataclass whose fields are keys or sections, by dotted name, in their order."""
    return {found.name: found for found in _keys(schema, "")}


def get(config: Any, key: str) -> Any:
    """The value at a dotted key of a config, or of a mapping that is such a value."""
    value: Any = config
    for part in key.split("."):
        value = value[part] if isinstance(value, dict) else getattr(value, part)
    return value


def put(config: Any, key: str, value: Any) -> None:
    """Set the value at a dotted key of a config."""
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
