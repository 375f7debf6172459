"""Published config.json files as starts of checks: every key stays, sizes are scaled down."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from models.huggingface.translate import FAMILIES

Config = dict[str, Any]
# Families that transformers has no class for: the code that their folders bring is that of another.
COMPUTED_AS = {name: family.runs_as for name, family in FAMILIES.items() if family.runs_as != name}
VOCAB_SIZE, POSITIONS, LAYERS, HEADS, HEAD_DIM = 61, 16, 2, 4, 8
SMALL: Config = {
    **dict.fromkeys(("hidden_size", "n_embd"), HEADS * HEAD_DIM),
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
}
BLOCK = 2  # rows and columns that share a scale: it divides all sizes, without which transformers reads other blocks
AT_MOST = {"first_k_dense_replace": 1, "max_window_layers": LAYERS, "num_experts_per_tok": 2}
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id")


def scaled(config: Config, sizes: Config | None = None, plain: bool = True) -> Config:
    """A config with the same keys and small sizes: `sizes` instead of SMALL's. plain: the weights are neither quantized
    nor half floats."""
    small = {key: _scaled(key, value, config, SMALL | (sizes or {})) for key, value in config.items()}
    if config.get("n_group", 1) > 1:
        small |= {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 4}
    if plain:
        small.pop("quantization_config", None)
        small |= {key: "float32" for key in ("dtype", "torch_dtype") if small.get(key) is not None}
    elif (small.get("quantization_config") or {}).get("weight_block_size"):
        small["quantization_config"] = {**small["quantization_config"], "weight_block_size": [BLOCK, BLOCK]}
    return small


def _scaled(key: str, value: Any, config: Config, small: Config) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if key in TOKENS:
        vocab = small["vocab_size"]
        return [token % vocab for token in value] if isinstance(value, list) else value % vocab
    if key == "num_key_value_heads":
        return HEADS if value == config["num_attention_heads"] else 1 if value == 1 else 2
    if key == "head_dim":
        return HEAD_DIM if value * config["num_attention_heads"] == config["hidden_size"] else HEAD_DIM + 2
    if key == "layer_types":
        return value[:LAYERS]
    if key == "mlp_only_layers":
        return [layer for layer in value if layer < LAYERS]
    if key in ("rope_scaling", "rope_parameters"):
        return {name: _scaled(name, inner, config, small) for name, inner in value.items()}
    if key in ("long_factor", "short_factor"):
        return value[: int(HEAD_DIM * config.get("partial_rotary_factor", 1.0)) // 2]  # one for two channels that turn
    return min(value, AT_MOST[key]) if key in AT_MOST else small.get(key, value)


def make_starts(folder: Path, starts: dict[str, Config]) -> dict[str, str]:
    """Write a folder NAME for each config; return transformers' error, by name, for those that it cannot make."""
    refused = {}
    for name, config in starts.items():
        try:
            make_start(folder / name, config)
        except Exception as error:  # each class has its own
            refused[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return refused


def make_start(folder: Path, config: Config, seed: int = 0) -> None:
    """Write a folder with this config.json as it stands, and random weights of its type, quantised if the config is,
    as transformers makes them. Raises transformers' errors."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    folder.mkdir(parents=True)
    code = {**config, "model_type": COMPUTED_AS.get(config["model_type"], config["model_type"])}
    plain = {key: value for key, value in code.items() if key not in ("quantization_config", "auto_map")}
    (folder / "config.json").write_text(json.dumps(plain))
    names = config.get("architectures") or [""]
    auto = transformers.AutoModelForPreTraining if config["model_type"] == "bert" else transformers.AutoModelForCausalLM
    model_class = getattr(transformers, names[0], auto)
    torch.manual_seed(seed)
    loaded = transformers.AutoConfig.from_pretrained(folder)
    model = auto.from_config(loaded) if model_class is auto else model_class(loaded)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.add_(0.1 * torch.randn_like(tensor))
    named = str(config.get("torch_dtype") or config.get("dtype") or "float32")
    model.to(getattr(torch, named)).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if (config.get("quantization_config") or {}).get("quant_method") == "fp8":
        _quantise(folder / "model.safetensors", config["quantization_config"])


def _quantise(file: Path, settings: Config) -> None:
    """Replace each matrix of the layers by its values in e4m3 and a scale for each block, as DeepSeek-V3's folder has
    them."""
    block_rows, columns = settings["weight_block_size"]
    skipped = (*(settings.get("modules_to_not_convert") or ()), "lm_head", "embed_tokens", "norm", "mlp.gate.")
    tensors = {}
    for name, weight in load_file(file).items():
        tensors[name] = weight
        if weight.dim() != 2 or not name.endswith(".weight") or any(word in name for word in skipped):
            continue
        blocks = (
            weight.float().unflatten(1, (-1, columns)).unflatten(0, (-1, block_rows))
        )  # [bands, rows, blocks, columns]
        scale = blocks.abs().amax(dim=(1, 3)) / torch.finfo(torch.float8_e4m3fn).max
        quantised = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
        tensors[name] = quantised.flatten(2).flatten(0, 1).contiguous()
        tensors[f"{name}_scale_inv"] = scale
    save_file(tensors, file, metadata={"format": "pt"})


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
