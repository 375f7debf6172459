"""Conversion of configuration values: set from the command line, converted to the type of their key, and with
references such as ${name} resolved.

Every error message names the key, the value as written, the rule, and a value that works.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import BooleanNode, DictConfig, FloatNode, IntegerNode, OmegaConf, StringNode
from omegaconf.errors import OmegaConfBaseException

from base.errors import ConfigError
from configs.keys import Key
from configs.rotary import normalised
from configs.schema import KEYS, Config
from configs.show import nearest, show

MISSING = "???"  # OmegaConf's mark for a value that is not set yet
NODES: dict[Any, Any] = {int: IntegerNode, float: FloatNode, bool: BooleanNode, str: StringNode}


def one_line(text: str) -> str:
    """Return the text on one line, with every run of white space replaced by a single space."""
    return " ".join(text.split())


def set_values(composed: DictConfig, overrides: Iterable[Override]) -> dict[str, Any]:
    """Set the values of the command line in a composed configuration. Returns the previous values as a dict by key.

    Raises ConfigError if a value does not have the type of its key.
    """
    before: dict[str, Any] = {}
    for override in overrides:
        key = KEYS[override.key_or_group]
        written, value = _written(override), override.value()
        if _is_text(override):
            value = written
        usual = before.setdefault(key.name, _current_value(composed, key))
        try:
            OmegaConf.update(composed, key.name, converted(key, value), merge=False)
        except (ValueError, OmegaConfBaseException) as error:
            raise ConfigError(wrong_value(key, written, "", value, usual)) from error
    return before


def _written(override: Override) -> str:
    return (override.input_line or "").partition("=")[2]


def _is_text(override: Override) -> bool:
    """Return whether Hydra parses a value as a number or boolean although the key takes a text, as in name=1e3."""
    key = KEYS.get(override.key_or_group)
    return key is not None and str in key.kinds and isinstance(override.value(), (bool, int, float))


def for_hydra(override: Override) -> str:
    """Return the command-line override, quoted if Hydra would otherwise parse a text as a number or boolean."""
    is_text = not override.is_sweep_override() and _is_text(override)
    return f"{override.key_or_group}={_quoted(_written(override))}" if is_text else override.input_line or ""


def to_config(composed: DictConfig, before: dict[str, Any] | None = None) -> Config:
    """Return the typed configuration with all references resolved.

    before: the values that the keys of the command line had before, for advice in error messages. Raises ConfigError if
    a reference cannot be resolved or its value has the wrong type; the message names the key with the reference.
    """
    before = before or {}
    failed = {}
    for name, written in _leaves(OmegaConf.to_container(composed, resolve=False)):
        reason = _unreadable(composed, name, written)
        if reason is not None:
            failed[name] = (show(written), reason)
    if failed:
        # A key that refers to another failing key is not the cause. In a cycle, the key of the command line is.
        causes = [name for name in failed if not failed.keys() & set(re.findall(r"\$\{([\w.]+)\}", failed[name][0]))]
        name = min(causes or failed, key=lambda name: name not in before)
        written, reason = failed[name]
        raise ConfigError(wrong_value(KEYS[name], written, f", {reason}", None, before.get(name)))
    config = OmegaConf.to_object(composed)
    assert isinstance(config, Config)
    config.model.rotary_scaling = normalised(config.model.rotary_scaling)
    return config


def _leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for last, value in node.items():
        if prefix + last in KEYS:
            yield prefix + last, value
        else:
            yield from _leaves(value, f"{prefix}{last}.")


def _unreadable(composed: DictConfig, name: str, written: Any) -> str | None:
    """Return the reason why the value `written` of a key, such as a reference, cannot be resolved, as the end of an
    error message; None if it can."""
    if written == MISSING:
        return "but has no value yet"
    if not refers(written):
        return None
    try:
        value = OmegaConf.select(composed, name, throw_on_missing=True)
        converted(KEYS[name], OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value)
    except (ValueError, RecursionError, OmegaConfBaseException) as error:
        return _reason(error)
    return None


def refers(value: Any) -> bool:
    """Return whether a value, or an item of a list or dict, contains a reference such as ${key} or ${oc.env:NAME}."""
    if isinstance(value, (list, tuple)):
        return any(map(refers, value))
    if isinstance(value, dict):
        return any(map(refers, value.values()))
    return isinstance(value, str) and "${" in value


def _reason(error: BaseException) -> str:
    """Return the reason why a reference could not be resolved, as the end of an error message."""
    texts = [str(error)]
    while error.__cause__ is not None:
        error = error.__cause__
        texts.append(str(error))
    text = one_line(" ".join(texts))
    for pattern, message in (
        (r"Environment variable '(.*?)' not found", "but the environment variable {} is not set"),
        (r"Interpolation key '(.*?)' not found", "but {} is not a key"),
        (r"(RecursionError|maximum recursion)", "but the value refers to itself"),
        (r"Unsupported interpolation type (\S+)", "but the function {} does not exist"),
        (r"Value '(.*?)' of type", "not {}"),
        (r"Cannot convert '(\w+)'", "not a {}"),
    ):
        found = re.search(pattern, text)
        if found:
            return message.format(*found.groups())
    return f"but {one_line(texts[-1])}"


def converted(key: Key, value: Any) -> Any:
    """Return a value converted to the type of a key; a reference is returned unchanged. Raises ValueError if the value
    cannot be converted."""
    if value == MISSING:
        raise ValueError("must have a value")
    if key.type is Any or (value is None and key.nullable) or (isinstance(value, str) and refers(value)):
        return value
    if key.of_items is None:
        return _scalar(next(kind for kind in key.kinds if kind in NODES), value)
    if not isinstance(value, list):
        raise ValueError("not a list")
    return [item if isinstance(item, str) and refers(item) else _scalar(key.of_items, item) for item in value]


def _scalar(kind: Any, value: Any) -> Any:
    if value is None or isinstance(value, (dict, list)):
        raise ValueError("not a single value")
    is_no_text = kind is str and isinstance(value, (bool, float))
    if is_no_text or (kind is bool and isinstance(value, int) and value not in (0, 1)):
        raise ValueError("OmegaConf would change its meaning")
    return NODES[kind](value)._value()


def wrong_value(key: Key, written: str, reason: str, wish: Any, usual: Any = None) -> str:
    """Return the error message for an illegal value of a key, with a legal value to try.

    written: the illegal value as the user wrote it. reason: text to append to the rule. wish: the illegal value, if a
    legal one may resemble it. usual: a known legal value.
    """
    shown = written if len(written) <= 60 else f"{written[:50]}..."
    return f"{key.name} ({shown}) must be {key.rule()}{reason}. Try {as_typed(key.name, suggest(key, wish, usual))}."


def suggest(key: Key, wish: Any = None, usual: Any = None) -> Any:
    """Return a legal value of a key for advice: `wish` or one close to it, else the usual value, else the default."""
    rounded = [int(wish)] if isinstance(wish, float) and wish.is_integer() and int in key.kinds else []  # such as 1e3
    close = [nearest(wish, key.choices)] if isinstance(wish, str) and key.choices else []
    for value in (value for value in (wish, *rounded, *close, usual) if value is not None):
        try:
            new = converted(key, value)
        except ValueError:
            continue
        if key.type is not Any and not refers(new) and key.broken_rule(new) is None:
            return new
    return key.fresh_default() if usual is None or key.type is not Any else usual


def as_typed(name: str, value: Any) -> str:
    """Return `name=value` for a command line, with the quotes that a shell and Hydra need to read the same value."""
    plain = f"{name}={show(value, width=None)}"
    try:
        if shlex.split(plain) == [plain] and OverridesParser.create().parse_override(plain).value() == value:
            return plain
    except (ValueError, HydraException):
        pass  # it needs quotes
    return shlex.quote(f"{name}={_quoted(value)}")


def _quoted(value: Any) -> str:
    if isinstance(value, list):
        return f"[{','.join(map(_quoted, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}: {_quoted(item)}" for name, item in value.items()) + "}"
    return '"' + value.replace('"', '\\"') + '"' if isinstance(value, str) else show(value)


def _current_value(composed: DictConfig, key: Key) -> Any:
    """Return the value of a key in a composed configuration; the default if it cannot be resolved."""
    try:
        value = OmegaConf.select(composed, key.name)
        return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
    except (RecursionError, OmegaConfBaseException):
        return key.fresh_default()
