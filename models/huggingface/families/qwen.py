"""Qwen: Qwen1.5, Qwen2 and Qwen2.5 (arXiv:2407.10671), `Qwen2ForCausalLM`; Qwen3 (arXiv:2505.09388),
`Qwen3ForCausalLM` and `Qwen3MoeForCausalLM`."""

from __future__ import annotations

from functools import partial

from base.errors import ConfigError
from configs import derived
from configs.schema import Config
from models.huggingface.families import kinds, llama
from models.huggingface.families.keys import ADVICE, HfConfig, Keys, carried, irrelevant, must
from models.huggingface.families.rules import Overrides

FULL, SLIDING = "full_attention", "sliding_attention"  # kinds of layers
KEYS: Keys = {
    **llama.COMMON_KEYS,
    "num_key_value_heads": carried(kinds.or_null(kinds.COUNT), 32),
    "max_position_embeddings": carried(kinds.COUNT, 32768),
    "use_sliding_window": carried(kinds.FLAG, False),
    "sliding_window": carried(kinds.or_null(kinds.COUNT), 4096),
    "max_window_layers": carried(kinds.INDEX, 28),
    "layer_types": carried(kinds.or_null(kinds.TEXTS), None),
}
QWEN2_KEYS: Keys = {key: row for key, row in KEYS.items() if key != "attention_bias"} | {
    "head_dim": carried(kinds.COUNT, None)
}
QWEN3_KEYS: Keys = {**KEYS, "head_dim": carried(kinds.COUNT, 128)}


def _read(own: str, keys: HfConfig) -> Overrides:
    """Return the config overrides of Qwen2 or Qwen3. `own`: the key of our model section that this family sets to true.
    Raises ConfigError if layers with a sliding window are not the last ones."""
    overrides = llama.read_common(keys)
    num_layers, first = keys["num_hidden_layers"], keys["max_window_layers"]
    window: int | None = keys["sliding_window"] if keys["use_sliding_window"] else None
    if keys["layer_types"] is None:
        slides = [window is not None and layer >= first for layer in range(num_layers)]
        named = ("max_window_layers", first)
    else:
        kinds = keys["layer_types"]
        named = ("layer_types", kinds)
        rule = f"be {FULL} or {SLIDING} for each of num_hidden_layers ({num_layers})"
        must(len(kinds) == num_layers and set(kinds) <= {FULL, SLIDING}, *named, rule)
        slides = [kind == SLIDING for kind in kinds]
        rule = f"be {FULL} for all layers unless use_sliding_window and sliding_window are set"
        must(window is not None or not any(slides), *named, rule)
    rule = f"have no {FULL} layer after a {SLIDING} layer: only the last layers may have the window"
    must(slides == sorted(slides), *named, rule)
    if any(slides):
        overrides["model"] |= {"sliding_window": window, "sliding_window_from": slides.index(True)}
    overrides["model"][own] = True
    return overrides


def _write(model_type: str, architecture_name: str, config: Config) -> HfConfig:
    window = config.model.sliding_window
    hf = {
        **llama.write_common(config, model_type, architecture_name),
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "max_window_layers": config.model.num_layers if window is None else config.model.sliding_window_from,
    }
    if model_type == "qwen2":
        del hf["attention_bias"]  # queries, keys and values always have biases
    return hf


QWEN2_RULES = (*llama.COMMON_RULES, *llama.ATTENTION_RULES, llama.QKV_BIAS_RULE, *llama.DENSE_RULES)
QWEN2 = llama.family(
    "qwen2", QWEN2_KEYS, partial(_read, "qkv_bias"), partial(_write, "qwen2", "Qwen2ForCausalLM"), QWEN2_RULES
)
QWEN3_RULES = (*llama.COMMON_RULES, *llama.ATTENTION_RULES, *llama.qk_norm_rules("head", "head"), *llama.DENSE_RULES)
QWEN3 = llama.family(
    "qwen3", QWEN3_KEYS, partial(_read, "qk_norm"), partial(_write, "qwen3", "Qwen3ForCausalLM"), QWEN3_RULES
)

QWEN3_MOE_KEYS: Keys = {
    **llama.COMMON_KEYS,
    **llama.MOE_KEYS,
    "num_key_value_heads": carried(kinds.COUNT, 4),
    "head_dim": carried(kinds.or_null(kinds.COUNT), None),
    "max_position_embeddings": carried(kinds.COUNT, 32768),
    "num_experts": carried(kinds.COUNT, also=("num_local_experts",)),
    "moe_intermediate_size": carried(kinds.COUNT),
    "norm_topk_prob": carried(kinds.FLAG, False),
    "decoder_sparse_step": carried(kinds.COUNT, 1),
    "mlp_only_layers": carried(kinds.or_null(kinds.INDICES), None),
    "use_sliding_window": carried(kinds.FLAG, False),
    "sliding_window": carried(kinds.or_null(kinds.COUNT), 4096),
    "max_window_layers": irrelevant(),  # all layers have the window
}


def _read_qwen3_moe(keys: HfConfig) -> Overrides:
    overrides = llama.read_common(keys)
    overrides["model"] |= {
        "qk_norm": True,
        "sliding_window": keys["sliding_window"] if keys["use_sliding_window"] else None,
    }
    dense, step = set(keys["mlp_only_layers"] or []), keys["decoder_sparse_step"]
    layers = [int(i not in dense and (i + 1) % step == 0) for i in range(keys["num_hidden_layers"])]
    if not any(layers):
        raise ConfigError(
            f"config.json mlp_only_layers ({sorted(dense)}) and decoder_sparse_step ({step}) leave no layer with "
            f"experts; at least one must have them. {ADVICE}"
        )
    overrides["moe"] = {
        **llama.read_experts(keys, "moe_intermediate_size"),
        "normalize_top_k": keys["norm_topk_prob"],
        "layers": layers,
    }
    return overrides


def _write_qwen3_moe(config: Config) -> HfConfig:
    return {
        **llama.write_common(config, "qwen3_moe", "Qwen3MoeForCausalLM"),
        "num_experts": config.moe.num_experts,
        "num_experts_per_tok": config.moe.top_k,
        "moe_intermediate_size": derived.expert_ffn_hidden_size(config),
        "norm_topk_prob": config.moe.normalize_top_k,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i, is_moe in enumerate(derived.moe_layer_pattern(config)) if not is_moe],
        "use_sliding_window": config.model.sliding_window is not None,
        "sliding_window": config.model.sliding_window,
    }


QWEN3_MOE = llama.family(
    "qwen3_moe", QWEN3_MOE_KEYS, _read_qwen3_moe, _write_qwen3_moe, (*QWEN3_RULES, *llama.EXPERT_RULES), is_moe=True
)
