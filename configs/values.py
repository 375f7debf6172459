"""Values of keys: set from the command line, converted to their types, and with references to other values resolved.

Every error names the key, the value as written, the rule, and a value that works.
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

MISSING = "???"  # OmegaConf's mark of a value that is still to be set
NODES: dict[Any, Any] = {int: IntegerNode, float: FloatNode, bool: BooleanNode, str: StringNode}


def one_line(text: str) -> str:
    """Return the text with every run of white space replaced by one blank."""
    return " ".join(text.split())


def set_values(composed: DictConfig, overrides: Iterable[Override]) -> dict[str, Any]:
    """Set the command line's values in a composed configuration, and return the previous values by key.

    Raises:
        ConfigError: for a value of another type than the key's.
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
    """Whether Hydra reads a number or a boolean although the key takes a text: name=1e3 is that text, not 1000.0."""
    key = KEYS.get(override.key_or_group)
    return key is not None and str in key.kinds and isinstance(override.value(), (bool, int, float))


def for_hydra(override: Override) -> str:
    """Return the override in a form that Hydra itself reads as the same value."""
    is_text = not override.is_sweep_override() and _is_text(override)
    return f"{override.key_or_group}={_quoted(_written(override))}" if is_text else override.input_line or ""


def to_config(composed: DictConfig, before: dict[str, Any] | None = None) -> Config:
    """Return the typed configuration, with every reference resolved.

    Args:
        before: previous values of the keys that the command line has set.

    Raises:
        ConfigError: for a reference that cannot be resolved or has the wrong type, naming the key with the reference.
    """
    before = before or {}
    failed = {}
    for name, written in _leaves(OmegaConf.to_container(composed, resolve=False)):
        reason = _unreadable(composed, name, written)
        if reason is not None:
            failed[name] = (show(written), reason)
    if failed:
        # A key that refers to another failing key is not the cause; in a circle, the key set by the command line is.
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
    """Return why the written value of a key cannot be resolved, to follow its rule in a message; None if it can."""
    if written == MISSING:
        return "and has none yet"
    if not refers(written):
        return None
    try:
        value = OmegaConf.select(composed, name, throw_on_missing=True)
        converted(KEYS[name], OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value)
    except (ValueError, RecursionError, OmegaConfBaseException) as error:
        return _reason(error)
    return None


def refers(value: Any) -> bool:
    """Whether a value, or an item in it, contains a reference: ${key} or ${oc.env:NAME}."""
    if isinstance(value, (list, tuple)):
        return any(map(refers, value))
    if isinstance(value, dict):
        return any(map(refers, value.values()))
    return isinstance(value, str) and "${" in value


def _reason(error: BaseException) -> str:
    """Return why a reference has no value, to follow the rule in a message."""
    texts = [str(error)]
    while error.__cause__ is not None:
        error = error.__cause__
        texts.append(str(error))
    text = one_line(" ".join(texts))
    for pattern, message in (
        (r"Environment variable '(.*?)' not found", "but the environment variable {} is not set"),
        (r"Interpolation key '(.*?)' not found", "but {} is no key"),
        (r"(RecursionError|maximum recursion)", "but it refers to itself in a circle"),
        (r"Unsupported interpolation type (\S+)", "but there is no function {}"),
        (r"Value '(.*?)' of type", "not {}"),
        (r"Cannot convert '(\w+)'", "not a {}"),
    ):
        found = re.search(pattern, text)
        if found:
            return message.format(*found.groups())
    return f"but {one_line(texts[-1])}"


def converted(key: Key, value: Any) -> Any:
    """Return a value converted to the key's type; a reference is returned unchanged. Raises ValueError for another
    type."""
    if value == MISSING:
        raise ValueError("must have a value")
    if key.type is Any or (value is None and key.nullable) or (isinstance(value, str) and refers(value)):
        return value
    if key.of_items is None:
        return _scalar(next(kind for kind in key.kinds if kind in NODES), value)
    if not isinstance(value, list):
        raise ValueError("no list")
    return [item if isinstance(item, str) and refers(item) else _scalar(key.of_items, item) for item in value]


def _scalar(kind: Any, value: Any) -> Any:
    if value is None or isinstance(value, (dict, list)):
        raise ValueError("no single value")
    if (
        kind is str
        and isinstance(value, (bool, float))
        or kind is bool
        and isinstance(value, int)
        and value not in (0, 1)
    ):
        raise ValueError("OmegaConf would change its meaning")
    return NODES[kind](value)._value()


def wrong_value(key: Key, written: str, reason: str, wish: Any, usual: Any = None) -> str:
    """Return the message about an illegal value of a key.

    Args:
        reason: follows the rule in the message.
        wish: the value, if it may be similar to a legal one.
        usual: a legal value, if one is known.
    """
    shown = written if len(written) <= 60 else f"{written[:50]}..."
    return f"{key.name} ({shown}) must be {key.rule()}{reason}. Try {as_typed(key.name, suggest(key, wish, usual))}."


def suggest(key: Key, wish: Any = None, usual: Any = None) -> Any:
    """Return a legal value of a key: the wish if it can be converted, else the usual value, else the default."""
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
    """Return `name=value`, quoted as far as a shell and Hydra need to read the same value."""
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
    """Return the value of a key in a composed configuration; the schema's default if it cannot be resolved."""
    try:
        value = OmegaConf.select(composed, key.name)
        return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
    except (RecursionError, OmegaConfBaseException):
        return key.fresh_default()
