"""Composition of a command line into a typed configuration. Every mistake is reported in one line.

`run` handles the entire command line of the entry point; tests and tools use `compose` and `load`.
"""

from __future__ import annotations

import argparse
import copy
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra import main as hydra_main
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from base import command, exit_handler
from base.errors import ConfigError
from base.ranks import launched
from configs import help, weights
from configs.overrides import (
    CONFIG_DIR,
    PRIMARY,
    check_mapping,
    check_override,
    check_preset,
    explain,
    parse,
    presets_by_group,
    read_mapping,
)
from configs.schema import KEYS, Config
from configs.searched import searches_layout
from configs.validate import planned_world_size, usable_world_size, validate, validate_for_search
from configs.values import for_hydra, one_line, set_values, to_config

ConfigStore.instance().store(name="schema", node=Config)
# Functions for presets: warm-up and final learning rate follow the number of steps and the peak learning rate.
OmegaConf.register_new_resolver("fraction", lambda share, number: round(float(share) * int(number)), replace=True)
OmegaConf.register_new_resolver(
    "times", lambda factor, number: float(f"{float(factor) * float(number):.12g}"), replace=True
)

HIDDEN = "hardware"  # a key, not a group, although its files have a folder in configs/ as groups do


def compose(overrides: list[str], config_dir: str | None = None) -> Config:
    """Compose presets and `overrides` (the arguments of a command line) into a typed configuration. It is not validated
    yet.

    config_dir: a folder with further presets, whose names must differ from the shipped ones. Raises ConfigError for an
    argument that cannot be parsed, an unknown group, choice or key, or a value of the wrong type.
    """
    read = [check_override(text, config_dir) for text in overrides]
    values = [override for override in read if override.key_or_group in KEYS]
    composed = compose_groups([override for override in read if override.key_or_group not in KEYS], config_dir)
    config = to_config(composed, set_values(composed, values))
    if config.checkpoint.weights is not None:
        weights.adopt(config, {override.key_or_group for override in read})
    return config


def compose_groups(choices: list[Override], config_dir: str | None = None) -> DictConfig:
    """Compose the chosen presets and Hydra's own settings, without resolving references. Raises ConfigError."""
    lines = tuple(override.input_line or "" for override in choices)
    if config_dir is None:
        return copy.deepcopy(_shipped(lines))
    for override in choices:
        check_preset(config_dir, override.key_or_group, str(override.value()))
    return _composed((f"hydra.searchpath=[file://{Path(config_dir).resolve()}]", *lines))


def _composed(lines: tuple[str, ...]) -> DictConfig:
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(CONFIG_DIR), version_base="1.3"):
            return hydra_compose(PRIMARY, list(lines))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(explain(error)) from error


_shipped = functools.cache(_composed)  # runs of a sweep, and tests, compose the same presets many times


