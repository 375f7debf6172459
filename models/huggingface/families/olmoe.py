"""OLMoE (Muennighoff et al. 2024): `OlmoeForCausalLM`. Queries and keys are normalized over all heads together."""

from __future__ import annotations

from configs import derived
from configs.schema import Config
from models.huggingface.families import kinds, llama
from models.huggingface.families.keys import HfConfig, Keys, carried, must, only
from models.huggingface.families.rules import Overrides

RULES = (*llama.COMMON_RULES, *llama.ATTENTION_RULES, *llama.qk_norm_rules("queries", "keys"), *llama.EXPERT_RULES)
KEYS: Keys = {
    **llama.COMMON_KEYS,
    **llama.MOE_KEYS,
    "head_dim": carried(kinds.or_null(kinds.COUNT), None),
    "max_position_embeddings": carried(kinds.COUNT, 4096),
    "rms_norm_eps": carried(kinds.POSITIVE_REAL, 1e-5),
    "num_experts": carried(kinds.COUNT, also=("num_local_experts",)),
    "norm_topk_prob": carried(kinds.FLAG, False),
    "clip_qkv": only(None),
}


def _read(keys: HfConfig) -> Overrides:
    hidden, heads = keys["hidden_size"], keys["num_attention_heads"]
    must(hidden % heads == 0, "num_attention_heads", heads, f"divide hidden_size ({hidden})")
    rule = f"be hidden_size / num_attention_heads ({hidden // heads})"
    must(keys["head_dim"] in (None, hidden // heads), "head_dim", keys["head_dim"], rule)
    overrides = llama.read_common(keys)
    overrides["model"] |= {"qk_norm": True, "qk_norm_over": "all_heads"}
    overrides["moe"] = {**llama.read_experts(keys, "intermediate_size"), "normalize_top_k": keys["norm_topk_prob"]}
    return overrides


def _write(config: Config) -> HfConfig:
    hf = {
        **llama.write_common(config, "olmoe", "OlmoeForCausalLM"),
        "intermediate_size": derived.expert_ffn_hidden_size(config),
        "num_experts": config.moe.num_experts,
        "num_experts_per_tok": config.moe.top_k,
        "norm_topk_prob": config.moe.normalize_top_k,
        "clip_qkv": None,
    }
    del hf["head_dim"]  # always hidden_size / num_attention_heads
    return hf


FAMILY = llama.family("olmoe", KEYS, _read, _write, RULES, is_moe=True)
