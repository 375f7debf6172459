"""Presets in a folder of one's own (`--config-dir`), and other files of keys: checked before Hydra or OmegaConf merge
them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from configs import files
from configs.keys import Key
from configs.mistakes import CONFIG_DIR, check_choice, unknown_key
from configs.schema import KEYS, ConfigError
from configs.show import show
from configs.values import as_typed, converted, one_line, refers, suggest, wrong_value

UNQUOTED = "; unquoted, YAML reads on, off, yes and no as true or false, and 1e3 as a number"


def read_mapping(path: Path) -> dict[Any, Any]:
    """The keys and values of a YAML file, unresolved. Raises ConfigError if the file is missing or no mapping."""
    try:
        files.read_yaml(path)  # what grows, or is no file, ends here; numbers are read as OmegaConf has them
        content = OmegaConf.load(path)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except (YAMLError, UnicodeDecodeError, ValueError, OmegaConfBaseException) as error:
        raise ConfigError(f"cannot read {path}: {one_line(str(error))}") from error
    mapping = OmegaConf.to_container(content) if OmegaConf.is_dict(content) else None
    if not isinstance(mapping, dict):
        raise ConfigError(f"{path} must hold a mapping of keys to values")
    return mapping


def check_mapping(content: Mapping[Any, Any], prefix: str = "") -> None:
    """Check that a file's keys exist, and that each value is by itself one of its key's. Raises ConfigError, naming the
    key."""
    for last, value in content.items():
        name = f"{prefix}{last}"
        if name in KEYS:
            _check_value(KEYS[name], value)
        elif any(other.startswith(f"{name}.") for other in KEYS):
            if not isinstance(value, Mapping):
                raise ConfigError(
                    f"{name} ({show(value)}) must be a mapping of keys to values: it is a section, not a key"
                )
            check_mapping(value, f"{name}.")
        else:
            raise ConfigError(unknown_key(name))


def _check_value(key: Key, value: Any) -> None:
    try:
        new = converted(key, value)
    except ValueError as error:
        unquoted = isinstance(value, (bool, float)) and str in key.kinds
        raise ConfigError(wrong_value(key, show(value), UNQUOTED if unquoted else "", value)) from error
    rule = None if refers(new) else key.broken_rule(new)
    if rule is not None:
        raise ConfigError(f"{key.name} ({show(value)}) must be {rule}. Try {as_typed(key.name, suggest(key, value))}.")


def check_preset(config_dir: str, group: str, choice: str, seen: frozenset[Path] = frozenset()) -> None:
    """Check a preset of a folder of one's own, and those that its defaults name there; shipped ones are left to the
    tests.

    Raises:
        ConfigError: naming the file, and in it the key.
    """
    path = Path(config_dir, group, f"{choice}.yaml")
    if not path.is_file():
        return
    shown = f"{group}/{choice}.yaml"
    if path in seen:
        raise ConfigError(f"{shown}: its defaults lead back to itself")
    if (CONFIG_DIR / group / path.name).is_file() and path.resolve() != (CONFIG_DIR / group / path.name).resolve():
        raise ConfigError(
            f"{shown} of --config-dir has the name of a shipped preset, which would be taken instead. Give it another "
            "name"
        )
    content = read_mapping(path) if path.read_bytes().strip() else {}
    try:
        for own_group, own_choice in _defaults(content.pop("defaults", []), group):
            check_choice(own_group, own_choice, own_choice, config_dir)
            check_preset(config_dir, own_group, own_choice, seen | {path})
        check_mapping(content, _package(path, group))
    except ConfigError as error:
        message = str(error)
        raise ConfigError(message if ".yaml" in message.split(" ")[0] else f"{shown}: {message}") from error


def _package(path: Path, group: str) -> str:
    """Where the keys of a preset go, as a prefix; "" is the top."""
    found = re.search(r"^\s*#\s*@package\s+(\S+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    package = found[1] if found else group
    if package == "_global_":
        return ""
    if package == "experiment":
        raise ConfigError(
            "the first line must be # @package _global_, or its keys would belong to a section experiment, which is "
            "none"
        )
    return f"{group if package == '_group_' else package}."


def _defaults(entries: Any, group: str) -> list[tuple[str, str]]:
    """The groups and choices that the defaults of a preset name."""
    found = []
    for entry in entries if isinstance(entries, list) else [entries]:
        if entry == "_self_":
            continue
        (name, choice), *more = entry.items() if isinstance(entry, Mapping) and entry else ((group, entry),)
        words = str(name).replace("/", "").split()
        if more or not isinstance(choice, str) or not isinstance(entries, list):
            raise ConfigError(
                "defaults must be a list of `- override /model: NAME`, of names of other presets of the folder, or "
                "_self_"
            )
        if isinstance(entry, Mapping) and words != ["override", "model"]:
            other = words[-1] if words else str(name)
            raise ConfigError(
                f"defaults may override model alone, since {other}=... on the command line must win. Set {other}'s keys"
            )
        found.append((words[-1], choice))
    return found
