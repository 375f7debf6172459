"""OLMoE (Muennighoff et al. 2024): `OlmoeForCausalLM`. Queries and keys are normalized over all heads together."""

from __future__ import annotations

from configs import derived
from configs.schema import Config
from models.families.llama import COMMON_RULES, EXPERT_RULES, QK_NORM_RULES, QKV_RULE, read_common, write_common
from models.families.rules import Family, HfConfig, Overrides, expect


def _read(hf: HfConfig) -> Overrides:
    expect(hf, "clip_qkv", (None,))
    overrides = read_common(hf, "OlmoeForCausalLM")
    overrides["model"] |= {"qk_norm": True, "qk_norm_over": "all_heads"}
    overrides["moe"] = {
        "num_experts": hf["num_experts"],
        "top_k": hf["num_experts_per_tok"],
        "ffn_hidden_size": hf["intermediate_size"],
        "normalize_top_k": hf.get("norm_topk_prob", False),
    }
    return overrides


def _write(config: Config) -> HfConfig:
    hf = {
        **write_common(config, "olmoe", "OlmoeForCausalLM"),
        "intermediate_size": derived.expert_ffn_hidden_size(config),
        "num_experts": config.moe.num_experts,
        "num_experts_per_tok": config.moe.top_k,
        "norm_topk_prob": config.moe.normalize_top_k,
        "clip_qkv": None,
    }
    del hf["head_dim"]  # always hidden_size / num_attention_heads
    return hf


FAMILY = Family("olmoe", _read, _write, (*COMMON_RULES, QKV_RULE, *QK_NORM_RULES, *EXPERT_RULES), "model.", is_moe=True)
