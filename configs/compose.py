"""From a command line to a typed configuration, with every mistake reported in one line.

`run` is the whole of the entry point's command line; `compose` and `load` serve tests and tools.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import os
import re
import sys
import time
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra import main as hydra_main
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, InterpolationKeyError, OmegaConfBaseException

from configs.schema import Config, ConfigError
from configs.validate import CHOICES, get, nearest, show, validate

CONFIG_DIR = Path(__file__).resolve().parent
PRIMARY = "config"
EXIT_STATUS = 2  # of every run that a wrong configuration stops

ConfigStore.instance().store(name="schema", node=Config)
# For presets, so that warm-up and final rate follow an override of the steps or of the peak rate.
OmegaConf.register_new_resolver("fraction", lambda share, number: round(float(share) * int(number)), replace=True)
OmegaConf.register_new_resolver("times", lambda factor, number: float(f"{float(factor) * float(number):.12g}"), replace=True)


def compose(overrides: list[str], config_dir: str | None = None) -> Config:
    """Compose the presets and `overrides` (as on the command line) into a typed configuration; `validate` is the caller's.

    Args:
        config_dir: a folder of further presets, searched before the shipped ones.

    Raises:
        ConfigError: for a line that cannot be read, an unknown group, choice or key, or a value of the wrong type.
    """
    for text in overrides:
        _check_override(text, config_dir)
    extra = [f"hydra.searchpath=[file://{Path(config_dir).resolve()}]"] if config_dir else []
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
            composed = hydra_compose(PRIMARY, [*extra, *overrides])
        return _to_config(composed)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_explain(error)) from error


def load(path: str | Path) -> Config:
    """Read a run's `config.yaml`.

    Raises:
        ConfigError: if the file is missing, is no YAML mapping, or does not fit the schema.
    """
    from yaml import YAMLError

    try:
        content = OmegaConf.load(path)
        if not OmegaConf.is_dict(content):
            raise ConfigError(f"{path} must hold a mapping of keys to values, as a run's config.yaml does")
        return _to_config(content)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror or error}") from error
    except (YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the configuration {path}: {_one_line(str(error))}") from error
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {_explain(error)}") from error


def to_yaml(config: Config) -> str:
    """The configuration as YAML that `load` reads back."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def world_size() -> int:
    """Number of processes of this launch, which torchrun puts into WORLD_SIZE; 1 without a launcher.

    Raises:
        ConfigError: if WORLD_SIZE is no positive integer.
    """
    text = os.environ.get("WORLD_SIZE", "1")
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(f"WORLD_SIZE ({text}) must be a positive integer: it is set by the launcher. Try torchrun")
    return int(text)


def run(main: Callable[[Config], int]) -> NoReturn:
    """Run `main` with the configuration that the command line asks for, then exit with the status it returns.

    Any `ConfigError`, also one that `main` raises, ends in one line on stderr and exit status 2. `--cfg`, `--help`, `--info` and
    shell completion are Hydra's. `-m` (`--multirun`) runs the product of comma-separated values, one run after the other in this
    process, after all of them were checked.
    """
    args = get_args_parser().parse_args()
    try:
        configs = _checked_configs(args)
        if configs is None:
            _show(args)
            sys.exit(0)
        status = 0
        for config in configs:
            status = status or main(config)
    except ConfigError as error:
        _report(str(error))
        sys.exit(EXIT_STATUS)
    sys.exit(status)


def _checked_configs(args: argparse.Namespace) -> list[Config] | None:
    """The configurations to run, or None when Hydra is asked to show something instead."""
    for option in ("config_path", "config_name", "experimental_rerun"):
        if getattr(args, option, None) is not None:
            raise ConfigError(f"--{option.replace('_', '-')} is not supported. Try --config-dir FOLDER for presets of your own")
    if args.config_dir is not None and not Path(args.config_dir).is_dir():
        raise ConfigError(f"--config-dir ({args.config_dir}) must be a folder of presets, such as {CONFIG_DIR.name}")
    if args.resolve and not (args.cfg or args.help):
        raise ConfigError("--resolve goes with --cfg or --help. Try --cfg job --resolve")
    if args.multirun and (args.cfg or args.info is not None):
        raise ConfigError("--multirun does not go with --cfg or --info. Try one of them alone")
    if args.cfg or args.help:
        compose(args.overrides, args.config_dir)
    if args.cfg or args.help or args.hydra_help or args.info is not None or args.shell_completion:
        return None

    lines = [args.overrides]
    if args.multirun:
        for text in args.overrides:
            _parse(text)
        lines = [line for batch in BasicSweeper.split_arguments([_parse(text) for text in args.overrides], None) for line in batch]
    processes = world_size()
    configs = []
    for line in lines:
        configs.append(compose(line, args.config_dir))
        validate(configs[-1], processes)
    run_dirs = [config.run_dir for config in configs]
    if len(set(run_dirs)) < len(run_dirs):
        swept = next(o.get_key_element() for o in map(_parse, args.overrides) if o.is_sweep_override())
        advice = f"'name={configs[0].name}_${{{swept}}}'" if "." in swept else "'run_dir=runs/sweep/${name}'"
        raise ConfigError(f"run_dir ({run_dirs[0]}) must differ between the runs of a sweep. Try {advice}")
    return configs


