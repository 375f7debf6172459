"""Hugging Face's model families <-> our config and logical weights; what a family is, its file in models/families says."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from configs import derived
from configs.architecture import architecture
from configs.schema import Config, ConfigError
from models.families import bert, deepseek_v3, gpt2, llama, mixtral, olmoe, qwen3_moe
from models.families.rules import Family, Heads, HfConfig, Overrides, Rule
from models.folder import config_from, read_json, show_json

Get = Callable[[str], torch.Tensor]
FAMILIES = {module.FAMILY.model_type: module.FAMILY for module in (gpt2, llama, mixtral, qwen3_moe, olmoe, deepseek_v3, bert)}


def read_config(hf: HfConfig) -> tuple[Family, Overrides]:
    """The family of a config.json and our overrides for it. Raises ConfigError for what is not supported."""
    model_type = hf.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ConfigError(f"config.json model_type ({model_type}) is not supported: it must be one of {', '.join(FAMILIES)}.")
    family = FAMILIES[model_type]
    if hf.get("quantization_config") is not None:
        settings = show_json(hf["quantization_config"])
        raise ConfigError(f"config.json quantization_config ({settings}) is not supported: weights must be fp32, bf16 or fp16.")
    try:
        overrides = family.read(hf)
    except KeyError as error:
        raise ConfigError(f"config.json of a {model_type} model must have the key {error}.") from error
    moe = overrides.get("moe", {})
    if moe.get("top_k") == 1 and moe.get("normalize_top_k", True):
        raise ConfigError("config.json num_experts_per_tok (1) is not supported with weights that sum to 1: it must be at least 2.")
    if overrides["model"]["position_embedding"] == "rope":
        overrides["model"]["max_positions"] = overrides["model"]["sequence_length"]
    return family, overrides


def write_config(config: Config) -> tuple[Family, HfConfig]:
    """The family that can hold this model, and its config.json. Raises ConfigError if none can, with what differs from the nearest."""
    vocab_size = config.model.vocab_size
    if vocab_size is None:
        raise ConfigError("model.vocab_size (null) must be set to export a model.")
    ours = architecture(config, vocab_size)
    if config.model.position_embedding == "rope":  # no weight depends on a length; what the model could take before it still can
        config = copy.deepcopy(config)
        config.model.sequence_length = max(config.model.sequence_length, config.model.max_positions or 0)
        ours["model"]["sequence_length"] = config.model.sequence_length
    if ours["model"].get("sentence_head") == "sentence_order":
        ours["model"]["sentence_head"] = "next_sentence"  # the same weights, trained with other labels
    nearest: list[str] | None = None
    for family in FAMILIES.values():
        if family.is_moe != (config.moe.num_experts is not None):
            continue
        hf = family.write(config)
        theirs = architecture(config_from(family.read(hf)), vocab_size)
        wrong = [
            f"{section}.{key} ({value}; {family.model_type} has {theirs[section].get(key)})"
            for section in ours
            for key, value in ours[section].items()
            if theirs[section].get(key) != value
        ]
        if not wrong:
            return family, hf
        if nearest is None or len(wrong) < len(nearest):
            nearest = wrong
    raise ConfigError(f"no Hugging Face family of {', '.join(FAMILIES)} has this model: {', '.join(nearest or [])}.")


def expand_rules(family: Family, config: Config) -> Iterator[Rule]:
    """The family's rules with every layer and expert of this model filled in."""
    pattern = derived.moe_layer_pattern(config)
    for rule in family.rules:
        if not rule.when(config):
            continue
        layers = range(config.model.num_layers) if "{l}" in rule.ours else [0]
        for layer in layers:
            if rule.only != "all" and (rule.only == "moe") != bool(pattern[layer]):
                continue
            for expert in range(config.moe.num_experts or 0) if "{e}" in rule.ours else [0]:
                fill = {"l": layer, "e": expert}
                yield Rule(rule.ours.format(**fill), tuple(name.format(**fill) for name in rule.theirs), rule.layout)


def open_config(path: Path) -> tuple[Family, Config]:
    """The family and our config of a Hugging Face folder. Raises ConfigError."""
    file = path / "config.json"
    if not file.exists():
        raise ConfigError(f"folder {path} must hold a config.json, as Hugging Face's save_pretrained writes it.")
    family, overrides = read_config(read_json(file))
    return family, config_from(overrides)


def import_weights(family: Family, config: Config, names: set[str], get: Get) -> Iterator[tuple[str, torch.Tensor]]:
    """Stream (logical name, tensor) from Hugging Face's tensors `names`, read by `get`.

    Raises ConfigError for a tensor that is missing, or left over because the model is another than config.json says.
    """
    heads = _heads(config)
    for rule, found in _sources(family, config, names):
        yield rule.ours, rule.layout.to_ours([get(name) for name in found], heads)


def logical_reader(family: Family, config: Config, names: set[str], get: Get) -> Get:
    """The same as a function from a logical name to its tensor, for a rank that needs only some. Raises ConfigError."""
    heads = _heads(config)
    sources = {rule.ours: (rule, found) for rule, found in _sources(family, config, names)}

    def read(name: str) -> torch.Tensor:
        rule, found = sources[name]
        return rule.layout.to_ours([get(theirs) for theirs in found], heads)

    return read


def _sources(family: Family, config: Config, names: set[str]) -> list[tuple[Rule, list[str]]]:
    sources = [(rule, [_find(family, name, names) for name in rule.theirs]) for rule in expand_rules(family, config)]
    used = {name for _, found in sources for name in found}
    tied = {"lm_head.weight", "cls.predictions.decoder.weight"} if config.model.tie_embeddings else set()
    left = sorted(name for name in names - used - tied if not family.carries_nothing(name, config))
    if left:
        raise ConfigError(
            f"{len(left)} tensors of the Hugging Face folder have no place in a {family.model_type} model, the first: {left[0]}."
        )
    return sources


def export_weights(family: Family, config: Config, get: Get) -> Iterator[tuple[str, torch.Tensor]]:
    """Stream (Hugging Face name, tensor) from logical tensors, read by `get`."""
    heads = _heads(config)
    for rule in expand_rules(family, config):
        yield from zip(rule.theirs, rule.layout.to_theirs(get(rule.ours), heads), strict=True)


def _heads(config: Config) -> Heads:
    return Heads(config.model.num_attention_heads, derived.num_query_groups(config), derived.head_dim(config))


def _find(family: Family, name: str, names: set[str]) -> str:
    candidates = [name] + [name.replace(now, before) for now, before in family.other_names if name.endswith(now)]
    candidates += [candidate.removeprefix(family.base_prefix) for candidate in candidates]
    for candidate in candidates:
        if candidate in names:
            return candidate
    raise ConfigError(f"the Hugging Face folder has no tensor {name}, which config.json calls for.")
