"""Check the files and the machine that a config names, within a second and before torch is imported."""

from __future__ import annotations

import os
from pathlib import Path

from base.errors import ConfigError
from base.ranks import launched
from checkpoint import manifest, start
from configs import derived
from configs.schema import Config
from configs.tokenizer_files import core_file
from data.corpus import parse_corpus, parse_validation
from data.tokenizer import load_tokenizer, tokenizer_digest
from parallel.card import refuse_missing
from simulator.parameters import rank_coordinates
from training.starting import limits
from training.starting.machine import machine_of, refuse_another_kind

WANDB_MODE = "WANDB_MODE"  # wandb's own variable; its value disabled overrides the config


def check(config: Config) -> None:
    """Raise ConfigError if the run cannot start: a device, corpus, tokenizer, checkpoint, weights folder or plan file
    is missing, `hardware` has the wrong kind of device, the vocabulary is too small, a limit of the shell is too low,
    or run_dir cannot be used."""
    limits.check(launched().world_size, config.training.device != "cpu")
    refuse_missing(config.training.device, "training.device")
    if config.hardware is not None:
        refuse_another_kind(machine_of(config)[0], config)
    if config.logging.wandb == "online" and os.environ.get(WANDB_MODE) != "disabled":
        _check_wandb()
    replay = config.moe.placement.replay
    if replay is not None and not any(Path(replay).glob("placement_*.plans")):
        raise ConfigError(
            f"moe.placement.replay ({replay}) must be a folder with placement_*.plans files, which a run "
            "with moe.placement.record=true writes. Try moe.placement.replay=null to plan anew."
        )
    if config.moe.all_to_all == "hierarchical" and not config.training.elastic:
        _check_nodes(config)
    parse_corpus(config.data.corpus)
    parse_validation(config.data.validation_corpora)
    found = start.find(config, manifest.problem_with)  # the ranks read the bytes later, together
    if found.checkpoint is not None:
        start.check_model(config, None, found.checkpoint)
        start.changed_settings(config, found)
        start.data_config(config, found)
        start.check_tokenizer(config, found)
    if config.data.tokenizer != "sentencepiece":  # sentencepiece is trained in this run, to a size that was checked
        weights = config.checkpoint.weights
        source = found.checkpoint or (None if weights is None else Path(weights))
        _check_vocabulary(config, load_tokenizer(start.data_config(config, found).tokenizer).vocab_size, source)
    if found.checkpoint is None and config.checkpoint.weights is not None:
        weights_folder, named = Path(config.checkpoint.weights), config.data.tokenizer
        if core_file(weights_folder) is not None and tokenizer_digest(named) != tokenizer_digest(weights_folder):
            raise ConfigError(
                f"data.tokenizer ({named}) differs from the tokenizer in checkpoint.weights ({weights_folder}): the "
                "same token ids stand for different text there. Leave data.tokenizer out, or try "
                f"data.tokenizer={weights_folder}."
            )
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0 and not Path(config.run_dir).exists():
        raise ConfigError(
            f"run_dir ({config.run_dir}) was deleted or moved while the run was writing to it. Restore it, or start "
            "a new run."
        )
    try:
        Path(config.run_dir).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"run_dir ({config.run_dir}) cannot be created: {error.strerror}. Set run_dir to a writable folder."
        ) from error


def _check_nodes(config: Config) -> None:
    """Raise ConfigError unless this rank's expert parallel group spans several nodes and has several ranks on this
    node, as a hierarchical all-to-all needs."""
    launch = launched()
    if launch.local_rank is None or launch.local_world_size is None:
        return  # the ranks exchange it later
    everyone, split = list(rank_coordinates(config, launch.world_size)), derived.expert_tensor_size(config)
    first = launch.rank - launch.local_rank
    keys = [(each.stage, each.expert_data, each.rank % split) for each in everyone]
    group = [each.rank for each, key in zip(everyone, keys) if key == keys[launch.rank]]
    here = sum(first <= rank < first + launch.local_world_size for rank in group)
    if not 1 < here < len(group):
        raise ConfigError(
            "moe.all_to_all (hierarchical) needs an expert parallel group with several ranks on each of several "
            f"nodes; this rank's group has {len(group)} ranks, {here} of them on its node. Try moe.all_to_all=flat."
        )


def _check_wandb() -> None:
    import wandb  # takes a second to import; only where it is used

    wandb.setup(wandb.Settings(silent=True))
    try:
        has_key = wandb.login(prompt=False, verify=False)
    except (wandb.errors.Error, ValueError) as error:  # a malformed key, or a file of keys that cannot be read
        raise ConfigError(
            f"logging.wandb (online) needs an API key: {str(error).rstrip('.')}. Try logging.wandb=offline."
        ) from error
    if not has_key:
        raise ConfigError(
            "logging.wandb (online) needs an API key, but none is set. Try logging.wandb=offline, or set WANDB_API_KEY."
        )


def _check_vocabulary(config: Config, tokenizer_size: int, source: Path | None) -> None:
    """Raise ConfigError if the model's vocabulary is smaller than the tokenizer's. `source`: the checkpoint or weights
    folder, if any, that fixes the vocabulary size."""
    size = config.model.vocab_size
    if size is None or size >= tokenizer_size:
        return
    advice = "Try model.vocab_size=null to follow the tokenizer"
    if source is not None:
        advice = f"The vocabulary of {source} cannot change: give a data.tokenizer with at most {size} tokens"
    raise ConfigError(
        f"model.vocab_size ({size}) must be at least the vocabulary of data.tokenizer ({tokenizer_size}): some tokens "
        f"would have no embedding. {advice}."
    )
