"""Translates config.json to our config and back; finds the family of a folder, and the family that can represent a
model. Each family has a file in families/; tensors.py maps its tensors. Imports no torch, because the plan of a run
needs families.

A config.json may lack its family, or the class whose heads its weights have. Both are then inferred and checked: keys,
and names and shapes of all tensors must be those of the family.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable

from base.errors import ConfigError
from configs.architecture import architecture
from configs.schema import Config
from configs.show import show_both
from configs.weights import config_from
from models.huggingface.families import bert, deepseek, gpt2, llama, mixtral, olmoe, phi3, qwen
from models.huggingface.families.keys import HfConfig, read_keys, show
from models.huggingface.families.rules import Family, Overrides
from models.huggingface.unknown_keys import carried_keys, to_text

# An export takes the first family that can hold the model.
FAMILIES = {
    family.model_type: family
    for family in (
        *(gpt2.FAMILY, llama.FAMILY, mixtral.MISTRAL, qwen.QWEN2, qwen.QWEN3, phi3.FAMILY),
        *(mixtral.FAMILY, qwen.QWEN3_MOE, olmoe.FAMILY, deepseek.V3, deepseek.KIMI, deepseek.V2),
        bert.FAMILY,
    )
}

# Names of transformers' classes: the family's name, then a class of model.
CLASS = re.compile(r"(\w+?)(Model|LMHeadModel|DoubleHeadsModel|For[A-Z]\w*)")
# Heads of transformers' classes for other tasks than predicting tokens.
OTHER_HEADS = re.compile(r"(classifier|score|qa_outputs|multiple_choice_head\.summary)\.(weight|bias)")

Names = Callable[[], set[str]]  # returns the names of the folder's tensors; called only if they are needed


def identify(hf: HfConfig, names: Names) -> tuple[HfConfig, list[str]]:
    """Infer the family and class that a config.json lacks from the folder's tensors; return the completed keys, and a
    note for the user about each inferred value. Raises ConfigError if the family cannot be inferred."""
    notes: list[str] = []
    if hf.get("model_type") is None:
        model_type, because = _model_type(hf, names)
        hf = {**hf, "model_type": model_type}
        notes.append(f"config.json has no model_type: the folder is read as {model_type}, because of {because}")
    model_type = hf["model_type"]
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is not None and family.class_by_tensors is not None:
        class_name = family.class_by_tensors(hf, names)
        if class_name is not None:
            stated = hf.get("architectures")
            notes.append(
                f"config.json has {'no architectures' if not stated else f'architectures ({show(stated[0])})'}: the "
                f"folder is read as {class_name}, by its tensors"
            )
            hf = {**hf, "architectures": [class_name]}
    return hf, notes


def _model_type(hf: HfConfig, names: Names) -> tuple[str, str]:
    known = {name.replace("_", ""): name for name in FAMILIES}
    classes = hf.get("architectures")
    if isinstance(classes, list) and classes and all(isinstance(name, str) for name in classes):
        found = {match[1].lower() if (match := CLASS.fullmatch(name)) else name for name in classes}
        if len(found) == 1 and found <= known.keys():
            return known[found.pop()], f"architectures ({classes[0]})"
    else:
        there = sorted(names())
        matches = [
            (family.model_type, name)
            for family in FAMILIES.values()
            if family.telling is not None
            and (name := next((name for name in there if re.fullmatch(family.telling, name)), None)) is not None
        ]
        if len(matches) == 1:
            ((model_type, name),) = matches
            return model_type, f"tensor {name}"
    raise ConfigError(
        f"config.json has no model_type, and neither architectures ({show(classes)}) nor the names of the tensors "
        f"identify the model. Add model_type with one of {', '.join(FAMILIES)}."
    )


def read_config(hf: HfConfig) -> tuple[Family, HfConfig, Overrides]:
    """Return the family of a config.json, the value of every key in the family's table, and the overrides for our
    config. Raises ConfigError if the model is not supported."""
    model_type = hf.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ConfigError(
            f"config.json model_type ({model_type}) is not supported: it must be one of {', '.join(FAMILIES)}. Choose "
            "a different model."
        )
    family = FAMILIES[model_type]
    if hf.get("quantization_config") is not None:
        from models.huggingface.quantized import read_quantization

        read_quantization(hf)  # its error is more useful than one about a single key
    keys = read_keys(hf, model_type, family.keys)
    overrides = family.read(keys)
    others = carried_keys(hf, family, architecture(config_from(overrides), keys["vocab_size"]))
    if others:
        overrides["model"]["config_json"] = to_text(others)
    moe = overrides.get("moe", {})
    if moe.get("top_k") == 1 and moe.get("normalize_top_k", True):
        raise ConfigError(
            "config.json num_experts_per_tok (1) must be at least 2 if the probabilities of a token's experts are "
            "scaled to sum to 1 (norm_topk_prob). Choose a model with at least 2 experts per token."
        )
    model = overrides["model"]
    if model["position_embedding"] == "rope":
        model["max_positions"] = model["sequence_length"]
    model["export_family"] = family.runs_as
    return family, keys, overrides


def write_config(config: Config) -> tuple[Family, HfConfig]:
    """Return the Hugging Face family that can represent this model, and its config.json. Raises ConfigError if there is
    none, listing the differences from the nearest family."""
    vocab_size = config.model.vocab_size
    if vocab_size is None:
        raise ConfigError(
            "model.vocab_size (null) must be set to export a model. Set it to the size of the vocabulary."
        )
    ours = architecture(config, vocab_size)
    # No weight depends on the length, so the model can still take the longest sequence that it could when imported.
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
            theirs = architecture(config_from(read_config(hf)[2]), vocab_size)
        except ConfigError as error:  # the family's config.json would mean another model
            refused.append(str(error).partition(". ")[0].removesuffix("."))  # without its advice
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
            f"model.export_family ({wanted}) cannot represent this model: {differs}. Remove it to allow any family."
        )
    raise ConfigError(
        f"no Hugging Face family ({', '.join(FAMILIES)}) can represent this model: {differs}. Only a folder of logical "
        "weights can hold it: write one with `python -m checkpoint.export`."
    )


def unexportable(config: Config, vocab_size: int) -> str | None:
    """Return the reason why no Hugging Face family can represent this model and vocabulary size; None if one can."""
    config = copy.deepcopy(config)
    config.model.vocab_size = config.model.vocab_size or vocab_size
    try:
        write_config(config)
    except ConfigError as error:
        return str(error)
    return None
