"""The model's part of a configuration: what decides names, shapes and meaning of its weights."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from configs import derived, rotary
from configs.keys import get, put
from configs.schema import KEYS, Config


def architecture(config: Config, vocab_size: int) -> dict[str, dict[str, Any]]:
    """What decides names, shapes and meaning of the weights, with every default spelled out; equal for equal models."""
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
            moe["group_score_top_k"] = None  # what it means there
        if all(moe["layers"]):
            model["ffn_hidden_size"] = moe["ffn_hidden_size"]  # no dense layer: the value means nothing
    return {"model": model, "moe": moe}


def for_use(config: Config) -> Config:
    """The config of a trained model that is used, not trained: what belongs to the model (`Key.of_the_model`), and the
    default of every other key, so that nothing that only its training asked for has a say."""
    opened = Config()
    for name, key in KEYS.items():
        if key.of_the_model:
            put(opened, name, copy.deepcopy(get(config, name)))
    opened.data.tokenizer = "given"  # what the rules say of one trained here is not asked
    return opened


def to_architecture(
    config: Config, theirs: dict[str, dict[str, Any]], vocab_size: int
) -> tuple[Config, dict[str, Any]]:
    """The config with the fewest keys set anew that make it of the architecture `theirs`, and these keys, the most
    telling first.

    vocab_size: that of `config`. Where positions rotate, their number is no part of the architecture.
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
    """Names of keys that differ, with their value. A key that they leave out means nothing there, or has its
    default."""
    names = [f"{section}.{key}" for section in ("moe", "model") for key in {**theirs[section], **ours[section]}]
    for name in [*(name for name in _TELLING if name in names), *(name for name in names if name not in _TELLING)]:
        section, _, last = name.partition(".")
        value = theirs[section].get(last, KEYS[name].fresh_default() if name in KEYS else None)
        rotates = name == "model.sequence_length" and theirs["model"].get("position_embedding") == "rope"
        if name in KEYS and name not in known and not rotates and ours[section].get(last, KEYS[name].default) != value:
            yield name, value


def description(config: Config, vocab_size: int) -> dict[str, dict[str, Any]]:
    """`architecture`, and the other values of the model that its training was set up with: what config.yaml holds."""
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


# what other keys follow from
_TELLING = ("model.family", "model.attention", "model.position_embedding", "model.qk_norm")
_LATENT_ONLY = ("attention", "q_lora_rank", "kv_lora_rank", "rotary_head_dim", "value_head_dim")
# learned positions are weights: with them another length is another model
_MODEL_ARCHITECTURE = [
    name.removeprefix("model.")
    for name, key in KEYS.items()
    if name.startswith("model.") and (key.architecture or name == "model.sequence_length")
]
_MOE_ARCHITECTURE = [
    name.removeprefix("moe.") for name, key in KEYS.items() if name.startswith("moe.") and key.architecture
]
