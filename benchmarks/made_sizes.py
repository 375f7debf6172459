"""The config.json of made-up models: a family's proportions at a requested size."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from configs.weights import config_from
from models.huggingface import translate
from models.huggingface.families.keys import HfConfig
from models.huggingface.families.rules import Family, sizes
from models.huggingface.tensors import expand_rules
from models.weight_files.expected import logical_shapes

SMALLEST, WIDEST, STEP = 256, 12288, 256  # hidden sizes that are tried; wide ones in steps of twice that
ROPE = {"rope_theta": 1e6, "rms_norm_eps": 1e-6, "max_position_embeddings": 32768}


@dataclass(frozen=True)
class Proportions:
    """How a family's published model grows: config.json at a hidden size and a number of layers, of which `layers` go
    with `hidden`, and what the plain words of the command line are called in it."""

    hidden: int
    layers: int
    config: Callable[[int, int], HfConfig]
    keys: dict[str, str]  # word -> key


def _rounded(value: float, multiple: int = 32) -> int:
    return max(multiple, round(value / multiple) * multiple)


def _llama(hidden: int, layers: int) -> HfConfig:
    """Llama 3's 8B: as wide as Llama 2's, with fewer heads of keys."""
    heads = hidden // (128 if hidden >= 2048 else 64)
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": _rounded(hidden * 3.5),
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 4,
        "vocab_size": 32000,
        **ROPE,
    }


def _mixtral(hidden: int, layers: int) -> HfConfig:
    """Mixtral 8x7B."""
    return {
        **_llama(hidden, layers),
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": None,
    }


def _qwen3_moe(hidden: int, layers: int) -> HfConfig:
    """Qwen3-30B-A3B, with a smaller vocabulary."""
    return {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": 3 * hidden,
        "moe_intermediate_size": _rounded(hidden * 0.375),
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "head_dim": 128,
        "num_attention_heads": max(4, hidden // 64),
        "num_key_value_heads": 4,
        "vocab_size": 32000,
        **ROPE,
    }


def _deepseek_v3(hidden: int, layers: int) -> HfConfig:
    """DeepSeek-V3 with 64 experts."""
    heads = max(4, hidden // 56)
    return {
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": _rounded(hidden * 18 / 7),
        "moe_intermediate_size": _rounded(hidden * 2 / 7),
        "n_routed_experts": 64,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": min(1, layers - 1),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": _rounded(hidden * 3 / 14),
        "kv_lora_rank": _rounded(hidden / 14),
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "vocab_size": 32000,
        **ROPE,
    }


def _gpt2(hidden: int, layers: int) -> HfConfig:
    """GPT-2 XL."""
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": hidden,
        "n_layer": layers,
        "n_head": hidden // 64,
        "n_positions": 1024,
        "vocab_size": 50257,
    }


_WORDS = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "ffn": "intermediate_size",
    "heads": "num_attention_heads",
    "groups": "num_key_value_heads",
    "vocab": "vocab_size",
}
_EXPERT_WORDS = {**_WORDS, "top_k": "num_experts_per_tok", "expert_ffn": "moe_intermediate_size"}
PRESETS = {
    "llama": Proportions(4096, 32, _llama, _WORDS),
    "mixtral": Proportions(
        4096, 32, _mixtral, {**_WORDS, "experts": "num_local_experts", "top_k": "num_experts_per_tok"}
    ),
    "qwen3_moe": Proportions(2048, 48, _qwen3_moe, {**_EXPERT_WORDS, "experts": "num_experts"}),
    "deepseek_v3": Proportions(7168, 61, _deepseek_v3, {**_EXPERT_WORDS, "experts": "n_routed_experts"}),
    "gpt2": Proportions(
        1600,
        48,
        _gpt2,
        {"layers": "n_layer", "hidden": "n_embd", "ffn": "n_inner", "heads": "n_head", "vocab": "vocab_size"},
    ),
}
WORDS = ("layers", "hidden", "ffn", "experts", "expert_ffn", "top_k", "heads", "groups", "vocab")


def made_config(
    family: str, num_bytes: float | None = None, dtype: str = "bfloat16", fixed: dict[str, int] | None = None
) -> HfConfig:
    """config.json of a model of `num_bytes` or a little more in the family's proportions; `fixed` holds words of WORDS
    and their values. None: `fixed` must have `hidden` and `layers`. Raises ValueError."""
    preset, fixed = PRESETS[family], fixed or {}
    if unknown := sorted(fixed.keys() - preset.keys.keys()):
        raise ValueError(f"{family} has no {unknown[0]}: it has {', '.join(preset.keys)}")

    def config(hidden: int, layers: int) -> HfConfig:
        found = preset.config(hidden, layers)
        return {**found, **{preset.keys[word]: value for word, value in fixed.items()}, "dtype": dtype}

    if num_bytes is None:
        if not {"hidden", "layers"} <= fixed.keys():
            raise ValueError("give gigabytes, or both layers and hidden")
        return config(fixed["hidden"], fixed["layers"])
    best: tuple[float, HfConfig] | None = None
    for hidden in [fixed["hidden"]] if "hidden" in fixed else _hidden_sizes():
        if "layers" in fixed:
            found = config(hidden, fixed["layers"])
            distance = abs(math.log(weights_bytes(found) / num_bytes))
        else:
            two, three = (weights_bytes(config(hidden, layers)) for layers in (2, 3))
            layers = max(1, math.ceil((num_bytes - two) / (three - two)) + 2)
            found = config(hidden, layers)
            distance = abs(math.log(layers / hidden * preset.hidden / preset.layers))
        if best is None or distance < best[0]:
            best = distance, found
    assert best is not None
    return best[1]


def one_layer(config: HfConfig) -> HfConfig:
    """Return the same config with one layer, which has experts if the model has any."""
    layers = "n_layer" if config["model_type"] == "gpt2" else "num_hidden_layers"
    return {**config, layers: 1, **({"first_k_dense_replace": 0} if "first_k_dense_replace" in config else {})}


def tensor_shapes(config: HfConfig, logical: bool = False) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of a Hugging Face folder, layer by layer; `logical`: of a folder of logical
    weights. Raises ConfigError for a config.json that is not accepted."""
    family, ours = _read(config)
    lengths = sizes(ours)
    shapes = logical_shapes(ours, lengths["vocab"])
    found: dict[str, tuple[int, ...]] = {}
    for rule in _in_order(list(expand_rules(family, ours))):
        if not logical:
            found.update(zip(rule.theirs, rule.shapes(lengths), strict=True))
        elif not rule.unread:
            found[rule.ours] = shapes[rule.ours]
    return found


def weights_bytes(config: HfConfig) -> int:
    """Return the bytes of all tensors."""
    width = {"bfloat16": 2, "float16": 2, "float32": 4}[config["dtype"]]
    return width * sum(math.prod(shape) for shape in tensor_shapes(config).values())


def num_layers(config: HfConfig) -> int:
    return int(config["n_layer"] if config["model_type"] == "gpt2" else config["num_hidden_layers"])


def _read(config: HfConfig) -> tuple[Family, Any]:
    family, _, overrides = translate.read_config(config)
    return family, config_from(overrides)


def _in_order(rules: list[Any]) -> Iterable[Any]:
    """Sort tensors layer by layer, as in saved models."""

    def layer_of(rule: Any) -> int:
        words = rule.ours.split(".")
        if words[1] == "layers":
            return int(words[2])
        return -1 if words[0] == "embedding" else len(rules)

    return sorted(rules, key=layer_of)


def _hidden_sizes() -> list[int]:
    narrow = list(range(SMALLEST, 2048, STEP))
    return narrow + list(range(2048, WIDEST + 1, 2 * STEP))
