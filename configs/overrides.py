"""Checks of the values that override the schema's defaults, on the command line and in preset files, before Hydra
merges them. Every mistake is reported in one line that names the field, its value and a value that works."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException
from yaml import YAMLError

from base import files
from base.errors import ConfigError
from configs.keys import Key
from configs.schema import KEYS
from configs.show import nearest, show
from configs.values import as_typed, converted, one_line, refers, suggest, wrong_value

CONFIG_DIR = Path(__file__).resolve().parent
PRIMARY = "config"  # config.yaml
UNQUOTED = "; without quotes, YAML reads on, off, yes and no as true or false, and 1e3 as a number"


def _choices(group: str, config_dir: str | None = None) -> list[str]:
    folders = [CONFIG_DIR / group, *([Path(config_dir) / group] if config_dir else [])]
    return sorted({path.stem for folder in folders for path in folder.glob("*.yaml")})


def presets_by_group(config_dir: str | None = None) -> dict[str, list[str]]:
    """Return the names of the presets of each group, as a dict by group. configs/hardware is not a group: the key
    `hardware` names its files."""
    folders = sorted(path.name for path in CONFIG_DIR.iterdir() if path.is_dir() and path.name not in KEYS)
    return {group: presets for group in folders if (presets := _choices(group, config_dir))}


def parse(text: str) -> Override:
    """Return one override (`key=value`) as parsed by Hydra. Raises ConfigError if Hydra cannot parse it."""
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
    """Return an example `key=value`, with a value that the key or group accepts: `wish`, a value close to it, or any
    legal value."""
    if choices := presets_by_group().get(key):
        return f"{key}={wish if isinstance(wish, str) and wish in choices else choices[0]}"
    return as_typed(key, suggest(KEYS[key], wish)) if key in KEYS else f"{key}=value"


def check_override(text: str, config_dir: str | None) -> Override:
    """Return one override (`key=value`) as parsed by Hydra, after checking that a run supports it.

    Raises ConfigError for a key, group or choice that does not exist, or a form of override that a run does not
    support.
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
            f"{key} ({values}) has several values, which needs a sweep. Try -m, or {key}={values.split(',')[0]}"
        )
    if override.is_delete():
        raise ConfigError(f"{text}: ~ cannot remove a key of the schema. Try {_example(key)}")
    groups = list(presets_by_group(config_dir))
    if key in groups:
        value = override.value()
        if value is None and key not in ("model", "experiment"):
            return override
        check_choice(key, value, override.get_value_element_as_str(), config_dir)
        if override.is_add():
            raise ConfigError(f"{text}: the group {key} is already set. Try {key}={value}")
        return override
    if key not in KEYS:
        inside = next((name for name in KEYS if name.startswith(f"{key}.")), None)
        if inside is not None:
            raise ConfigError(f"{key} is a section, not a key. Try {inside}=...")
        raise ConfigError(unknown_key(key, groups, override.value()))
    if override.is_add() and not override.is_force_add():
        plain = text.lstrip("+")
        raise ConfigError(f"{text}: + adds a new key, but {key} already exists. Try {plain}")
    return override


def check_choice(group: str, choice: Any, shown: str, config_dir: str | None) -> None:
    """Raise ConfigError if a group has no preset `choice`. `shown`: the choice as the user wrote it."""
    choices = _choices(group, config_dir)
    if not isinstance(choice, str) or choice not in choices:
        close = nearest(str(choice), choices)
        raise ConfigError(
            f"{group} ({shown}) must be one of {', '.join(choices)}." + (f" Try {group}={close}." if close else "")
        )


def unknown_key(key: str, groups: list[str] | None = None, wish: Any = None) -> str:
    """Return the error message for an unknown key. It proposes the key that was probably meant: a similar name in the
    same section, else the same last name in another section, else any similar name."""
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
        return f"{key} is not a known key. Try {_example(close, wish)}."
    if siblings:
        return f"{key} is not a known key. Use one of the keys of {section}: {', '.join(siblings)}."
    tops = dict.fromkeys(name.partition(".")[0] for name in KEYS)
    return f"{key} is not a known key. Try python train.py --help; the sections are {', '.join(tops)}."


