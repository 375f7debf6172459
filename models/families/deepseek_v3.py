"""DeepSeek-V3 (arXiv:2412.19437): `DeepseekV3ForCausalLM`, with plain rotary positions and without multi-token prediction."""

from __future__ import annotations

from itertools import takewhile

from configs import derived
from configs.schema import Config, ConfigError
from models.families.llama import COMMON_RULES, DENSE_RULES, EXPERT_RULES, read_common, write_common
from models.families.rules import GATE_UP, Family, HfConfig, Overrides, Rule, expect

OURS, THEIRS = "decoder.layers.{l}.self_attention.", "model.layers.{l}.self_attn."


def _has_query_rank(config: Config) -> bool:
    return config.model.q_lora_rank is not None


def _has_no_query_rank(config: Config) -> bool:
    return config.model.q_lora_rank is None


ATTENTION_RULES = (
    Rule(f"{OURS}linear_q_proj.weight", (f"{THEIRS}q_proj.weight",), when=_has_no_query_rank),
    Rule(f"{OURS}linear_q_down_proj.weight", (f"{THEIRS}q_a_proj.weight",), when=_has_query_rank),
    Rule(f"{OURS}q_layernorm.weight", (f"{THEIRS}q_a_layernorm.weight",), when=_has_query_rank),
    Rule(f"{OURS}linear_q_up_proj.weight", (f"{THEIRS}q_b_proj.weight",), when=_has_query_rank),
    Rule(f"{OURS}linear_kv_down_proj.weight", (f"{THEIRS}kv_a_proj_with_mqa.weight",)),
    Rule(f"{OURS}kv_layernorm.weight", (f"{THEIRS}kv_a_layernorm.weight",)),
    Rule(f"{OURS}linear_kv_up_proj.weight", (f"{THEIRS}kv_b_proj.weight",)),
)
ROUTER_AND_SHARED_RULES = (
    Rule("decoder.layers.{l}.mlp.router.expert_bias", ("model.layers.{l}.mlp.gate.e_score_correction_bias",), only="moe"),
    Rule(
        "decoder.layers.{l}.mlp.shared_experts.linear_fc1.weight",
        ("model.layers.{l}.mlp.shared_experts.gate_proj.weight", "model.layers.{l}.mlp.shared_experts.up_proj.weight"),
        GATE_UP,
        only="moe",
    ),
    Rule("decoder.layers.{l}.mlp.shared_experts.linear_fc2.weight", ("model.layers.{l}.mlp.shared_experts.down_proj.weight",), only="moe"),
)


def _read(hf: HfConfig) -> Overrides:
    expect(hf, "scoring_func", ("sigmoid",), "sigmoid")
    expect(hf, "topk_method", ("noaux_tc",), "noaux_tc")
    expect(hf, "norm_topk_prob", (True,), True)
    expect(hf, "rope_interleave", (True,), True)
    expect(hf, "moe_layer_freq", (1,), 1)
    top_k, num_groups, group_top_k = hf["num_experts_per_tok"], hf.get("n_group") or 1, hf.get("topk_group") or 1
    limited = group_top_k < num_groups
    if limited and top_k // group_top_k != 2:
        # Both take the sum of a group's two best scores, but Megatron-core means top_k // group_top_k by two.
        raise ConfigError(f"config.json topk_group ({group_top_k}) is not supported: num_experts_per_tok ({top_k}) must be twice that.")
    overrides = read_common({**hf, "head_dim": hf["qk_nope_head_dim"]}, "DeepseekV3ForCausalLM")
    overrides["model"] |= {
        "attention": "latent",
        "num_query_groups": None,
        "q_lora_rank": hf["q_lora_rank"],
        "kv_lora_rank": hf["kv_lora_rank"],
        "rotary_head_dim": hf["qk_rope_head_dim"],
        "value_head_dim": hf["v_head_dim"],
    }
    num_layers, num_dense = hf["num_hidden_layers"], hf["first_k_dense_replace"]
    if num_dense >= num_layers:
        raise ConfigError(f"config.json first_k_dense_replace ({num_dense}) must be less than num_hidden_layers ({num_layers}).")
    overrides["moe"] = {
        "num_experts": hf["n_routed_experts"],
        "top_k": top_k,
        "ffn_hidden_size": hf["moe_intermediate_size"],
        "shared_expert_ffn_hidden_size": hf["n_shared_experts"] * hf["moe_intermediate_size"],
        "layers": [int(layer >= num_dense) for layer in range(num_layers)],
        "router_score": "sigmoid",
        "expert_bias": True,
        "routed_scaling_factor": hf["routed_scaling_factor"],
        "num_groups": num_groups if limited else None,
        "group_top_k": group_top_k if limited else None,
    }
    return overrides


def _write(config: Config) -> HfConfig:
    model, moe = config.model, config.moe
    width = derived.expert_ffn_hidden_size(config)
    hf = {
        **write_common(config, "deepseek_v3", "DeepseekV3ForCausalLM"),
        "q_lora_rank": model.q_lora_rank,
        "kv_lora_rank": model.kv_lora_rank,
        "qk_nope_head_dim": derived.head_dim(config),
        "qk_rope_head_dim": model.rotary_head_dim,
        "v_head_dim": model.value_head_dim,
        "first_k_dense_replace": sum(1 for _ in takewhile(lambda is_moe: not is_moe, derived.moe_layer_pattern(config))),
        "n_routed_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": width,
        "n_shared_experts": (moe.shared_expert_ffn_hidden_size or 0) // width,
        "routed_scaling_factor": 1.0 if moe.routed_scaling_factor is None else moe.routed_scaling_factor,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "n_group": moe.num_groups or 1,
        "topk_group": moe.group_top_k or 1,
        "norm_topk_prob": True,
        "rope_interleave": True,
        "num_nextn_predict_layers": 0,
        "num_mtp_layers": 0,
    }
    del hf["head_dim"]  # there it means the channels that rotate
    return hf


def _carries_nothing(name: str, config: Config) -> bool:
    # Layers behind the last one predict further tokens in training; without them the model is the same.
    parts = name.split(".")
    is_extra_layer = parts[:2] == ["model", "layers"] and int(parts[2]) >= config.model.num_layers
    return is_extra_layer or name.endswith(".inv_freq")


FAMILY = Family(
    "deepseek_v3",
    _read,
    _write,
    (*COMMON_RULES, *ATTENTION_RULES, *DENSE_RULES, *EXPERT_RULES, *ROUTER_AND_SHARED_RULES),
    "model.",
    is_moe=True,
    carries_nothing=_carries_nothing,
)
