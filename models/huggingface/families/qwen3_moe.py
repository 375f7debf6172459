"""Qwen3-MoE (arXiv:2505.09388): `Qwen3MoeForCausalLM`."""

from __future__ import annotations

from configs import derived
from configs.schema import Config, ConfigError
from models.huggingface.families.keys import COUNT, FLAG, INDICES, HfConfig, Keys, carried, irrelevant, or_null
from models.huggingface.families.llama import (
    ATTENTION_RULES,
    COMMON_KEYS,
    COMMON_RULES,
    DENSE_RULES,
    EXPERT_RULES,
    MOE_KEYS,
    TIED,
    carries_nothing,
    qk_norm_rules,
    read_common,
    read_experts,
    write_common,
)
from models.huggingface.families.rules import Family, Overrides

RULES = (*COMMON_RULES, *ATTENTION_RULES, *qk_norm_rules("head", "head"), *DENSE_RULES, *EXPERT_RULES)
KEYS: Keys = {
    **COMMON_KEYS,
    **MOE_KEYS,
    "num_key_value_heads": carried(COUNT, 4),
    "head_dim": carried(or_null(COUNT), None),
    "max_position_embeddings": carried(COUNT, 32768),
    "num_experts": carried(COUNT, also=("num_local_experts",)),
    "moe_intermediate_size": carried(COUNT),
    "norm_topk_prob": carried(FLAG, False),
    "decoder_sparse_step": carried(COUNT, 1),
    "mlp_only_layers": carried(or_null(INDICES), None),
    "use_sliding_window": carried(FLAG, False),
    "sliding_window": carried(or_null(COUNT), 4096),
    "max_window_layers": irrelevant(),  # all layers have the window
}


def _read(keys: HfConfig) -> Overrides:
    overrides = read_common(keys)
    overrides["model"] |= {
        "qk_norm": True,
        "sliding_window": keys["sliding_window"] if keys["use_sliding_window"] else None,
    }
    dense, step = set(keys["mlp_only_layers"] or []), keys["decoder_sparse_step"]
    layers = [int(i not in dense and (i + 1) % step == 0) for i in range(keys["num_hidden_layers"])]
    if not any(layers):
        raise ConfigError(
            f"config.json mlp_only_layers ({sorted(dense)}) and decoder_sparse_step ({step}) leave no layer with "
            "experts; at least one must have them."
        )
    experts, top_k = read_experts(keys)
    overrides["moe"] = {
        "num_experts": experts,
        "top_k": top_k,
        "ffn_hidden_size": keys["moe_intermediate_size"],
        "normalize_top_k": keys["norm_topk_prob"],
        "layers": layers,
    }
    return overrides


def _write(config: Config) -> HfConfig:
    return {
        **write_common(config, "qwen3_moe", "Qwen3MoeForCausalLM"),
        "num_experts": config.moe.num_experts,
        "num_experts_per_tok": config.moe.top_k,
        "moe_intermediate_size": derived.expert_ffn_hidden_size(config),
        "norm_topk_prob": config.moe.normalize_top_k,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i, is_moe in enumerate(derived.moe_layer_pattern(config)) if not is_moe],
        "use_sliding_window": config.model.sliding_window is not None,
        "sliding_window": config.model.sliding_window,
    }


FAMILY = Family("qwen3_moe", KEYS, _read, _write, RULES, "model.", TIED, is_moe=True, carries_nothing=carries_nothing)