def _show(args: argparse.Namespace) -> None:
    """Let Hydra print what was asked for; the configuration is known to compose."""

    def never(_: Any) -> NoReturn:
        raise AssertionError("Hydra was asked to show something, not to run")

    hydra_main(version_base="1.3", config_path=str(CONFIG_DIR), config_name=PRIMARY)(never)()


def _report(message: str) -> None:
    """One line on stderr, and for torchrun's closing summary the same line in place of a traceback."""
    line = f"config error: {_one_line(message)}"
    rank = os.environ.get("RANK")
    # Every rank speaks: torchrun ends the others as soon as one has failed, so no single rank is sure to be heard.
    sys.stderr.write(f"[rank {rank}] {line}\n" if rank is not None and os.environ.get("WORLD_SIZE") != "1" else f"{line}\n")
    sys.stderr.flush()
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if error_file:
        now = str(int(time.time()))
        content = {"message": {"message": line, "extraInfo": {"py_callstack": line, "timestamp": now}}}
        Path(error_file).write_text(json.dumps(content), encoding="utf-8")


def _one_line(text: str) -> str:
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


def _parse(text: str) -> Override:
    try:
        return OverridesParser.create().parse_override(text)
    except HydraException as error:
        reason = _one_line(str(error).split("\n")[0])
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
    if wish is None or OmegaConf.is_config(wish) or isinstance(wish, (dict, list)) or wish not in CHOICES.get(key, (wish,)):
        return show(get(Config(), key))
    try:
        changed = OmegaConf.structured(Config)
        OmegaConf.update(changed, key, wish)
        return show(get(_to_config(changed), key))
    except OmegaConfBaseException:
        pass
    if isinstance(wish, float) and math.isfinite(wish) and _expected(key).startswith("an integer"):  # such as 1e3
        return show(round(wish))
    return _example(key)


def _check_override(text: str, config_dir: str | None) -> None:
    override = _parse(text)
    key = override.key_or_group
    if key == "hydra" or key.startswith(("hydra.", "hydra/")):
        return
    if override.is_sweep_override():
        value = text.partition("=")[2]
        raise ConfigError(f"{key} ({value}) has several values, which only a sweep takes. Try -m, or {key}={value.split(',')[0]}")
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


def _to_config(content: Any) -> Config:
    config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), content))
    assert isinstance(config, Config)
    return config


def _chain(error: BaseException) -> Iterator[BaseException]:
    current: BaseException | None = error
    while current is not None:
        yield current
        current = current.__cause__ or current.__context__


def _explain(error: Exception) -> str:
    """One line that names the field, its value and what it should be."""
    where = re.match(r"In '([^']+)'", str(error))
    prefix = f"{where[1]}.yaml: " if where and where[1] != PRIMARY else ""
    for cause in _chain(error):
        if not isinstance(cause, OmegaConfBaseException):
            continue
        key = (cause.full_key or "").strip()
        message = _one_line((cause.msg or str(cause)).split("\n")[0])
        if isinstance(cause, InterpolationKeyError):
            return f"{prefix}{key}: {message}"
        if isinstance(cause, (ConfigKeyError, ConfigAttributeError)) and key:
            return prefix + (f"{key} is no key of Hydra. Try --hydra-help." if key.startswith("hydra") else _unknown_key(key))
        if key in _keys():
            value = show(cause.value) if cause.value is not None else _quoted(message)
            return f"{prefix}{key} ({value}) must be {_expected(key)}. Try {key}={_example(key, cause.value)}."
        return f"{prefix}{key}: {message}" if key else prefix + message
    return _one_line(str(error).split("\n")[0])


def _quoted(message: str) -> str:
    found = re.search(r"Value '(.*?)'", message)
    return found[1] if found else "null"


def _expected(key: str) -> str:
    """The type of a key in words."""
    section, _, name = key.rpartition(".")
    owner = type(get(Config(), section)) if section else Config
    hint = typing.get_type_hints(owner)[name]
    words = {int: "an integer", float: "a number", bool: "true or false", str: "a text", type(None): "null", list[str]: "a list of texts"}
    parts = typing.get_args(hint) if typing.get_origin(hint) is typing.Union else (hint,)
    return " or ".join(words[part] for part in parts)
