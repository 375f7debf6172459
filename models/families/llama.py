"""Llama (Touvron et al. 2023): `LlamaForCausalLM`, and what the families that descend from it share."""

from __future__ import annotations

from configs import derived
from configs.schema import Config, ConfigError
from models.families.rules import GATE_UP, QKV, Family, HfConfig, Overrides, Rule, expect, is_untied

# What every descendant of Llama has.
COMMON_RULES = (
    Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",)),
    Rule("decoder.layers.{l}.input_layernorm.weight", ("model.layers.{l}.input_layernorm.weight",)),
    Rule("decoder.layers.{l}.self_attention.linear_proj.weight", ("model.layers.{l}.self_attn.o_proj.weight",)),
    Rule("decoder.layers.{l}.pre_mlp_layernorm.weight", ("model.layers.{l}.post_attention_layernorm.weight",)),
    Rule("decoder.final_layernorm.weight", ("model.norm.weight",)),
    Rule("output_layer.weight", ("lm_head.weight",), when=is_untied),
)
DENSE_RULES = (
    Rule(
        "decoder.layers.{l}.mlp.linear_fc1.weight",
        ("model.layers.{l}.mlp.gate_proj.weight", "model.layers.{l}.mlp.up_proj.weight"),
        GATE_UP,
        only="dense",
    ),
    Rule("decoder.layers.{l}.mlp.linear_fc2.weight", ("model.layers.{l}.mlp.down_proj.weight",), only="dense"),
)
QKV_RULE = Rule(
    "decoder.layers.{l}.self_attention.linear_qkv.weight",
    tuple(f"model.layers.{{l}}.self_attn.{part}_proj.weight" for part in "qkv"),
    QKV,
)
# The experts and the router under the names that most families give them.
EXPERT_RULES = (
    Rule("decoder.layers.{l}.mlp.router.weight", ("model.layers.{l}.mlp.gate.weight",), only="moe"),
    Rule(
        "decoder.layers.{l}.mlp.experts.{e}.linear_fc1.weight",
        ("model.layers.{l}.mlp.experts.{e}.gate_proj.weight", "model.layers.{l}.mlp.experts.{e}.up_proj.weight"),
        GATE_UP,
        only="moe",
    ),
    Rule("decoder.layers.{l}.mlp.experts.{e}.linear_fc2.weight", ("model.layers.{l}.mlp.experts.{e}.down_proj.weight",), only="moe"),
)
QK_NORM_RULES = (
    Rule("decoder.layers.{l}.self_attention.q_layernorm.weight", ("model.layers.{l}.self_attn.q_norm.weight",)),
    Rule("decoder.layers.{l}.self_attention.k_layernorm.weight", ("model.layers.{l}.self_attn.k_norm.weight",)),
)


def read_common(hf: HfConfig, architecture_name: str) -> Overrides:
    expect(hf, "hidden_act", ("silu",), "silu")
    expect(hf, "attention_bias", (False,), False)
    expect(hf, "mlp_bias", (False,), False)
    if hf.get("use_sliding_window", True):
        expect(hf, "sliding_window", (None,))
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type != "default":
        raise ConfigError(f"config.json rope_type ({rope_type}) is not supported: {architecture_name} must have plain rotary positions.")
    return {
        "model": {
            "family": "gpt",
            "num_layers": hf["num_hidden_layers"],
            "hidden_size": hf["hidden_size"],
            "ffn_hidden_size": hf["intermediate_size"],
            "num_attention_heads": hf["num_attention_heads"],
            "num_query_groups": hf.get("num_key_value_heads") or hf["num_attention_heads"],
            "head_dim": hf.get("head_dim"),
            "sequence_length": hf["max_position_embeddings"],
            "vocab_size": hf["vocab_size"],
            "tie_embeddings": hf.get("tie_word_embeddings", False),
            "position_embedding": "rope",
            "rotary_base": float(rope.get("rope_theta") or hf.get("rope_theta") or 10000.0),
            "normalization": "rmsnorm",
            "norm_epsilon": hf["rms_norm_eps"],
            "activation": "swiglu",
            "attention_dropout": hf.get("attention_dropout", 0.0),
            "init_std": hf.get("initializer_range", 0.02),
        },
        "moe": {"num_experts": None},
    }


def write_common(config: Config, model_type: str, architecture_name: str) -> HfConfig:
    model = config.model
    return {
        "architectures": [architecture_name],
        "model_type": model_type,
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "intermediate_size": derived.ffn_hidden_size(config),
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": derived.num_query_groups(config),
        "head_dim": derived.head_dim(config),
        "max_position_embeddings": model.sequence_length,
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": model.tie_embeddings,
        "rope_theta": model.rotary_base,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rotary_base},
        "rms_norm_eps": model.norm_epsilon,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": model.attention_dropout,
        "initializer_range": model.init_std,
    }


def _read(hf: HfConfig) -> Overrides:
    return read_common(hf, "LlamaForCausalLM")


def _write(config: Config) -> HfConfig:
    return {**write_common(config, "llama", "LlamaForCausalLM"), "mlp_bias": False}


def _carries_nothing(name: str, config: Config) -> bool:
    return name.endswith(".inv_freq")


FAMILY = Family("llama", _read, _write, (*COMMON_RULES, QKV_RULE, *DENSE_RULES), "model.", carries_nothing=_carries_nothing)