def explain(error: Exception) -> str:
    """Return an error of Hydra or OmegaConf as one line. It concerns Hydra's own keys or a shipped preset."""
    current: BaseException | None = error
    while current is not None:
        if isinstance(current, OmegaConfBaseException):
            key = (current.full_key or "").strip()
            if isinstance(current, (ConfigKeyError, ConfigAttributeError)) and key.startswith("hydra"):
                return f"{key} is not a key of Hydra. Try --hydra-help."
            message = one_line((current.msg or str(current)).split("\n")[0])
            return f"{key}: {message}" if key else message
        current = current.__cause__ or current.__context__
    return one_line(str(error).split("\n")[0])


def read_mapping(path: Path) -> dict[Any, Any]:
    """Return the keys and values of a YAML file, with references unresolved. Raises ConfigError."""
    try:
        files.read_yaml(path)  # rejects expanding aliases and special files; OmegaConf parses numbers differently
        content = OmegaConf.load(path)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}. Check the path") from error
    except (YAMLError, UnicodeDecodeError, ValueError, OmegaConfBaseException) as error:
        raise ConfigError(f"cannot read {path}: {one_line(str(error))}. Correct or restore the file") from error
    mapping = OmegaConf.to_container(content) if OmegaConf.is_dict(content) else None
    if not isinstance(mapping, dict):
        raise ConfigError(
            f"{path} must contain a mapping, with lines `key: value`, but has none. Correct or restore the file"
        )
    return mapping


def check_mapping(content: Mapping[Any, Any], prefix: str = "") -> None:
    """Check that the keys of a YAML file exist and have legal values. Raises ConfigError, naming the key."""
    for last, value in content.items():
        name = f"{prefix}{last}"
        if name in KEYS:
            _check_value(KEYS[name], value)
        elif any(other.startswith(f"{name}.") for other in KEYS):
            if not isinstance(value, Mapping):
                raise ConfigError(
                    f"{name} ({show(value)}) must be a mapping: it is a section. Indent its keys below it"
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
    """Check a preset of the user's folder, and the presets in its defaults list. Tests check the shipped presets.

    Raises ConfigError, naming the file and the key.
    """
    path = Path(config_dir, group, f"{choice}.yaml")
    if not path.is_file():
        return
    shown = f"{group}/{choice}.yaml"
    if path in seen:
        raise ConfigError(f"{shown}: its defaults list leads back to the same preset. Remove one of the entries")
    if (CONFIG_DIR / group / path.name).is_file() and path.resolve() != (CONFIG_DIR / group / path.name).resolve():
        raise ConfigError(
            f"{shown} of --config-dir has the same name as a shipped preset, which would be used instead. Rename the "
            "file"
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
    """Return the prefix for the keys of a preset file, such as `model.`; an empty string if the file has full names."""
    found = re.search(r"^\s*#\s*@package\s+(\S+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    package = found[1] if found else group
    if package == "_global_":
        return ""
    if package == "experiment":
        raise ConfigError(
            "the first line must be `# @package _global_`, but is not: the keys would belong to a section named "
            "experiment, which does not exist. Add the line"
        )
    return f"{group if package == '_group_' else package}."


def _defaults(entries: Any, group: str) -> list[tuple[str, str]]:
    """Return (group, choice) for each entry of a preset's defaults list."""
    found = []
    for entry in entries if isinstance(entries, list) else [entries]:
        if entry == "_self_":
            continue
        (name, choice), *more = entry.items() if isinstance(entry, Mapping) and entry else ((group, entry),)
        override = str(name).replace("/", "").split()
        if more or not isinstance(choice, str) or not isinstance(entries, list):
            raise ConfigError(
                "each entry of defaults must be `override /model: NAME`, the name of another preset of the same group, "
                f"or _self_, but one is {show(entry)}. Correct or remove it"
            )
        if isinstance(entry, Mapping) and override != ["override", "model"]:
            other = override[-1] if override else str(name)
            raise ConfigError(
                f"defaults may override only model, but override {other}: {other}=... on the command line would have "
                f"no effect. Set keys of {other} instead"
            )
        found.append((override[-1], choice))
    return found
