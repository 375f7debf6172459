"""The architecture of a configured model: the values that determine the names, shapes and meaning of its weights."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from configs import derived, rotary
from configs.keys import get, put
from configs.schema import KEYS, Config


def architecture(config: Config, vocab_size: int) -> dict[str, dict[str, Any]]:
    """Return the values of the sections `model` and `moe` that determine the names, shapes and meaning of the weights,
    with all defaults resolved. The result is equal for equal models."""
    model = {key: getattr(config.model, key) for key in _MODEL_ARCHITECTURE}
    model["vocab_size"] = vocab_size
    model["ffn_hidden_size"] = derived.ffn_hidden_size(config)
    model["num_query_groups"] = derived.num_query_groups(config)
    model["head_dim"] = derived.head_dim(config)
    model["qkv_bias"] = model["qkv_bias"] or model["linear_bias"]
    if model["attention"] == "grouped":
        for key in _LATENT_ONLY:
            del model[key]
    else:
        del model["num_query_groups"]
    if not model["qk_norm"] or model["qk_norm_over"] == "head":
        del model["qk_norm_over"]
    if model["position_embedding"] != "rope":
        del model["rotary_base"], model["rotary_fraction"], model["rotary_scaling"]
    else:
        model["rotary_scaling"] = rotary.normalised(model["rotary_scaling"])
    if model["sliding_window"] is None:
        del model["sliding_window_from"]
    if model["family"] != "bert":
        del model["sentence_head"]
    moe: dict[str, Any] = {"num_experts": config.moe.num_experts}
    if config.moe.num_experts is not None:
        moe = {key: getattr(config.moe, key) for key in _MOE_ARCHITECTURE}
        moe["ffn_hidden_size"] = derived.expert_ffn_hidden_size(config)
        moe["layers"] = derived.moe_layer_pattern(config)
        if moe["group_top_k"] is None or moe["group_score_top_k"] == moe["top_k"] / moe["group_top_k"]:
            moe["group_score_top_k"] = None  # the same choice
        if all(moe["layers"]):
            model["ffn_hidden_size"] = moe["ffn_hidden_size"]  # no dense layer uses its own value
    return {"model": model, "moe": moe}


def for_use(config: Config) -> Config:
    """Return the configuration with which a trained model is opened: the model's own values of the keys that belong to
    it, and defaults for the keys that only concerned its training."""
    opened = Config()
    for name, key in KEYS.items():
        if key.of_the_model:
            put(opened, name, copy.deepcopy(get(config, name)))
    opened.data.tokenizer = "given"  # so that the rules for training a tokenizer do not apply
    return opened


def to_architecture(
    config: Config, theirs: dict[str, dict[str, Any]], vocab_size: int
) -> tuple[Config, dict[str, Any]]:
    """Copy `config`, and change as few keys as possible so that its architecture is `theirs`. Returns the copy, and the
    changed keys with their values; keys that determine other keys are first.

    theirs: the values of the sections model and moe. vocab_size: the vocabulary size of `config`. With rotary
    positions, the sequence length may differ.
    """
    changed, keys = copy.deepcopy(config), dict[str, Any]()
    while True:
        ours = architecture(changed, keys.get("model.vocab_size", vocab_size))
        name, value = next(_differences(ours, theirs, keys), (None, None))
        if name is None:
            return changed, keys
        put(changed, name, value)
        keys[name] = value


def _differences(ours: dict[str, Any], theirs: dict[str, Any], known: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield (name, value in `theirs`) for each key that differs between two architectures. A key that `theirs` lacks
    has its default value."""
    names = [f"{section}.{key}" for section in ("moe", "model") for key in {**theirs[section], **ours[section]}]
    order = {name: index for index, name in enumerate(_PRIMARY_KEYS)}
    for name in sorted(names, key=lambda name: order.get(name, len(order))):
        section, _, last = name.partition(".")
        value = theirs[section].get(last, KEYS[name].fresh_default() if name in KEYS else None)
        rotates = name == "model.sequence_length" and theirs["model"].get("position_embedding") == "rope"
        if name in KEYS and name not in known and not rotates and ours[section].get(last, KEYS[name].default) != value:
            yield name, value


def description(config: Config, vocab_size: int) -> dict[str, dict[str, Any]]:
    """Return the sections for config.yaml of a weights folder: the architecture, and other values of the model in
    training."""
    overrides = architecture(config, vocab_size)
    overrides["model"].update(
        (key, getattr(config.model, key)) for key in ("hidden_dropout", "attention_dropout", "init_std")
    )
    if overrides["model"].get("rotary_scaling", 0) is None:
        del overrides["model"]["rotary_scaling"]  # the default
    for key in ("max_positions", "export_family", "config_json"):
        if getattr(config.model, key) is not None:
            overrides["model"][key] = getattr(config.model, key)
    return overrides


# Keys that determine whether other keys have a meaning.
_PRIMARY_KEYS = ("model.family", "model.attention", "model.position_embedding", "model.qk_norm")
_LATENT_ONLY = ("attention", "q_lora_rank", "kv_lora_rank", "rotary_head_dim", "value_head_dim")
# Learned positions are weights, so with them a model of another sequence length is another model.
_MODEL_ARCHITECTURE = [
    name.removeprefix("model.")
    for name, key in KEYS.items()
    if name.startswith("model.") and (key.architecture or name == "model.sequence_length")
]
_MOE_ARCHITECTURE = [
    name.removeprefix("moe.") for name, key in KEYS.items() if name.startswith("moe.") and key.architecture
]
