"""Keys of the schema: type, default, meaning, choices, range, and the effect of a changed value on a resumed run.

`key` stores them in a dataclass field's metadata, `table` collects them into one flat table. `--help`, the checks of
single values and the tests' tables of wrong and of changed values use it.
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

# of integers without a limit of their own: rules count up to a value, and a larger one is a typing error
LARGEST = 2**31 - 1

TYPE_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "a text", type(None): "null"}


@dataclass(frozen=True)
class Key:
    """One key of the schema.

    on_resume is the effect of resuming with another value than the checkpoint's:
    free: the same is computed, apart from rounding in another layout. say: training changes from this step on, which is
    printed and recorded. refuse: validation documents, or the order or meaning of samples, would change; refused unless
    `checkpoint.accept_changes` lists the key. It is an upper bound: `changes.on_resume` compares two configurations.
    """

    name: str  # dotted
    type: Any  # the annotation: int, Optional[float], list[int], Any, ...
    default: Any
    meaning: str
    on_resume: OnResume
    choices: tuple[Any, ...] = ()  # (): any value of the type; null is legal as well if the type allows it
    low: float | None = None  # of a number, or of each number of a list
    above: float | None = None  # the same, not included
    high: float | None = None
    below: float | None = None
    form: str = ""  # description of a value of type Any
    # decides names, shapes or meaning of the weights: another value is another model, which is never accepted
    architecture: bool = False
    # weights do not, or not always, depend on it, but users of the trained model need it
    stays_with_model: bool = False

    @property
    def of_the_model(self) -> bool:
        """Whether the value belongs to a trained model rather than to its training."""
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
        """The types of a legal value."""
        is_union = typing.get_origin(self.type) in (typing.Union, types.UnionType)
        return typing.get_args(self.type) if is_union else (self.type,)

    @property
    def of_items(self) -> Any:
        """The type of the items if the value is a list, else None."""
        return typing.get_args(self.type)[0] if typing.get_origin(self.type) is list else None

    def fresh_default(self) -> Any:
        """Return a copy of the default."""
        return copy.deepcopy(self.default)

    def kind(self) -> str:
        """Return a description of the type."""
        if self.type is Any:
            return self.form
        if self.of_items is not None:
            return f"a list of {'integers' if self.of_items is int else 'texts'}"
        return " or ".join(TYPE_NAMES[kind] for kind in self.kinds)

    def rule(self) -> str:
        """Return the rule for a value, to follow "must be" in a message."""
        null = " or null" if self.nullable else ""
        if self.choices:
            return f"{one_of(self.choices)}{null}"
        limits = self._limits()
        if self.of_items is not None:
            return f"{self.kind()}{f', each {limits}' if limits else ''}"
        first = self.kind().removesuffix(" or null")
        return f"{first}{' of' if limits.startswith('at') else ''} {limits}{null}" if limits else f"{first}{null}"

    def broken_rule(self, value: Any) -> str | None:
        """Return the rule that a value of the right type breaks, to follow "must be"; None for a legal one."""
        if value is None or self.type is Any:
            return None
        values = value if isinstance(value, list) else [value]
        if any(isinstance(item, float) and not math.isfinite(item) for item in values):
            return "a finite number"
        if self.choices and value not in self.choices:
            return one_of(self.choices)
        if any(isinstance(item, (int, float)) and not self._is_within(item) for item in values):
            return self.rule() if isinstance(value, list) else self._limits()
        if any(isinstance(item, int) and item > LARGEST for item in values):
            return f"at most {LARGEST}"
        return None

    def _is_within(self, value: float) -> bool:
        return (
            (self.low is None or value >= self.low)
            and (self.above is None or value > self.above)
            and (self.high is None or value <= self.high)
            and (self.below is None or value < self.below)
        )

    def _limits(self) -> str:
        limits = (
            ("at least", self.low),
            ("greater than", self.above),
            ("at most", self.high),
            ("less than", self.below),
        )
        return " and ".join(f"{bound} {limit}" for bound, limit in limits if limit is not None)


def one_of(choices: tuple[Any, ...]) -> str:
    """Return choices as the end of a rule: "one of a, b"."""
    return str(choices[0]) if len(choices) == 1 else f"one of {', '.join(map(str, choices))}"


def key(
    default: Any, meaning: str, on_resume: OnResume | None = None, *, architecture: bool = False, **more: Any
) -> Any:
    """Return a dataclass field with the properties of a `Key`; with `architecture` instead of `on_resume` a resume
    refuses a change."""
    assert (on_resume is None) == architecture, "on_resume, or architecture"
    metadata = {"meaning": meaning, "on_resume": on_resume or "refuse", "architecture": architecture, **more}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: copy.deepcopy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def table(schema: type) -> dict[str, Key]:
    """Return every key of a dataclass whose fields are keys or sections, by dotted name, in order."""
    return {found.name: found for found in _keys(schema, "")}


def get(config: Any, key: str) -> Any:
    """Return the value at a dotted key of a config, or inside a mapping that is such a value."""
    value: Any = config
    for name in key.split("."):
        value = value[name] if isinstance(value, dict) else getattr(value, name)
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
