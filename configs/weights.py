"""The model of `checkpoint.weights`, a folder of logical weights (weights stored independently of any layout).

The sections `model` and `moe` of the folder's config.yaml override presets; a conflict with the command line is an
error. The run uses the folder's tokenizer; a tokenizer named on the command line must have the same content.
"""

from __future__ import annotations

import copy
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from base import checksums, files
from base.errors import ConfigError
from configs.architecture import architecture
from configs.keys import get, put
from configs.rotary import normalised
from configs.schema import KEYS, Config
from configs.show import show_both
from configs.tokenizer_files import core_file

FORMAT = "mixtrain-weights-1"
SECTIONS = ("model", "moe")
AGAIN = "Import or export the folder again."
# Keys that no preset sets: the folder's value counts even if a preset of the model is named.
OF_THE_WEIGHTS = ("model.vocab_size", "model.max_positions", "model.export_family", "model.config_json")


def read_config(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the sections `model` and `moe` from config.yaml of a folder of logical weights. Raises ConfigError if the
    folder is missing or was changed since it was written. Of weight files, only the sizes are checked."""
    path = folder / "config.yaml"
    check_files(folder)
    try:
        content = files.read_yaml(path) if path.exists() else None
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {' '.join(str(error).split())}. {AGAIN}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        stated = content.get("format") if isinstance(content, dict) else None
        has = f"its config.yaml has format {stated}" if path.exists() else "it has no config.yaml"
        raise ConfigError(
            f"folder {folder} must contain a config.yaml of format {FORMAT}, but {has}. Create the folder with "
            "`python -m models.convert import`."
        )
    found, typed = {section: content.get(section) for section in SECTIONS}, OmegaConf.structured(Config)
    for section, values in found.items():
        if not isinstance(values, dict):
            raise ConfigError(f"{path}: {section} must be a mapping of keys to values, not {values}. {AGAIN}")
        for key, value in values.items():
            if f"{section}.{key}" not in KEYS:
                raise ConfigError(f"{path}: {section}.{key} is not a key of this version of Mixtrain. {AGAIN}")
            try:
                typed.merge_with({section: {key: value}})
            except OmegaConfBaseException as error:
                rule = KEYS[f"{section}.{key}"].rule()
                raise ConfigError(f"{path}: {section}.{key} ({value}) must be {rule}. {AGAIN}") from error
        if "rotary_scaling" in values:
            values["rotary_scaling"] = normalised(values["rotary_scaling"])
    return {section: dict(values) for section, values in found.items() if values is not None}


def check_files(folder: Path, weights: slice | None = None) -> None:
    """Raise ConfigError if files of a folder of logical weights were changed since the folder was written. A folder
    without checksums passes.

    weights: the weight files to read, as a slice of the list sorted by name; None reads all files except weight files.
    """
    try:
        sums = checksums.read_folder_sums(folder)
    except (OSError, ValueError) as error:
        problems = [f"its file {checksums.FOLDER_SUMS} cannot be read: {error}"]
    else:
        of_weights = sorted(name for name in sums if name.endswith(".safetensors"))
        chosen = sorted(sums.keys() - set(of_weights)) if weights is None else of_weights[weights]
        problems = [line for name, entry in sums.items() if (line := checksums.size_problem(folder / name, entry))]
        problems = problems or checksums.wrong_files(folder, sums, chosen)
    if problems:
        raise ConfigError(
            f"folder {folder} was changed after it was written: {problems[0]}. Copy the folder again, or delete its "
            f"{checksums.FOLDER_SUMS} to use it as it is."
        )


def config_from(overrides: dict[str, dict[str, Any]]) -> Config:
    """Return the default configuration with the given keys replaced. Raises ConfigError for an unknown key."""
    config = Config()
    for section, values in overrides.items():
        target = getattr(config, section)
        if unknown := set(values) - {field.name for field in fields(target)}:
            key = f"{section}.{min(unknown)}"
            raise ConfigError(f"{key} is not a key of this version of Mixtrain. Remove it from the model's config")
        for key, value in values.items():
            setattr(target, key, value)
    return config


def adopt(config: Config, named: set[str]) -> None:
    """Set the model and the tokenizer of a composed configuration to those of the folder `checkpoint.weights`.

    named: keys and groups of the command line. Raises ConfigError if the folder is invalid, or if the command line
    names another model.
    """
    assert config.checkpoint.weights is not None
    folder = Path(config.checkpoint.weights)
    if not folder.exists() and _adopt_again(config, named):
        return
    theirs = read_config(folder)
    if theirs["model"].get("vocab_size") is None:
        raise ConfigError(f"{folder / 'config.yaml'} must contain model.vocab_size. {AGAIN}")
    _adopt_model(config, theirs, named, folder)
    if config.data.tokenizer == KEYS["data.tokenizer"].default:
        if core_file(folder) is None:
            raise ConfigError(
                f"checkpoint.weights ({folder}) contains no tokenizer, and the weights need the tokenizer that they "
                "were trained with. Set data.tokenizer=PATH."
            )
        config.data.tokenizer = str(folder)


def _adopt_model(config: Config, theirs: dict[str, dict[str, Any]], named: set[str], origin: Path) -> None:
    is_dense = theirs["moe"].get("num_experts") is None
    for name, key in KEYS.items():
        section, _, last = name.partition(".")
        asked = name in named or section in named or "experiment" in named
        if section not in SECTIONS:
            continue
        of_the_weights = name in OF_THE_WEIGHTS and name not in named
        if last in theirs[section] and (of_the_weights or not asked):
            put(config, name, copy.deepcopy(theirs[section][last]))
        elif not asked and (key.architecture or (section == "moe" and is_dense)):
            put(config, name, key.fresh_default())
    vocab_size = get(config, "model.vocab_size")
    ours = architecture(config, vocab_size)
    for section in reversed(SECTIONS):  # report a wrong number of experts before a width that follows from it
        names = [*ours[section], *(key for key in theirs[section] if KEYS[f"{section}.{key}"].architecture)]
        for last in dict.fromkeys(names):
            name, mine, their = f"{section}.{last}", ours[section].get(last), theirs[section].get(last)
            if mine != their and not means_nothing(config, name, mine, their):
                shown, theirs_shown = show_both(mine, their)
                raise ConfigError(
                    f"{name} ({shown}) must be {theirs_shown}, the value of the model in checkpoint.weights "
                    f"({origin}). Remove {name} and presets of another model from the command line."
                )


def means_nothing(config: Config, name: str, one: Any, other: Any) -> bool:
    """Return whether a model's weights stay valid if the key `name` changes from `one` to `other`: rotary positions
    have no weights that depend on the sequence length, and both sentence heads have the same weights."""
    if name == "model.sequence_length":
        return config.model.position_embedding == "rope"
    return name == "model.sentence_head" and "none" not in (one, other)


def _adopt_again(config: Config, named: set[str]) -> bool:
    """If the run started from the folder of weights, which is now missing, set the model and the tokenizer from the
    run's config.yaml, and return True; else return False. named: keys and sections of the command line, which are
    kept."""
    path = Path(config.run_dir) / "config.yaml"
    try:
        kept = files.read_yaml(path)
        if (
            Path(kept["checkpoint"]["weights"]).resolve() != Path(str(config.checkpoint.weights)).resolve()
            or not (path.parent / "checkpoints").is_dir()
        ):
            return False
        theirs = {
            section: {key: value for key, value in kept[section].items() if key != "placement"} for section in SECTIONS
        }
        tokenizer = kept["data"]["tokenizer"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError):
        return False
    for section, values in theirs.items():
        for last, value in values.items():
            name = f"{section}.{last}"
            if name in KEYS and not {name, section, "experiment"} & named:
                put(config, name, value)
    if config.data.tokenizer == KEYS["data.tokenizer"].default:
        config.data.tokenizer = tokenizer
    return True
