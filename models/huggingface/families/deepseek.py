"""DeepSeek-V3 (arXiv:2412.19437) and Kimi K2 (arXiv:2507.20534): `DeepseekV3ForCausalLM`, without multi-token
prediction; DeepSeek-V2 (arXiv:2405.04434) with V2-Lite and Coder-V2: `DeepseekV2ForCausalLM`.

V2 has softmax scores that are not normalized to sum to 1. If its routing is limited to groups of experts, the score of
a group is the score of its best expert.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from configs import derived
from configs.schema import Config
from models.huggingface.families import kinds, llama
from models.huggingface.families.keys import HfConfig, Keys, carried, irrelevant, must, only
from models.huggingface.families.rules import Overrides, Rule


def _has_query_rank(config: Config) -> bool:
    return config.model.q_lora_rank is not None


def _attention_rule(ours: str, theirs: str, shape: str, **limits: Any) -> Rule:
    return llama.layer_rule(f"self_attention.{ours}", f"self_attn.{theirs}", shape, **limits)


ATTENTION_RULES = (
    _attention_rule(
        "linear_q_proj", "q_proj", "latent_queries hidden", when=lambda config: not _has_query_rank(config)
    ),
    _attention_rule("linear_q_down_proj", "q_a_proj", "query_rank hidden", when=_has_query_rank),
    _attention_rule("q_layernorm", "q_a_layernorm", "query_rank", when=_has_query_rank),
    _attention_rule("linear_q_up_proj", "q_b_proj", "latent_queries query_rank", when=_has_query_rank),
    _attention_rule("linear_kv_down_proj", "kv_a_proj_with_mqa", "key_rank_rotary hidden"),
    _attention_rule("kv_layernorm", "kv_a_layernorm", "key_rank"),
    _attention_rule("linear_kv_up_proj", "kv_b_proj", "latent_keys_values key_rank"),
    _attention_rule("linear_proj", "o_proj", "hidden latent_values"),
)
SHARED = "mlp.shared_experts"  # in our names and in theirs
SHARED_EXPERT_RULES = (
    llama.layer_rule(f"{SHARED}.linear_fc1", f"{SHARED}.gate_proj {SHARED}.up_proj", "shared_ffn hidden", only="moe"),
    llama.layer_rule(f"{SHARED}.linear_fc2", f"{SHARED}.down_proj", "hidden shared_ffn", only="moe"),
)
ROUTER_BIAS_RULE = Rule(
    "decoder.layers.{l}.mlp.router.expert_bias",
    ("model.layers.{l}.mlp.gate.e_score_correction_bias",),
    "experts",
    only="moe",
)
RULES = (*llama.COMMON_RULES, *ATTENTION_RULES, *llama.DENSE_RULES, *llama.EXPERT_RULES, *SHARED_EXPERT_RULES)

V3_KEYS: Keys = {
    **llama.COMMON_KEYS,
    **llama.MOE_KEYS,
    "num_key_value_heads": carried(kinds.or_null(kinds.COUNT), 128),
    "max_position_embeddings": carried(kinds.COUNT, 4096),
    "attention_dropout": llama.KEYS["attention_dropout"],
    "q_lora_rank": carried(kinds.or_null(kinds.COUNT)),
    "kv_lora_rank": carried(kinds.COUNT),
    "qk_nope_head_dim": carried(kinds.COUNT),
    "qk_rope_head_dim": carried(kinds.COUNT),
    "v_head_dim": carried(kinds.COUNT),
    "head_dim": carried(kinds.or_null(kinds.COUNT), None),  # the channels that rotate
    "qk_head_dim": carried(kinds.COUNT, None),
    "num_experts": carried(kinds.COUNT, also=("n_routed_experts", "num_local_experts")),
    "moe_intermediate_size": carried(kinds.COUNT),
    "n_shared_experts": carried(kinds.COUNT, 1),
    "first_k_dense_replace": carried(kinds.INDEX, 3),
    "routed_scaling_factor": carried(kinds.POSITIVE_REAL, 2.5),
    "n_group": carried(kinds.COUNT, 8),
    "topk_group": carried(kinds.COUNT, 4),
    "norm_topk_prob": only(True),
    "scoring_func": only("sigmoid"),
    "topk_method": only("noaux_tc"),
    "moe_layer_freq": only(1),
    "rope_interleave": only(True),
    "num_nextn_predict_layers": carried(kinds.INDEX, 0, also=("num_mtp_layers",)),
    "pretraining_tp": irrelevant(kinds.or_null(kinds.COUNT)),
    # For the code and the losses of the first folder.
    **dict.fromkeys(("ep_size", "aux_loss_alpha", "seq_aux", "router_aux_loss_coef"), irrelevant()),
}
# Kimi K2 has code of its own, whose defaults transformers does not have: its files must have these keys.
KIMI_KEYS: Keys = V3_KEYS | {
    "n_shared_experts": carried(kinds.COUNT),
    "first_k_dense_replace": carried(kinds.INDEX),
    "routed_scaling_factor": carried(kinds.POSITIVE_REAL),
    "n_group": carried(kinds.COUNT),
    "topk_group": carried(kinds.COUNT),
    "num_experts_per_tok": carried(kinds.COUNT),
}


def read_latent(keys: HfConfig) -> Overrides:
    """Return the config overrides that DeepSeek-V2 and V3 share: latent attention, dense layers before the MoE layers,
    and shared experts. Raises ConfigError."""
    heads, plain, rotary = keys["num_attention_heads"], keys["qk_nope_head_dim"], keys["qk_rope_head_dim"]
    groups = heads if keys["num_key_value_heads"] is None else keys["num_key_value_heads"]
    rule = f"be num_attention_heads ({heads}): all heads share one latent key"
    must(groups == heads, "num_key_value_heads", groups, rule)
    must(keys["head_dim"] in (None, rotary), "head_dim", keys["head_dim"], f"be qk_rope_head_dim ({rotary})")
    must(rotary % 2 == 0, "qk_rope_head_dim", rotary, "be even, because rotary positions rotate pairs of channels")
    rule = f"be qk_nope_head_dim + qk_rope_head_dim ({plain + rotary})"
    must(keys["qk_head_dim"] in (None, plain + rotary), "qk_head_dim", keys["qk_head_dim"], rule)
    experts = llama.read_experts(keys, "moe_intermediate_size")
    num_layers, num_dense = keys["num_hidden_layers"], keys["first_k_dense_replace"]
    must(num_dense < num_layers, "first_k_dense_replace", num_dense, f"be less than num_hidden_layers ({num_layers})")
    overrides = llama.read_common({**keys, "head_dim": rotary, "attention_dropout": keys["attention_dropout"] or 0.0})
    overrides["model"] |= {
        "attention": "latent",
        "num_query_groups": None,
        "head_dim": plain,
        "q_lora_rank": keys["q_lora_rank"],
        "kv_lora_rank": keys["kv_lora_rank"],
        "rotary_head_dim": rotary,
        "value_head_dim": keys["v_head_dim"],
    }
    overrides["moe"] = {
        **experts,
        "shared_expert_ffn_hidden_size": keys["n_shared_experts"] * keys["moe_intermediate_size"],
        "layers": [int(layer >= num_dense) for layer in range(num_layers)],
        "routed_scaling_factor": keys["routed_scaling_factor"],
    }
    return overrides


def read_groups(keys: HfConfig, best: int) -> dict[str, Any]:
    """Return the config overrides for routing limited to `topk_group` of `n_group` groups of experts. The score of a
    group is the sum of its `best` highest scores. Raises ConfigError."""
    experts, top_k, num_groups, chosen = (
        keys[key] for key in ("num_experts", "num_experts_per_tok", "n_group", "topk_group")
    )
    size = experts // num_groups
    rule = f"divide n_routed_experts ({experts}) into groups of {best} or more"
    must(experts % num_groups == 0 and size >= best, "n_group", num_groups, rule)
    must(chosen <= num_groups, "topk_group", chosen, f"not exceed n_group ({num_groups})")
    rule = (
        f"not exceed {chosen * size}, the number of experts in topk_group ({chosen}) of the n_group ({num_groups}) "
        f"groups of n_routed_experts ({experts})"
    )
    must(top_k <= chosen * size, "num_experts_per_tok", top_k, rule)
    if chosen == num_groups:
        return {}
    return {"num_groups": num_groups, "group_top_k": chosen, "group_score_top_k": best}


def _read_v3(keys: HfConfig) -> Overrides:
    overrides = read_latent(keys)
    overrides["moe"] |= {"router_score": "sigmoid", "expert_bias": True, **read_groups(keys, best=2)}
    return overrides


def write_latent(config: Config, model_type: str, architecture_name: str) -> HfConfig:
    """Return the config.json keys and values that DeepSeek-V2 and V3 share."""
    model, moe = config.model, config.moe
    width = derived.expert_ffn_hidden_size(config)
    hf = {
        **llama.write_common(config, model_type, architecture_name),
        "q_lora_rank": model.q_lora_rank,
        "kv_lora_rank": model.kv_lora_rank,
        "qk_nope_head_dim": derived.head_dim(config),
        "qk_rope_head_dim": model.rotary_head_dim,
        "v_head_dim": model.value_head_dim,
        "first_k_dense_replace": [*derived.moe_layer_pattern(config), 1].index(1),
        "n_routed_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": width,
        "n_shared_experts": (moe.shared_expert_ffn_hidden_size or 0) // width,
        "routed_scaling_factor": 1.0 if moe.routed_scaling_factor is None else moe.routed_scaling_factor,
        "n_group": moe.num_groups or 1,
        "topk_group": moe.group_top_k or 1,
    }
    del hf["head_dim"]  # there it means the channels that rotate
    return hf


def _write_v3(config: Config) -> HfConfig:
    return {
        **write_latent(config, "deepseek_v3", "DeepseekV3ForCausalLM"),
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "rope_interleave": True,
        "num_nextn_predict_layers": 0,
        "num_mtp_layers": 0,
    }


def _carries_nothing(name: str, config: Config, keys: HfConfig) -> bool:
    # Layers after the last one predict further tokens in training; the model does not need them.
    layer = re.match(r"(?:model\.)?layers\.(\d+)\.", name)
    extra = range(config.model.num_layers, config.model.num_layers + keys["num_nextn_predict_layers"])
    return (layer is not None and int(layer[1]) in extra) or llama.carries_nothing(name, config, keys)


V3_RULES = (*RULES, ROUTER_BIAS_RULE)
V3 = llama.family("deepseek_v3", V3_KEYS, _read_v3, _write_v3, V3_RULES, is_moe=True, carries_nothing=_carries_nothing)
KIMI = replace(
    V3,
    model_type="kimi_k2",
    keys=KIMI_KEYS,
    write=lambda config: {**_write_v3(config), "model_type": "kimi_k2"},
    leaves_as=V3.model_type,
)

GREEDY, LIMITED = "greedy", "group_limited_greedy"
V2_KEYS: Keys = {
    **{
        key: row
        for key, row in V3_KEYS.items()
        if key not in ("rope_interleave", "num_nextn_predict_layers", "router_aux_loss_coef")
    },
    "num_key_value_heads": carried(kinds.or_null(kinds.COUNT), None),
    "max_position_embeddings": carried(kinds.COUNT, 2048),
    "q_lora_rank": carried(kinds.or_null(kinds.COUNT), 1536),
    "kv_lora_rank": carried(kinds.COUNT, 512),
    "qk_nope_head_dim": carried(kinds.COUNT, 128),
    "qk_rope_head_dim": carried(kinds.COUNT, 64),
    "v_head_dim": carried(kinds.COUNT, 128),
    "num_experts": carried(kinds.COUNT, 64, also=("n_routed_experts",)),
    "num_experts_per_tok": carried(kinds.COUNT),
    "moe_intermediate_size": carried(kinds.COUNT, 1407),
    "n_shared_experts": carried(kinds.COUNT, 2),
    "first_k_dense_replace": carried(kinds.INDEX, 0),
    "routed_scaling_factor": carried(kinds.POSITIVE_REAL, 1.0),
    "n_group": carried(kinds.or_null(kinds.COUNT), None),
    "topk_group": carried(kinds.or_null(kinds.COUNT), None),
    # transformers never normalizes the weights to sum to 1, even if the key is true; DeepSeek's own code does then.
    "norm_topk_prob": only(False, None),
    "scoring_func": only("softmax"),
    "topk_method": only(GREEDY, LIMITED),
    "mlp_bias": only(False),
    "output_router_logits": irrelevant(kinds.FLAG),
}


def _read_v2(keys: HfConfig) -> Overrides:
    hidden, heads = keys["hidden_size"], keys["num_attention_heads"]
    must(hidden % heads == 0, "num_attention_heads", heads, f"divide hidden_size ({hidden})")
    for key in ("qk_nope_head_dim", "kv_lora_rank"):
        must(keys[key] % 2 == 0, key, keys[key], "be even, because transformers reads the channels after them in pairs")
    overrides = read_latent(keys)
    overrides["moe"] |= {"router_score": "softmax", "normalize_top_k": False}
    if keys["topk_method"] == LIMITED:
        for key in ("n_group", "topk_group"):
            must(keys[key] is not None, key, None, f"be a number of groups if topk_method is {LIMITED}")
        overrides["moe"] |= read_groups(keys, best=1)
    return overrides


def _write_v2(config: Config) -> HfConfig:
    limited = config.moe.num_groups is not None
    return {
        **write_latent(config, "deepseek_v2", "DeepseekV2ForCausalLM"),
        "scoring_func": "softmax",
        "topk_method": LIMITED if limited else GREEDY,
        "norm_topk_prob": False,
    }


V2 = llama.family("deepseek_v2", V2_KEYS, _read_v2, _write_v2, RULES, is_moe=True)
