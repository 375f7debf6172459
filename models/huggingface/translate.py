"""The families of Hugging Face models: config.json <-> our config, and which family can hold a model. What a family is,
its file in families/ says; its tensors are in tensors.py. Imports no torch, since the plan of a run asks for families.
"""

from __future__ import annotations

import copy

from configs.architecture import architecture
from configs.schema import Config, ConfigError
from configs.show import show_both
from configs.weights import config_from
from models.huggingface.families import (
    bert,
    deepseek_v2,
    deepseek_v3,
    gpt2,
    llama,
    mixtral,
    olmoe,
    phi3,
    qwen,
    qwen3_moe,
)
from models.huggingface.families.keys import HfConfig, read_keys
from models.huggingface.families.rules import Family, Overrides
from models.huggingface.unknown_keys import carried_keys, to_text

# Where several can hold a model, an export takes the first.
FAMILIES = {
    family.model_type: family
    for family in (
        *(gpt2.FAMILY, llama.FAMILY, mixtral.MISTRAL, qwen.QWEN2, qwen.QWEN3, phi3.FAMILY),
        *(mixtral.FAMILY, qwen3_moe.FAMILY, olmoe.FAMILY, deepseek_v3.FAMILY, deepseek_v3.KIMI, deepseek_v2.FAMILY),
        bert.FAMILY,
    )
}


def read_config(hf: HfConfig) -> tuple[Family, Overrides]:
    """The family of a config.json and our overrides for it. Raises ConfigError for what is not supported."""
    family, _, overrides = read_all(hf)
    return family, overrides


def read_all(hf: HfConfig) -> tuple[Family, HfConfig, Overrides]:
    """The same, with the value of every key of the family's table. Raises ConfigError."""
    model_type = hf.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ConfigError(
            f"config.json model_type ({model_type}) is not supported: it must be one of {', '.join(FAMILIES)}."
        )
    family = FAMILIES[model_type]
    if hf.get("quantization_config") is not None:
        from models.huggingface.quantized import read_quantization

        read_quantization(hf)  # what cannot be read is said before single keys
    keys = read_keys(hf, model_type, family.keys)
    overrides = family.read(keys)
    others = carried_keys(hf, family, architecture(config_from(overrides), keys["vocab_size"]))
    if others:
        overrides["model"]["config_json"] = to_text(others)
    moe = overrides.get("moe", {})
    if moe.get("top_k") == 1 and moe.get("normalize_top_k", True):
        raise ConfigError(
            "config.json num_experts_per_tok (1) is not supported with weights that sum to 1: it must be at least 2."
        )
    model = overrides["model"]
    if model["position_embedding"] == "rope":
        model["max_positions"] = model["sequence_length"]
    model["export_family"] = family.runs_as
    return family, keys, overrides


def write_config(config: Config) -> tuple[Family, HfConfig]:
    """The family that can hold this model, and its config.json. Raises ConfigError if none can, with what differs from
    the nearest."""
    vocab_size = config.model.vocab_size
    if vocab_size is None:
        raise ConfigError("model.vocab_size (null) must be set to export a model.")
    ours = architecture(config, vocab_size)
    # no weight depends on a length; what the model could take before it still can
    if config.model.position_embedding == "rope":
        config = copy.deepcopy(config)
        config.model.sequence_length = max(config.model.sequence_length, config.model.max_positions or 0)
        ours["model"]["sequence_length"] = config.model.sequence_length
    if ours["model"].get("sentence_head") == "sentence_order":
        ours["model"]["sentence_head"] = "next_sentence"  # the same weights, trained with other labels
    nearest: list[str] | None = None
    refused: list[str] = []
    wanted = config.model.export_family
    tried = [family for family in FAMILIES.values() if wanted in (None, family.model_type)]
    for family in tried:
        if wanted is None and family.is_moe != (config.moe.num_experts is not None):
            continue
        hf = family.write(config)
        try:
            theirs = architecture(config_from(read_all(hf)[2]), vocab_size)
        except ConfigError as error:  # what the family calls so would be another model
            refused.append(str(error).removesuffix("."))
            continue
        between = f"; {family.model_type} has "
        wrong = [
            f"{section}.{key} ({between.join(show_both(value, theirs[section].get(key)))})"
            for section in ours
            for key, value in ours[section].items()
            if theirs[section].get(key) != value
        ]
        if not wrong:
            return family, hf
        if nearest is None or len(wrong) < len(nearest):
            nearest = wrong
    differs = ", ".join(nearest or refused)
    if wanted is not None:
        raise ConfigError(
            f"model.export_family ({wanted}) cannot hold this model: {differs}. Remove it to export in any family."
        )
    raise ConfigError(f"no Hugging Face family of {', '.join(FAMILIES)} has this model: {differs}.")


def unexportable(config: Config, vocab_size: int) -> str | None:
    """Why no Hugging Face family can hold the model of a run with this vocabulary; None where one can."""
    config = copy.deepcopy(config)
    config.model.vocab_size = config.model.vocab_size or vocab_size
    try:
        write_config(config)
    except ConfigError as error:
        return str(error)
    return None
