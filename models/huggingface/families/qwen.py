"""Dense Qwen: Qwen1.5, Qwen2 and Qwen2.5 (arXiv:2407.10671), `Qwen2ForCausalLM`; Qwen3 (arXiv:2505.09388),
`Qwen3ForCausalLM`."""

from __future__ import annotations

from configs.schema import Config
from models.huggingface.families.keys import COUNT, FLAG, INDEX, TEXTS, HfConfig, Keys, carried, must, or_null
from models.huggingface.families.llama import (
    ATTENTION_RULES,
    COMMON_KEYS,
    COMMON_RULES,
    DENSE_RULES,
    QKV_BIAS_RULES,
    TIED,
    carries_nothing,
    qk_norm_rules,
    read_common,
    write_common,
)
from models.huggingface.families.rules import Family, Overrides

FULL, SLIDING = "full_attention", "sliding_attention"  # kinds of layers
KEYS: Keys = {
    **COMMON_KEYS,
    "num_key_value_heads": carried(or_null(COUNT), 32),
    "max_position_embeddings": carried(COUNT, 32768),
    "use_sliding_window": carried(FLAG, False),
    "sliding_window": carried(or_null(COUNT), 4096),
    "max_window_layers": carried(INDEX, 28),
    "layer_types": carried(or_null(TEXTS), None),
}
QWEN2_KEYS: Keys = {key: row for key, row in KEYS.items() if key != "attention_bias"} | {
    "head_dim": carried(COUNT, None)
}
QWEN3_KEYS: Keys = {**KEYS, "head_dim": carried(COUNT, 128)}


def _window(keys: HfConfig) -> dict[str, int | None]:
    """Our keys of the sliding window. Raises ConfigError for layers in an order that they do not have."""
    num_layers, first = keys["num_hidden_layers"], keys["max_window_layers"]
    window: int | None = keys["sliding_window"] if keys["use_sliding_window"] else None
    if keys["layer_types"] is None:
        slides = [window is not None and layer >= first for layer in range(num_layers)]
        named = ("max_window_layers", first)
    else:
        kinds = keys["layer_types"]
        must(
            len(kinds) == num_layers and set(kinds) <= {FULL, SLIDING},
            "layer_types",
            kinds,
            f"be {FULL} or {SLIDING} for each of num_hidden_layers ({num_layers})",
        )
        slides = [kind == SLIDING for kind in kinds]
        named = ("layer_types", kinds)
        must(window is not None or not any(slides), *named, f"be {FULL} without use_sliding_window and sliding_window")
    must(slides == sorted(slides), *named, f"have no {FULL} behind a {SLIDING}: such an order is not supported")
    return {"sliding_window": window, "sliding_window_from": slides.index(True)} if any(slides) else {}


def _read(keys: HfConfig) -> Overrides:
    overrides = read_common(keys)
    overrides["model"] |= _window(keys)
    return overrides


def _read_qwen2(keys: HfConfig) -> Overrides:
    overrides = _read(keys)
    overrides["model"]["qkv_bias"] = True
    return overrides


def _read_qwen3(keys: HfConfig) -> Overrides:
    overrides = _read(keys)
    overrides["model"]["qk_norm"] = True
    return overrides


def _write(config: Config, model_type: str, architecture_name: str) -> HfConfig:
    window = config.model.sliding_window
    return {
        **write_common(config, model_type, architecture_name),
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "max_window_layers": config.model.num_layers if window is None else config.model.sliding_window_from,
    }


def _write_qwen2(config: Config) -> HfConfig:
    hf = _write(config, "qwen2", "Qwen2ForCausalLM")
    del hf["attention_bias"]  # queries, keys and values always have biases
    return hf


def _write_qwen3(config: Config) -> HfConfig:
    return _write(config, "qwen3", "Qwen3ForCausalLM")


QWEN2 = Family(
    "qwen2",
    QWEN2_KEYS,
    _read_qwen2,
    _write_qwen2,
    (*COMMON_RULES, *ATTENTION_RULES, *QKV_BIAS_RULES, *DENSE_RULES),
    "model.",
    TIED,
    carries_nothing=carries_nothing,
)
QWEN3 = Family(
    "qwen3",
    QWEN3_KEYS,
    _read_qwen3,
    _write_qwen3,
    (*COMMON_RULES, *ATTENTION_RULES, *qk_norm_rules("head", "head"), *DENSE_RULES),
    "model.",
    TIED,
    carries_nothing=carries_nothing,
)
