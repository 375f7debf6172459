"""What is wrong with a command line or a preset, in one line that names the field, its value and what would work."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from configs.schema import KEYS, ConfigError
from configs.show import nearest
from configs.values import as_typed, one_line, suggest

CONFIG_DIR = Path(__file__).resolve().parent
PRIMARY = "config"  # config.yaml


# What can be said about one override before Hydra sees it.


def _choices(group: str, config_dir: str | None = None) -> list[str]:
    folders = [CONFIG_DIR / group, *([Path(config_dir) / group] if config_dir else [])]
    return sorted({path.stem for folder in folders for path in folder.glob("*.yaml")})


def _groups(config_dir: str | None = None) -> list[str]:
    """Folders of presets; configs/hardware, whose files a key names, is none."""
    return [
        name
        for name in (*sorted(path.name for path in CONFIG_DIR.iterdir() if path.is_dir()),)
        if name not in KEYS and _choices(name, config_dir)
    ]


def presets_by_group(config_dir: str | None = None) -> dict[str, list[str]]:
    """The groups, and the presets that each can be."""
    return {group: _choices(group, config_dir) for group in _groups(config_dir)}


def parse(text: str) -> Override:
    """One override as Hydra reads it; raises ConfigError if it cannot."""
    try:
        return OverridesParser.create().parse_override(text)
    except HydraException as error:
        reason = one_line(str(error).split("\n")[0])
        if "=" not in text:
            hint = f"write key=value, such as {_example(text)}" if re.fullmatch(r"[\w.]+", text) else "write key=value"
        else:
            hint = f"{reason}; quote special characters, such as {text.split('=', 1)[0]}=\"...\" inside '...'"
        raise ConfigError(f"cannot read the override {text!r}: {hint}") from error


def _example(key: str, wish: Any = None) -> str:
    """`key=value` with a value that the key or group accepts: the wished one if it fits."""
    if key in _groups():
        choices = _choices(key)
        return f"{key}={wish if isinstance(wish, str) and wish in choices else choices[0]}"
    return as_typed(key, suggest(KEYS[key], wish)) if key in KEYS else f"{key}=value"


def check_override(text: str, config_dir: str | None) -> Override:
    """One override as Hydra reads it.

    Raises:
        ConfigError: if it is of a key, group or choice that does not exist, or in a form that a run does not take.
    """
    override = parse(text)
    key = override.key_or_group
    if not key:
        raise ConfigError(f"cannot read the override {text!r}: write key=value")
    if key == "hydra" or key.startswith(("hydra.", "hydra/")):
        return override
    if override.is_sweep_override():
        values = text.partition("=")[2]
        raise ConfigError(
            f"{key} ({values}) has several values, which only a sweep takes. Try -m, or {key}={values.split(',')[0]}"
        )
    if override.is_delete():
        raise ConfigError(f"{text}: a key cannot be removed. Try {_example(key)}")
    groups = _groups(config_dir)
    if key in groups:
        value = override.value()
        if value is None and key not in ("model", "experiment"):
            return override
        check_choice(key, value, override.get_value_element_as_str(), config_dir)
        if override.is_add():
            raise ConfigError(f"{text}: the group {key} has a choice already. Try {key}={value}")
        return override
    if key not in KEYS:
        inside = next((name for name in KEYS if name.startswith(f"{key}.")), None)
        if inside is not None:
            raise ConfigError(f"{key} is a section, not a key. Try {inside}=...")
        raise ConfigError(unknown_key(key, groups, override.value()))
    if override.is_add() and not override.is_force_add():
        plain = text.lstrip("+")
        raise ConfigError(f"{text}: + is for new keys, and {key} exists. Try {plain}")
    return override


def check_choice(group: str, choice: Any, shown: str, config_dir: str | None) -> None:
    """Raises ConfigError for a choice that a group does not have."""
    choices = _choices(group, config_dir)
    if not isinstance(choice, str) or choice not in choices:
        close = nearest(str(choice), choices)
        raise ConfigError(
            f"{group} ({shown}) must be one of {', '.join(choices)}." + (f" Try {group}={close}." if close else "")
        )


def unknown_key(key: str, groups: list[str] | None = None, wish: Any = None) -> str:
    """Names the key that was most likely meant: within its section, else by its last part anywhere, else by the whole
    name."""
    names = list(KEYS)
    section, _, last = key.rpartition(".")
    siblings = [name.rpartition(".")[2] for name in names if section and name.rpartition(".")[0] == section]
    by_last = {name.rpartition(".")[2]: name for name in reversed(names)}
    sibling = nearest(last, siblings)
    close = (f"{section}.{sibling}" if sibling else None) or by_last.get(last)
    if not close and not siblings:
        close = nearest(key, [*names, *([] if section else groups or [])], cutoff=0.75) or by_last.get(
            nearest(last, by_last) or ""
        )
    if close:
        return f"{key} is no known key. Try {_example(close, wish)}."
    if siblings:
        return f"{key} is no known key. Keys of {section}: {', '.join(siblings)}."
    tops = dict.fromkeys(name.partition(".")[0] for name in KEYS)
    return f"{key} is no known key. Try python train.py --help; the sections are {', '.join(tops)}."


def explain(error: Exception) -> str:
    """One line for what Hydra or OmegaConf found wrong, which is with Hydra's own keys or with a shipped preset."""
    current: BaseException | None = error
    while current is not None:
        if isinstance(current, OmegaConfBaseException):
            key = (current.full_key or "").strip()
            if isinstance(current, (ConfigKeyError, ConfigAttributeError)) and key.startswith("hydra"):
                return f"{key} is no key of Hydra. Try --hydra-help."
            message = one_line((current.msg or str(current)).split("\n")[0])
            return f"{key}: {message}" if key else message
        current = current.__cause__ or current.__context__
    return one_line(str(error).split("\n")[0])
