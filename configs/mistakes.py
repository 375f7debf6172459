"""What is wrong with a command line or a preset, in one line that names the field, its value and what would work."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, InterpolationKeyError, OmegaConfBaseException

from configs.schema import KEYS, Config, ConfigError
from configs.validate import get, nearest, show

CONFIG_DIR = Path(__file__).resolve().parent
PRIMARY = "config"  # config.yaml


def one_line(text: str) -> str:
    """The text with every run of white space as one blank."""
    return " ".join(text.split())


# What can be said about one override before Hydra sees it.


@functools.cache
def _keys() -> tuple[str, ...]:
    """Every dotted key of the schema, sections included."""

    def walk(node: Any, prefix: str) -> Iterator[str]:
        for item in dataclasses.fields(node):
            yield prefix + item.name
            value = getattr(node, item.name)
            if dataclasses.is_dataclass(value):
                yield from walk(value, f"{prefix}{item.name}.")

    return tuple(walk(Config(), ""))


def _choices(group: str, config_dir: str | None = None) -> list[str]:
    folders = [CONFIG_DIR / group, *([Path(config_dir) / group] if config_dir else [])]
    return sorted({path.stem for folder in folders for path in folder.glob("*.yaml")})


def _groups(config_dir: str | None = None) -> list[str]:
    return [name for name in (*sorted(path.name for path in CONFIG_DIR.iterdir() if path.is_dir()),) if _choices(name, config_dir)]


def parse(text: str) -> Override:
    """One override as Hydra reads it; raises ConfigError if it cannot."""
    try:
        return OverridesParser.create().parse_override(text)
    except HydraException as error:
        reason = one_line(str(error).split("\n")[0])
        if "=" not in text:
            hint = f"write key=value, such as {text}={_example(text)}" if re.fullmatch(r"[\w.]+", text) else "write key=value"
        else:
            hint = f"{reason}; quote special characters, such as {text.split('=', 1)[0]}=\"...\" inside '...'"
        raise ConfigError(f"cannot read the override {text!r}: {hint}") from error


def _example(key: str, wish: Any = None) -> str:
    """A value that a key or group accepts: the wished one if it fits, else the schema's own."""
    if key in _groups():
        choices = _choices(key)
        return wish if isinstance(wish, str) and wish in choices else choices[0]
    if key not in _keys() or dataclasses.is_dataclass(get(Config(), key)):
        return "value"
    if wish is None or OmegaConf.is_config(wish) or isinstance(wish, (dict, list)) or KEYS[key].broken_rule(wish):
        return show(get(Config(), key))
    try:
        changed = OmegaConf.structured(Config)
        OmegaConf.update(changed, key, wish)
        return show(OmegaConf.select(changed, key))
    except OmegaConfBaseException:
        pass
    if isinstance(wish, float) and math.isfinite(wish) and int in KEYS[key].kinds:  # such as 1e3
        return show(round(wish))
    return _example(key)


def check_override(text: str, config_dir: str | None) -> None:
    """Raises ConfigError for an override of a key, group or choice that does not exist, or in a form that a run does not take."""
    override = parse(text)
    key = override.key_or_group
    if not key:
        raise ConfigError(f"cannot read the override {text!r}: write key=value")
    if key == "hydra" or key.startswith(("hydra.", "hydra/")):
        return
    if override.is_sweep_override():
        values = text.partition("=")[2]
        raise ConfigError(f"{key} ({values}) has several values, which only a sweep takes. Try -m, or {key}={values.split(',')[0]}")
    if override.is_delete():
        raise ConfigError(f"{text}: a key cannot be removed. Try {key}={_example(key)}")
    groups = _groups(config_dir)
    if key in groups:
        choices, value = _choices(key, config_dir), override.value()
        if value is None and key not in ("model", "experiment"):
            return
        if not isinstance(value, str) or value not in choices:
            close = nearest(str(value), choices)
            advice = f" Try {key}={close}." if close else ""
            shown = override.get_value_element_as_str()
            raise ConfigError(f"{key} ({shown}) must be one of {', '.join(choices)}.{advice}")
        if override.is_add():
            raise ConfigError(f"{text}: the group {key} has a choice already. Try {key}={value}")
        return
    if key not in _keys():
        raise ConfigError(_unknown_key(key, groups, override.value()))
    if dataclasses.is_dataclass(get(Config(), key)):
        raise ConfigError(f"{key} is a section, not a key. Try {key}.{dataclasses.fields(get(Config(), key))[0].name}=...")
    if override.value() == "???":  # OmegaConf's mark of a missing value, which would quietly fall back to the schema
        raise ConfigError(f"{key} (???) must have a value. Try {key}={_example(key)}.")
    if override.is_add() and not override.is_force_add():
        plain = text.lstrip("+")
        raise ConfigError(f"{text}: + is for new keys, and {key} exists. Try {plain}")


