"""Published config.json files as starts of the mutation check: every key stays, sizes are scaled down."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

Config = dict[str, Any]
VOCAB_SIZE, POSITIONS, LAYERS, HEADS = 61, 16, 2, 4
SMALL: Config = {
    **dict.fromkeys(("hidden_size", "n_embd"), 16),
    **dict.fromkeys(("intermediate_size",), 24),
    **dict.fromkeys(("n_inner",), 20),
    **dict.fromkeys(("num_hidden_layers", "n_layer"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head"), HEADS),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), POSITIONS),
    **dict.fromkeys(("num_experts", "num_local_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "kv_lora_rank", "sliding_window"), 12),
    "vocab_size": VOCAB_SIZE,
    "original_max_position_embeddings": POSITIONS // 2,
    "n_routed_experts": 8,
    "q_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    **dict.fromkeys(("dtype", "torch_dtype"), "float32"),
}
AT_MOST = {"first_k_dense_replace": 1, "max_window_layers": LAYERS, "num_experts_per_tok": 2}
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id")


def scaled(config: Config) -> Config:
    """A config with the same keys and small sizes, whose weights are neither quantized nor half floats."""
    small = {key: _scaled(key, value, config) for key, value in config.items() if key != "quantization_config"}
    if config.get("n_group", 1) > 1:
        small |= {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 4}
    return small


def _scaled(key: str, value: Any, config: Config) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if key in TOKENS:
        return [token % VOCAB_SIZE for token in value] if isinstance(value, list) else value % VOCAB_SIZE
    if key == "num_key_value_heads":
        return HEADS if value == config["num_attention_heads"] else 1 if value == 1 else 2
    if key == "head_dim":
        return 4 if value * config["num_attention_heads"] == config["hidden_size"] else 6
    if key == "layer_types":
        return value[:LAYERS]
    if key == "mlp_only_layers":
        return [layer for layer in value if layer < LAYERS]
    if key in ("rope_scaling", "rope_parameters"):
        return {name: _scaled(name, inner, config) for name, inner in value.items()}
    if key in ("long_factor", "short_factor"):
        return value[:2]  # of the four channels of a head
    return min(value, AT_MOST[key]) if key in AT_MOST else SMALL.get(key, value)


def make_starts(folder: Path, starts: dict[str, Config]) -> dict[str, str]:
    """Write a folder NAME for each config; what transformers says instead, by name, for those that it cannot make."""
    refused = {}
    for name, config in starts.items():
        try:
            make_start(folder / name, config)
        except Exception as error:  # each class has its own
            refused[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return refused


def make_start(folder: Path, config: Config) -> None:
    """Write a folder with this config.json as it stands, and random weights as transformers makes them of it. Raises
    what transformers does."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    names = config.get("architectures") or [""]
    auto = transformers.AutoModelForPreTraining if config["model_type"] == "bert" else transformers.AutoModelForCausalLM
    model_class = getattr(transformers, names[0], auto)
    torch.manual_seed(0)
    loaded = transformers.AutoConfig.from_pretrained(folder)
    model = auto.from_config(loaded) if model_class is auto else model_class(loaded)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.add_(0.1 * torch.randn_like(tensor))
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "config.json").write_text(json.dumps(config))


def read_starts(folder: Path) -> dict[str, Config]:
    """The configs of a folder of *.json files, scaled down, by FAMILY:NAME."""
    configs = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    return {
        f"{config['model_type']}:{name}": scaled(config) for name, config in configs.items() if "model_type" in config
    }


_LLAMA: Config = json.loads(
    """{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 32000, "hidden_size": 4096,
    "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
    "max_position_embeddings": 4096, "hidden_act": "silu", "initializer_range": 0.02, "rms_norm_eps": 1e-05,
    "bos_token_id": 1, "eos_token_id": 2, "pretraining_tp": 1, "rope_scaling": null, "tie_word_embeddings": false,
    "torch_dtype": "bfloat16", "transformers_version": "4.42.3", "use_cache": true}"""
)
# What some published files hold.
PUBLISHED: dict[str, Config] = {
    "llama:SmolLM2": _LLAMA
    | json.loads(
        """{"hidden_size": 960, "num_attention_heads": 15, "num_key_value_heads": 5, "tie_word_embeddings": true,
        "vocab_size": 49152, "max_position_embeddings": 8192, "pad_token_id": 2, "rope_theta": 100000,
        "is_llama_config": true, "rope_interleaved": false, "attention_bias": false, "mlp_bias": false,
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}}}"""
    ),
    "llama:ALLaM": _LLAMA
    | {"head_dim": 128, "internal_version": "7b-alpha-v2.33.0.30", "rope_theta": 1000000.0, "mlp_bias": False},
    "llama:unsloth": _LLAMA | {"pad_token_id": 0, "unsloth_version": "2024.9", "unsloth_fixed": True},
    "mixtral:8x7b": _LLAMA
    | json.loads(
        """{"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_key_value_heads": 8,
        "num_local_experts": 8, "num_experts_per_tok": 2, "moe_frequency": 1, "use_flash_attention": true,
        "sliding_window": null, "router_aux_loss_coef": 0.02, "output_router_logits": false, "rope_theta": 1e6}"""
    ),
    "qwen3_moe:Coder-480B": json.loads(
        """{"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 6144,
        "intermediate_size": 8192, "moe_intermediate_size": 2560, "num_hidden_layers": 62, "head_dim": 128,
        "num_attention_heads": 96, "num_key_value_heads": 8, "num_experts": 160, "num_experts_per_tok": 8,
        "max_position_embeddings": 262144, "vocab_size": 151936, "rms_norm_eps": 1e-06, "rope_theta": 10000000,
        "norm_topk_prob": true, "decoder_sparse_step": 1, "mlp_only_layers": [], "max_window_layers": 62,
        "use_sliding_window": false, "sliding_window": null, "rope_scaling": null, "hidden_act": "silu",
        "qkv_bias": false, "use_qk_norm": true, "shared_expert_intermediate_size": 0, "torch_dtype": "bfloat16"}"""
    ),
    "bert:base": json.loads(
        """{"model_type": "bert", "architectures": ["BertForMaskedLM"], "vocab_size": 30522, "hidden_size": 768,
        "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12, "hidden_act": "gelu",
        "max_position_embeddings": 512, "type_vocab_size": 2, "layer_norm_eps": 1e-12, "pad_token_id": 0,
        "gradient_checkpointing": false, "position_embedding_type": "absolute", "model_max_length": 512}"""
    ),
}
