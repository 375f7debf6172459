"""Mistral (Jiang et al. 2023): `MistralForCausalLM`; and Mixtral (Jiang et al. 2024): `MixtralForCausalLM`."""

from __future__ import annotations

from configs import derived
from configs.schema import Config
from models.huggingface.families import kinds, llama
from models.huggingface.families.keys import HfConfig, Keys, carried, irrelevant, must, only
from models.huggingface.families.rules import Overrides
from models.huggingface.rotary import SECTIONS

RULES = (*llama.COMMON_RULES, *llama.ATTENTION_RULES, *llama.expert_rules("block_sparse_moe", "w1", "w3", "w2"))
KEYS: Keys = {
    **llama.COMMON_KEYS,
    **llama.MOE_KEYS,
    "num_key_value_heads": carried(kinds.COUNT, 8),
    "head_dim": carried(kinds.or_null(kinds.COUNT), None),
    "max_position_embeddings": carried(kinds.COUNT, 4096 * 32),
    "rms_norm_eps": carried(kinds.POSITIVE_REAL, 1e-5),
    "num_experts": carried(kinds.COUNT, also=("num_local_experts",)),
    "num_experts_per_tok": carried(kinds.COUNT, 2),
    "sliding_window": carried(kinds.or_null(kinds.COUNT), None),
    "layer_types": only(None),  # transformers applies the window to all layers, and loads no model with the key
    "router_jitter_noise": irrelevant(kinds.REAL),  # of training
}
MISTRAL_KEYS: Keys = {
    **llama.COMMON_KEYS,
    "num_key_value_heads": carried(kinds.or_null(kinds.COUNT), 8),
    "head_dim": carried(kinds.or_null(kinds.COUNT), None),
    "max_position_embeddings": carried(kinds.COUNT, 4096 * 32),
    "sliding_window": carried(kinds.or_null(kinds.COUNT), 4096),
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
    rule = f"be given with yarn or longrope ({sections}): transformers loads no Mixtral without it"
    must(stated, "head_dim", None, rule)
    overrides["moe"] = {**llama.read_experts(keys, "intermediate_size"), "normalize_top_k": True}
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
