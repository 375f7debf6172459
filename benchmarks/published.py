"""A published config.json made small: its keys stay, its sizes shrink, and a folder with random weights is made of it.

What a model's code reads is kept: which keys there are, their kinds, ratios of heads, groups of experts, the share of a
head that rotates, factors of scaled positions, the type of the weights, and their quantisation.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch

HfConfig = dict[str, Any]
LENGTH = 40  # tokens of a sample
ORIGINAL = 48  # positions that a model with scaled positions was trained with
VOCAB_SIZE = 512
BLOCK = 8  # rows and columns that share a scale: it divides all sizes, without which transformers reads other blocks
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id")
NESTED = ("rope_scaling", "rope_parameters")


def scaled(published: HfConfig) -> HfConfig:
    """The config with its sizes scaled down."""
    hf = copy.deepcopy(published)
    _vocabulary(hf)
    _heads(hf)
    _layers(hf)
    _experts(hf)
    _positions(hf)
    return hf


def _set(hf: HfConfig, key: str, value: Any) -> None:
    if hf.get(key) is not None:
        hf[key] = value


def _vocabulary(hf: HfConfig) -> None:
    vocab = hf.get("vocab_size", VOCAB_SIZE)
    _set(hf, "vocab_size", VOCAB_SIZE)
    for key in TOKENS:
        value = hf.get(key)
        ids = value if isinstance(value, list) else [value]
        small = [i if not isinstance(i, int) or i < VOCAB_SIZE or i >= vocab else VOCAB_SIZE - 1 - i % 16 for i in ids]
        if value is not None:
            hf[key] = small if isinstance(value, list) else small[0]


def _heads(hf: HfConfig) -> None:
    heads_key = "n_head" if "n_head" in hf else "num_attention_heads"
    heads, groups = hf[heads_key], hf.get("num_key_value_heads") or hf[heads_key]
    groups_now = 1 if groups == 1 else 2 if groups < heads else 4
    heads_now = groups_now * min(heads // groups, 3)
    hf[heads_key] = heads_now
    latent = "kv_lora_rank" in hf
    _set(hf, "num_key_value_heads", heads_now if latent or groups == heads else groups_now)
    width = hf["n_embd" if "n_embd" in hf else "hidden_size"]
    head = hf.get("head_dim")
    follows = head is None or head * heads == width
    channels = 16
    hidden = heads_now * channels if follows else heads_now * channels + 16
    for key in ("n_embd", "hidden_size"):
        _set(hf, key, hidden)
    if not latent:
        _set(hf, "head_dim", channels)
    for key, size in (("intermediate_size", 88), ("n_inner", 88), ("q_lora_rank", 40), ("kv_lora_rank", 24)):
        _set(hf, key, size)
    for key, size in (("qk_nope_head_dim", 16), ("qk_rope_head_dim", 8), ("v_head_dim", 8), ("qk_head_dim", 24)):
        _set(hf, key, size)
    if latent:
        _set(hf, "head_dim", 8)


def _layers(hf: HfConfig) -> None:
    key = "n_layer" if "n_layer" in hf else "num_hidden_layers"
    before = hf[key]
    hf[key] = 3 if hf.get("first_k_dense_replace") or hf.get("layer_types") else 2
    now = hf[key]
    _set(hf, "first_k_dense_replace", min(1, hf.get("first_k_dense_replace") or 0))
    if hf.get("layer_types"):
        hf["layer_types"] = hf["layer_types"][:now]
    if hf.get("max_window_layers") is not None:
        hf["max_window_layers"] = now if hf["max_window_layers"] >= before else max(1, now - 1)
    if hf.get("mlp_only_layers"):
        hf["mlp_only_layers"] = [layer for layer in hf["mlp_only_layers"] if layer < now - 1]


def _experts(hf: HfConfig) -> None:
    groups = hf.get("n_group") or 1
    top_k = hf.get("num_experts_per_tok")
    now = max(8, 2 * groups)
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        _set(hf, key, now)
    if top_k is not None and not hf.get("topk_group"):
        hf["num_experts_per_tok"] = min(top_k, now // 2)
    _set(hf, "moe_intermediate_size", 24)
    if hf.get("shared_expert_intermediate_size"):
        hf["shared_expert_intermediate_size"] = 56


def _positions(hf: HfConfig) -> None:
    positions_key = next(key for key in ("max_position_embeddings", "n_positions", "n_ctx") if key in hf)
    longest = hf[positions_key]
    scaling: HfConfig = {}
    for key in NESTED:
        if isinstance(hf.get(key), dict) and (hf[key].get("rope_type") or hf[key].get("type")) not in (None, "default"):
            scaling = hf[key]
    original = scaling.get("original_max_position_embeddings") or hf.get("original_max_position_embeddings")
    if scaling:
        ratio = longest / (original or longest)
        for holder in (*(hf[key] for key in NESTED if isinstance(hf.get(key), dict)), hf):
            _set(holder, "original_max_position_embeddings", ORIGINAL)
        longest = round(ORIGINAL * ratio)
        channels = hf["qk_rope_head_dim"] if "kv_lora_rank" in hf else _head_dim(hf)
        rotating = int(channels * (hf.get("partial_rotary_factor") or scaling.get("partial_rotary_factor") or 1.0))
        for key in ("short_factor", "long_factor"):
            if key in scaling:
                scaling[key] = scaling[key][: rotating // 2]
    else:
        longest = 64
        _set(hf, "original_max_position_embeddings", 64)
    for key in ("max_position_embeddings", "n_positions", "n_ctx"):
        _set(hf, key, longest)
    _set(hf, "sliding_window", ORIGINAL // 3)
    if (hf.get("quantization_config") or {}).get("weight_block_size"):
        hf["quantization_config"]["weight_block_size"] = [BLOCK, BLOCK]


def _head_dim(hf: HfConfig) -> int:
    return int(hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"])


def make_folder(hf: HfConfig, folder: Path, seed: int) -> None:
    """Write a model of a small config, with random weights, as its authors' folder: config.json as given, weights of
    its type, quantised where it says so. Raises what transformers raises."""
    import transformers

    given = {key: value for key, value in hf.items() if key not in ("quantization_config", "auto_map")}
    if given.get("model_type") == "kimi_k2":  # the code that the folder comes with is DeepSeek-V3's
        given["model_type"] = "deepseek_v3"
    config = transformers.AutoConfig.for_model(**{k: v for k, v in given.items() if k not in ("torch_dtype", "dtype")})
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = (
        _bert(given)(config) if config.model_type == "bert" else transformers.AutoModelForCausalLM.from_config(config)
    )
    with torch.no_grad():
        for name, value in (*model.named_parameters(), *model.named_buffers()):
            if value.is_floating_point() and "inv_freq" not in name:
                value.add_(0.05 * torch.randn_like(value))
    named = str(hf.get("torch_dtype") or hf.get("dtype") or "float32")
    dtype = getattr(torch, named if named in ("float32", "bfloat16", "float16") else "float32")
    model.to(dtype).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(hf, indent=2) + "\n")
    if (hf.get("quantization_config") or {}).get("quant_method") == "fp8":
        _quantise(folder, hf["quantization_config"])


def _bert(hf: HfConfig) -> Any:
    import transformers

    return getattr(transformers, (hf.get("architectures") or ["BertForMaskedLM"])[0])


def _quantise(folder: Path, settings: HfConfig) -> None:
    """Replace each matrix of the layers by its values in e4m3 and a scale for each block, as DeepSeek-V3's folder has
    them."""
    from safetensors.torch import load_file, save_file

    rows, columns = settings["weight_block_size"]
    skipped = (*(settings.get("modules_to_not_convert") or ()), "lm_head", "embed_tokens", "norm", "mlp.gate.")
    tensors = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        tensors[name] = weight
        if weight.dim() != 2 or not name.endswith(".weight") or any(part in name for part in skipped):
            continue
        scale = torch.zeros(-(-weight.size(0) // rows), -(-weight.size(1) // columns))
        quantised = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
        for i in range(scale.size(0)):
            for j in range(scale.size(1)):
                block = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
                scale[i, j] = weight[block].float().abs().max() / 448
                quantised[block] = (weight[block].float() / scale[i, j]).to(torch.float8_e4m3fn)
        tensors[name] = quantised
        tensors[name + "_scale_inv"] = scale
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
