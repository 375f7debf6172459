"""GPT-2 (Radford et al. 2019): `GPT2LMHeadModel`."""

from __future__ import annotations

from configs import derived
from configs.schema import Config
from models.families.rules import (
    GELU_NAMES,
    GELUS,
    QKV_IN_ONE_TRANSPOSED,
    TRANSPOSED,
    Family,
    HfConfig,
    Overrides,
    Rule,
    expect,
    is_untied,
    weight_and_bias,
)

RULES = (
    Rule("embedding.word_embeddings.weight", ("transformer.wte.weight",)),
    Rule("embedding.position_embeddings.weight", ("transformer.wpe.weight",)),
    *weight_and_bias("decoder.layers.{l}.input_layernorm", "transformer.h.{l}.ln_1"),
    *weight_and_bias("decoder.layers.{l}.self_attention.linear_qkv", "transformer.h.{l}.attn.c_attn", QKV_IN_ONE_TRANSPOSED),
    *weight_and_bias("decoder.layers.{l}.self_attention.linear_proj", "transformer.h.{l}.attn.c_proj", TRANSPOSED),
    *weight_and_bias("decoder.layers.{l}.pre_mlp_layernorm", "transformer.h.{l}.ln_2"),
    *weight_and_bias("decoder.layers.{l}.mlp.linear_fc1", "transformer.h.{l}.mlp.c_fc", TRANSPOSED),
    *weight_and_bias("decoder.layers.{l}.mlp.linear_fc2", "transformer.h.{l}.mlp.c_proj", TRANSPOSED),
    *weight_and_bias("decoder.final_layernorm", "transformer.ln_f"),
    Rule("output_layer.weight", ("lm_head.weight",), when=is_untied),
)


def _read(hf: HfConfig) -> Overrides:
    expect(hf, "scale_attn_weights", (True,), True)
    expect(hf, "scale_attn_by_inverse_layer_idx", (False,), False)
    expect(hf, "add_cross_attention", (False,), False)
    return {
        "model": {
            "family": "gpt",
            "num_layers": hf["n_layer"],
            "hidden_size": hf["n_embd"],
            "ffn_hidden_size": hf.get("n_inner") or 4 * hf["n_embd"],
            "num_attention_heads": hf["n_head"],
            "sequence_length": hf["n_positions"],
            "vocab_size": hf["vocab_size"],
            "tie_embeddings": hf.get("tie_word_embeddings", True),
            "position_embedding": "learned",
            "normalization": "layernorm",
            "norm_epsilon": hf["layer_norm_epsilon"],
            "activation": GELUS[expect(hf, "activation_function", tuple(GELUS), "gelu_new")],
            "linear_bias": True,
            "hidden_dropout": hf["resid_pdrop"],
            "attention_dropout": hf["attn_pdrop"],
            "init_std": hf["initializer_range"],
        },
        "moe": {"num_experts": None},
    }


def _write(config: Config) -> HfConfig:
    model = config.model
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_layer": model.num_layers,
        "n_embd": model.hidden_size,
        "n_inner": derived.ffn_hidden_size(config),
        "n_head": model.num_attention_heads,
        "n_positions": model.sequence_length,
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": model.tie_embeddings,
        "layer_norm_epsilon": model.norm_epsilon,
        "activation_function": GELU_NAMES.get(model.activation, "gelu_new"),
        "resid_pdrop": model.hidden_dropout,
        "embd_pdrop": model.hidden_dropout,
        "attn_pdrop": model.attention_dropout,
        "initializer_range": model.init_std,
    }


def _carries_nothing(name: str, config: Config) -> bool:
    return name.endswith((".attn.bias", ".attn.masked_bias"))  # causal masks


FAMILY = Family("gpt2", _read, _write, RULES, "transformer.", carries_nothing=_carries_nothing)
