"""DeepSeek-V2 (arXiv:2405.04434), V2-Lite and Coder-V2: `DeepseekV2ForCausalLM`. Softmax scores that are not made to
sum to 1; where routing is limited to groups of experts, a group counts by its best."""

from __future__ import annotations

from configs.schema import Config
from models.huggingface.families import deepseek_v3, llama
from models.huggingface.families.deepseek_v3 import RULES, read_groups, read_latent, write_latent
from models.huggingface.families.keys import (
    COUNT,
    FLAG,
    INDEX,
    POSITIVE_REAL,
    HfConfig,
    Keys,
    carried,
    irrelevant,
    must,
    only,
    or_null,
)
from models.huggingface.families.llama import TIED
from models.huggingface.families.rules import Family, Overrides

GREEDY, LIMITED = "greedy", "group_limited_greedy"
KEYS: Keys = {
    **{
        key: row
        for key, row in deepseek_v3.KEYS.items()
        if key not in ("rope_interleave", "num_nextn_predict_layers", "router_aux_loss_coef")
    },
    "num_key_value_heads": carried(or_null(COUNT), None),
    "max_position_embeddings": carried(COUNT, 2048),
    "q_lora_rank": carried(or_null(COUNT), 1536),
    "kv_lora_rank": carried(COUNT, 512),
    "qk_nope_head_dim": carried(COUNT, 128),
    "qk_rope_head_dim": carried(COUNT, 64),
    "v_head_dim": carried(COUNT, 128),
    "head_dim": carried(or_null(COUNT), None),
    "num_experts": carried(COUNT, 64, also=("n_routed_experts",)),
    "num_experts_per_tok": carried(COUNT),
    "moe_intermediate_size": carried(COUNT, 1407),
    "n_shared_experts": carried(COUNT, 2),
    "first_k_dense_replace": carried(INDEX, 0),
    "routed_scaling_factor": carried(POSITIVE_REAL, 1.0),
    "n_group": carried(or_null(COUNT), None),
    "topk_group": carried(or_null(COUNT), None),
    # transformers never makes the weights sum to 1, whatever the key says; DeepSeek's own code does where it is true.
    "norm_topk_prob": only(False, None),
    "scoring_func": only("softmax"),
    "topk_method": only(GREEDY, LIMITED),
    "mlp_bias": only(False),
    "output_router_logits": irrelevant(FLAG),
}


def _read(keys: HfConfig) -> Overrides:
    hidden, heads = keys["hidden_size"], keys["num_attention_heads"]
    must(hidden % heads == 0, "num_attention_heads", heads, f"divide hidden_size ({hidden})")
    for key in ("qk_nope_head_dim", "kv_lora_rank"):
        must(keys[key] % 2 == 0, key, keys[key], "be even, because transformers takes pairs of channels behind them")
    overrides = read_latent(keys)
    overrides["moe"] |= {"router_score": "softmax", "normalize_top_k": False}
    if keys["topk_method"] == LIMITED:
        for key in ("n_group", "topk_group"):
            must(keys[key] is not None, key, None, f"be a number of groups with topk_method ({LIMITED})")
        overrides["moe"] |= read_groups(keys, best=1)
    return overrides


def _write(config: Config) -> HfConfig:
    limited = config.moe.num_groups is not None
    return {
        **write_latent(config, "deepseek_v2", "DeepseekV2ForCausalLM"),
        "scoring_func": "softmax",
        "topk_method": LIMITED if limited else GREEDY,
        "norm_topk_prob": False,
    }


FAMILY = Family(
    "deepseek_v2", KEYS, _read, _write, RULES, "model.", TIED, is_moe=True, carries_nothing=llama.carries_nothing
)
