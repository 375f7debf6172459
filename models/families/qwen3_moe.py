"""Qwen3-MoE (arXiv:2505.09388): `Qwen3MoeForCausalLM`."""

from __future__ import annotations

from configs import derived
from configs.schema import Config, ConfigError
from models.families.llama import COMMON_RULES, DENSE_RULES, EXPERT_RULES, QK_NORM_RULES, QKV_RULE, read_common, write_common
from models.families.rules import Family, HfConfig, Overrides


def _read(hf: HfConfig) -> Overrides:
    overrides = read_common(hf, "Qwen3MoeForCausalLM")
    overrides["model"]["qk_norm"] = True
    dense = set(hf.get("mlp_only_layers") or [])
    step = hf.get("decoder_sparse_step", 1)
    layers = [int(i not in dense and (i + 1) % step == 0) for i in range(hf["num_hidden_layers"])]
    if not any(layers):
        raise ConfigError(
            f"config.json mlp_only_layers ({sorted(dense)}) and decoder_sparse_step ({step}) leave no layer with experts; "
            "at least one must have them."
        )
    overrides["moe"] = {
        "num_experts": hf.get("num_experts", hf.get("num_local_experts")),
        "top_k": hf["num_experts_per_tok"],
        "ffn_hidden_size": hf["moe_intermediate_size"],
        "normalize_top_k": hf["norm_topk_prob"],
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
        "use_sliding_window": False,
        "sliding_window": None,
    }


FAMILY = Family("qwen3_moe", _read, _write, (*COMMON_RULES, QKV_RULE, *QK_NORM_RULES, *DENSE_RULES, *EXPERT_RULES), "model.", is_moe=True)