def _unknown_key(key: str, groups: list[str] | None = None, wish: Any = None) -> str:
    """Names the key that was most likely meant: within its section, else by its last part anywhere, else by the whole name."""
    names = [name for name in _keys() if not dataclasses.is_dataclass(get(Config(), name))]
    section, _, last = key.rpartition(".")
    siblings = [name.rpartition(".")[2] for name in names if section and name.rpartition(".")[0] == section]
    by_last = {name.rpartition(".")[2]: name for name in reversed(names)}
    sibling = nearest(last, siblings)
    close = (f"{section}.{sibling}" if sibling else None) or by_last.get(last)
    if not close and not siblings:
        close = nearest(key, [*names, *([] if section else groups or [])], cutoff=0.75) or by_last.get(nearest(last, by_last) or "")
    if close:
        return f"{key} is no known key. Try {close}={_example(close, wish)}."
    if siblings:
        return f"{key} is no known key. Keys of {section}: {', '.join(siblings)}."
    tops = [name for name in _keys() if "." not in name]
    return f"{key} is no known key. Try python train.py --help; the sections are {', '.join(tops)}."


# What Hydra and OmegaConf found wrong.


def _chain(error: BaseException) -> Iterator[BaseException]:
    current: BaseException | None = error
    while current is not None:
        yield current
        current = current.__cause__ or current.__context__


def explain(error: Exception) -> str:
    """One line that names the field, its value and what it should be."""
    where = re.match(r"In '([^']+)'", str(error))
    prefix = f"{where[1]}.yaml: " if where and where[1] != PRIMARY else ""
    for cause in _chain(error):
        if not isinstance(cause, OmegaConfBaseException):
            continue
        key = (cause.full_key or "").strip()
        message = one_line((cause.msg or str(cause)).split("\n")[0])
        if isinstance(cause, InterpolationKeyError):
            return f"{prefix}{key}: {message}"
        if isinstance(cause, (ConfigKeyError, ConfigAttributeError)) and key:
            return prefix + (f"{key} is no key of Hydra. Try --hydra-help." if key.startswith("hydra") else _unknown_key(key))
        if key in _keys():
            value = show(cause.value) if cause.value is not None else _quoted(message)
            return f"{prefix}{key} ({value}) must be {KEYS[key].rule()}. Try {key}={_example(key, cause.value)}."
        return f"{prefix}{key}: {message}" if key else prefix + message
    return _explain_defaults(one_line(str(error).split("\n")[0]))


def _explain_defaults(message: str) -> str:
    """What is wrong with the defaults list of a preset."""
    found = re.search(r"In '(.+?)': Could not override '(\w+)'", message)
    if found and found[2] in _groups():
        return (
            f"{found[1]}.yaml: defaults may override model alone, since {found[2]}=... on the command line must win. Set {found[2]}'s keys"
        )
    found = re.search(r"Could not find '(\w+)/([\w.-]+)'", message)
    if found and found[1] in _groups():
        choices = _choices(found[1])
        close = nearest(found[2], choices)
        return f"{found[1]} ({found[2]}) must be one of {', '.join(choices)}." + (f" Try {found[1]}={close}." if close else "")
    return message


def _quoted(message: str) -> str:
    found = re.search(r"Value '(.*?)'", message)
    return found[1] if found else "null"
