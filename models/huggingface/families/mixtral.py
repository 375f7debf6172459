"""Mistral (Jiang et al. 2023): `MistralForCausalLM`; and Mixtral (Jiang et al. 2024): `MixtralForCausalLM`."""

from __future__ import annotations

from configs import derived
from configs.schema import Config
from models.huggingface.families import llama
from models.huggingface.families.keys import (
    COUNT,
    POSITIVE_REAL,
    REAL,
    HfConfig,
    Keys,
    carried,
    irrelevant,
    must,
    only,
    or_null,
)
from models.huggingface.families.rules import Overrides
from models.huggingface.rotary import SECTIONS

RULES = (*llama.COMMON_RULES, *llama.ATTENTION_RULES, *llama.expert_rules("block_sparse_moe", "w1", "w3", "w2"))
KEYS: Keys = {
    **llama.COMMON_KEYS,
    **llama.MOE_KEYS,
    "num_key_value_heads": carried(COUNT, 8),
    "head_dim": carried(or_null(COUNT), None),
    "max_position_embeddings": carried(COUNT, 4096 * 32),
    "rms_norm_eps": carried(POSITIVE_REAL, 1e-5),
    "num_experts": carried(COUNT, also=("num_local_experts",)),
    "num_experts_per_tok": carried(COUNT, 2),
    "sliding_window": carried(or_null(COUNT), None),
    "layer_types": only(None),  # transformers applies the window to all layers, and loads no model with the key
    "router_jitter_noise": irrelevant(REAL),  # of training
}
MISTRAL_KEYS: Keys = {
    **llama.COMMON_KEYS,
    "num_key_value_heads": carried(or_null(COUNT), 8),
    "head_dim": carried(or_null(COUNT), None),
    "max_position_embeddings": carried(COUNT, 4096 * 32),
    "sliding_window": carried(or_null(COUNT), 4096),
    "layer_types": only(None),
}


def _read_mistral(keys: HfConfig, theta: float = 10000.0) -> Overrides:
    overrides = llama.read_common(keys, theta)
    overrides["model"]["sliding_window"] = keys["sliding_window"]
    return overrides


def _read(keys: HfConfig) -> Overrides:
    overrides = _read_mistral(keys, theta=1e6)
    scaling = overrides["model"]["rotary_scaling"]
    stated = keys["head_dim"] is not None or scaling is None or scaling["rope_type"] not in ("yarn", "longrope")
    sections = " and ".join(name for name in SECTIONS if keys[name])
    must(
        stated,
        "head_dim",
        None,
        f"be given with yarn or longrope ({sections}): transformers loads no Mixtral without it",
    )
    experts, top_k = llama.read_experts(keys)
    overrides["moe"] = {
        "num_experts": experts,
        "top_k": top_k,
        "ffn_hidden_size": keys["intermediate_size"],
        "normalize_top_k": True,
    }
    return overrides


def _write(config: Config) -> HfConfig:
    return {
        **llama.write_common(config, "mixtral", "MixtralForCausalLM"),
        "intermediate_size": derived.expert_ffn_hidden_size(config),
        "num_local_experts": config.moe.num_experts,
        "num_experts_per_tok": config.moe.top_k,
        "sliding_window": config.model.sliding_window,
    }


MISTRAL = llama.family(
    "mistral",
    MISTRAL_KEYS,
    _read_mistral,
    lambda config: {
        **llama.write_common(config, "mistral", "MistralForCausalLM"),
        "sliding_window": config.model.sliding_window,
    },
    (*llama.COMMON_RULES, *llama.ATTENTION_RULES, *llama.DENSE_RULES),
)
FAMILY = llama.family(
    "mixtral",
    KEYS,
    _read,
    _write,
    RULES,
    is_moe=True,
    other_names=(("block_sparse_moe.gate.weight", "mlp.gate.weight"),),  # in files with fused experts
)