def load(path: str | Path) -> Config:
    """Read the configuration that a run stored in its `config.yaml`.

    Raises ConfigError if the file is missing, is not a YAML mapping, or does not fit the schema.
    """
    content = read_mapping(Path(path))
    try:
        check_mapping(content)
        config = OmegaConf.structured(Config)
        config.merge_with(content)
        return to_config(config)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def to_yaml(config: Config) -> str:
    """Return the configuration as YAML text that `load` can read."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def given_keys(overrides: list[str]) -> frozenset[str]:
    """Return the dotted names of the keys that a command line sets itself, not through a preset. Raises ConfigError."""
    return frozenset(key for text in overrides if (key := parse(text).key_or_group) in KEYS)


def run(main: Callable[[Config, frozenset[str]], int]) -> NoReturn:
    """Run `main` with the configuration of the command line and the keys that the command line sets; exit with the
    status that `main` returns.

    A `ConfigError`, also one that `main` raises, prints one line on stderr and ends with exit status 2. Hydra handles
    `--cfg`, `--info` and shell completion. `-m` (`--multirun`) runs every combination of comma-separated values, one
    run after the other in this process; all combinations are validated first.
    """
    prints_only = True
    try:
        if "--version" in sys.argv[1:]:  # Hydra's parser would print its own
            print(help.version(), flush=True)
            sys.exit(0)
        args = get_args_parser().parse_args()
        configs = _checked_configs(args)
        if configs is None:
            _show(args)
            sys.stdout.flush()
            sys.exit(0)
        status = 0
        for config, given in configs:
            prints_only = bool(config.plan)
            status = status or main(config, given)
            if prints_only:
                sys.stdout.flush()
    except BrokenPipeError:
        if not prints_only:  # an error during training
            raise
        command.drop_output()
        sys.exit(0)
    except ConfigError as error:
        exit_handler.log(f"config error: {error}", exit_handler.WRONG_CONFIG)
        sys.exit(exit_handler.WRONG_CONFIG)
    sys.exit(status)


def _checked_configs(args: argparse.Namespace) -> list[tuple[Config, frozenset[str]]] | None:
    """Return the validated configurations to run, each with the keys that its command line sets. Returns None if Hydra
    is to print something instead."""
    for option in ("config_path", "config_name", "experimental_rerun"):
        if getattr(args, option, None) is not None:
            raise ConfigError(
                f"--{option.replace('_', '-')} is not supported. Try --config-dir FOLDER for presets of your own"
            )
    if args.config_dir is not None and not Path(args.config_dir).is_dir():
        rule = f"must be an existing folder of presets, such as {CONFIG_DIR.name}"
        raise ConfigError(f"--config-dir ({args.config_dir}) {rule}. Correct its path")
    if args.resolve and not (args.cfg or args.help):
        raise ConfigError("--resolve needs --cfg or --help. Try --cfg job --resolve")
    if args.multirun and (args.cfg or args.info is not None):
        raise ConfigError("--multirun cannot be combined with --cfg or --info. Try only one of these options")
    if args.help:
        print(help.describe(compose(args.overrides, args.config_dir), presets_by_group(args.config_dir)), flush=True)
        sys.exit(0)
    if args.cfg:
        compose(args.overrides, args.config_dir)
    if args.cfg or args.hydra_help or args.info is not None or args.shell_completion:
        return None

    lines = [args.overrides]
    if args.multirun:
        try:
            batches = BasicSweeper.split_arguments([parse(text) for text in args.overrides], max_batch_size=None)
        except HydraException as error:
            raise ConfigError(
                f"the sweep (-m) cannot be parsed: {one_line(str(error))}. Try key=value,value"
            ) from error
        lines = [line for batch in batches for line in batch]
    launch = launched()
    launch.check_meeting()
    configs = []
    for line in lines:
        config, given = compose(line, args.config_dir), given_keys(line)
        configs.append((config, given))
        if searches_layout(config):
            validate_for_search(config, given, launch.world_size)
        else:
            used = planned_world_size if config.plan else usable_world_size
            validate(config, used(config, launch.world_size))
    run_dirs = [config.run_dir for config, _ in configs]
    if len(set(run_dirs)) < len(run_dirs):
        swept = next(o.get_key_element() for o in map(parse, args.overrides) if o.is_sweep_override())
        own = f"'name={configs[0][0].name}_${{{swept}}}'"
        advice = own if "." in swept else "separate commands, each with its own name=..."
        raise ConfigError(f"run_dir ({run_dirs[0]}) must be different in each run of a sweep. Try {advice}")
    return configs


def _show(args: argparse.Namespace) -> None:
    """Make Hydra print the information that the options request. The overrides must already have been checked."""

    def never(_: Any) -> NoReturn:
        raise AssertionError("Hydra was called to print something, not to run")

    as_read = {text: for_hydra(parse(text)) for text in args.overrides}
    hidden = [text for text in args.overrides if parse(text).key_or_group == HIDDEN]
    if hidden:
        # The last value counts. As the default of the schema, Hydra does not take it for the choice of a group.
        default = Config(**{HIDDEN: getattr(compose(hidden, args.config_dir), HIDDEN)})
        ConfigStore.instance().store(name="schema", node=default)
    sys.argv = [as_read.get(text, text) for text in sys.argv if text not in hidden]
    hydra_main(version_base="1.3", config_path=str(CONFIG_DIR), config_name=PRIMARY)(never)()
