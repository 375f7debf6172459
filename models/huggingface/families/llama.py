"""Llama (Touvron et al. 2023): `LlamaForCausalLM`, with the keys and rules that families derived from it share."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

from configs import derived
from configs.schema import Config
from models.huggingface.families import kinds
from models.huggingface.families.keys import (
    EVERY_FAMILY,
    HfConfig,
    Keys,
    carried,
    check_padding,
    irrelevant,
    must,
    only,
    show,
)
from models.huggingface.families.rules import (
    QKV,
    SAME,
    Family,
    Layout,
    Overrides,
    Rule,
    has_biases,
    has_qkv_biases,
    is_untied,
)
from models.huggingface.rotary import rotary_base, rotary_scaling, write_rotary

QKV_PROJECTIONS = " ".join(f"self_attn.{name}_proj" for name in "qkv")


def layer_rule(
    ours: str, theirs: str, shape: str | tuple[str, ...], layout: Layout = SAME, kind: str = "weight", **limits: Any
) -> Rule:
    """Return the tensor rule for the weight or bias (`kind`) of a module in every layer. `ours` and `theirs` name
    modules within a layer; spaces separate several. `limits`: the layers (`only`) and models (`when`) that have the
    module."""
    names = tuple(f"model.layers.{{l}}.{name}.{kind}" for name in theirs.split())
    return Rule(f"decoder.layers.{{l}}.{ours}.{kind}", names, shape, layout, **limits)


# Rules of every descendant of Llama.
COMMON_RULES = (
    Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "vocab hidden"),
    layer_rule("input_layernorm", "input_layernorm", "hidden"),
    layer_rule("pre_mlp_layernorm", "post_attention_layernorm", "hidden"),
    Rule("decoder.final_layernorm.weight", ("model.norm.weight",), "hidden"),
    Rule("output_layer.weight", ("lm_head.weight",), "vocab hidden", when=is_untied),
)
DOWN_RULE = layer_rule("mlp.linear_fc2", "mlp.down_proj", "hidden ffn", only="dense")
DENSE_RULES = (layer_rule("mlp.linear_fc1", "mlp.gate_proj mlp.up_proj", "ffn hidden", only="dense"), DOWN_RULE)
OUTPUT_RULE = layer_rule("self_attention.linear_proj", "self_attn.o_proj", "hidden queries")
ATTENTION_RULES = (
    layer_rule("self_attention.linear_qkv", QKV_PROJECTIONS, ("queries hidden", "keys hidden", "keys hidden"), QKV),
    OUTPUT_RULE,
)
QKV_BIAS_RULE = layer_rule(
    "self_attention.linear_qkv", QKV_PROJECTIONS, ("queries", "keys", "keys"), QKV, "bias", when=has_qkv_biases
)
OTHER_BIAS_RULES = (
    layer_rule("self_attention.linear_proj", "self_attn.o_proj", "hidden", kind="bias", when=has_biases),
    layer_rule("mlp.linear_fc1", "mlp.gate_proj mlp.up_proj", "ffn", kind="bias", when=has_biases),
    layer_rule("mlp.linear_fc2", "mlp.down_proj", "hidden", kind="bias", when=has_biases),
)


def expert_rules(block: str, gate: str, up: str, down: str) -> tuple[Rule, ...]:
    """Return the tensor rules of an MoE layer's router and experts. `block`, `gate`, `up` and `down` are the family's
    names of the MoE block and of the experts' projections."""
    expert = f"{block}.experts.{{e}}"
    return (
        layer_rule("mlp.router", f"{block}.gate", "experts hidden", only="moe"),
        layer_rule("mlp.experts.{e}.linear_fc1", f"{expert}.{gate} {expert}.{up}", "expert_ffn hidden", only="moe"),
        layer_rule("mlp.experts.{e}.linear_fc2", f"{expert}.{down}", "hidden expert_ffn", only="moe"),
    )


EXPERT_RULES = expert_rules("mlp", "gate_proj", "up_proj", "down_proj")


def qk_norm_rules(query: str, key: str) -> tuple[Rule, ...]:
    """Return the tensor rules of the query norm and the key norm. `query` and `key` are the names of their
    dimensions."""
    return (
        layer_rule("self_attention.q_layernorm", "self_attn.q_norm", query),
        layer_rule("self_attention.k_layernorm", "self_attn.k_norm", key),
    )


COMMON_KEYS: Keys = {
    **EVERY_FAMILY,
    "num_hidden_layers": carried(kinds.LAYERS),
    "hidden_size": carried(kinds.COUNT),
    "intermediate_size": carried(kinds.COUNT),
    "num_attention_heads": carried(kinds.COUNT),
    "num_key_value_heads": carried(kinds.or_null(kinds.COUNT), None),
    "max_position_embeddings": carried(kinds.COUNT),
    "tie_word_embeddings": carried(kinds.FLAG, False),
    # models/huggingface/rotary.py reads these
    "rope_theta": carried(kinds.POSITIVE, None),
    "rope_scaling": carried(kinds.or_null(kinds.OBJECT), None),
    "rope_parameters": carried(kinds.or_null(kinds.OBJECT), None),
    "original_max_position_embeddings": carried(kinds.COUNT, None),
    "rms_norm_eps": carried(kinds.POSITIVE_REAL, 1e-6),
    "attention_dropout": carried(kinds.PROBABILITY, 0.0),
    "initializer_range": carried(kinds.SPREAD, 0.02),
    "hidden_act": only("silu", "swish"),  # two names of one function
    "attention_bias": only(False),
    "sliding_window": only(None),
    "is_causal": only(True),
    "is_decoder": irrelevant(kinds.or_null(kinds.FLAG)),
    "add_cross_attention": only(False, None),
}
MOE_KEYS: Keys = {
    "num_experts_per_tok": carried(kinds.COUNT, 8),
    "output_router_logits": irrelevant(kinds.FLAG),
    "router_aux_loss_coef": irrelevant(kinds.REAL),
}


def head_dim(keys: HfConfig) -> int:
    """Return the number of channels of a head: `head_dim`, or `hidden_size` / heads. Raises ConfigError if it is odd,
    because rotary positions rotate pairs of channels."""
    hidden, heads = keys["hidden_size"], keys["num_attention_heads"]
    if keys.get("head_dim") is not None:
        size = keys["head_dim"]
        must(size % 2 == 0, "head_dim", size, "be even, because rotary positions rotate pairs of channels")
        return int(size)
    size = hidden // heads
    rule = f"divide hidden_size ({hidden}) into heads with an even number of channels, unless head_dim is given"
    must(size > 0 and size % 2 == 0, "num_attention_heads", heads, rule)
    return int(size)


def read_common(keys: HfConfig, theta: float = 10000.0) -> Overrides:
    """Return the config overrides of every family derived from Llama. `theta` is the family's default rotary base.
    Raises ConfigError."""
    heads, groups = keys["num_attention_heads"], keys["num_key_value_heads"] or keys["num_attention_heads"]
    must(heads % groups == 0, "num_key_value_heads", groups, f"divide num_attention_heads ({heads})")
    check_padding(keys)
    return {
        "model": {
            "family": "gpt",
            "num_layers": keys["num_hidden_layers"],
            "hidden_size": keys["hidden_size"],
            "ffn_hidden_size": keys["intermediate_size"],
            "num_attention_heads": heads,
            "num_query_groups": groups,
            "head_dim": head_dim(keys),
            "sequence_length": keys["max_position_embeddings"],
            "vocab_size": keys["vocab_size"],
            "tie_embeddings": keys["tie_word_embeddings"],
            "position_embedding": "rope",
            "rotary_base": rotary_base(keys, theta),
            "rotary_scaling": rotary_scaling(keys),
            "normalization": "rmsnorm",
            "norm_epsilon": keys["rms_norm_eps"],
            "activation": "swiglu",
            "attention_dropout": float(keys["attention_dropout"]),
            "init_std": keys["initializer_range"],
        },
        "moe": {"num_experts": None},
    }


def read_experts(keys: HfConfig, width: str) -> dict[str, Any]:
    """Return the config overrides for the number of experts, the number of experts per token, and the experts' width,
    which is the value of the key `width`. Raises ConfigError."""
    experts, top_k = keys["num_experts"], keys["num_experts_per_tok"]
    rule = f"not exceed the number of experts ({experts}: num_experts, num_local_experts or n_routed_experts)"
    must(top_k <= experts, "num_experts_per_tok", top_k, rule)
    return {"num_experts": experts, "top_k": top_k, "ffn_hidden_size": keys[width]}


def write_common(config: Config, model_type: str, architecture_name: str) -> HfConfig:
    """Return the config.json keys and values that every family derived from Llama has."""
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
        **write_rotary(config),
        "rms_norm_eps": model.norm_epsilon,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": model.attention_dropout,
        "initializer_range": model.init_std,
    }


KEYS: Keys = {
    **COMMON_KEYS,
    "head_dim": carried(kinds.or_null(kinds.COUNT), None),
    "max_position_embeddings": carried(kinds.COUNT, 2048),
    "attention_dropout": carried(kinds.or_null(kinds.PROBABILITY), 0.0),
    "attention_bias": carried(kinds.FLAG, False),
    "mlp_bias": carried(kinds.FLAG, False),
    "pretraining_tp": irrelevant(kinds.or_null(kinds.COUNT)),  # splits matrix products, without effect on the result
}


def _read(keys: HfConfig) -> Overrides:
    hidden, heads = keys["hidden_size"], keys["num_attention_heads"]
    must(hidden % heads == 0, "num_attention_heads", heads, f"divide hidden_size ({hidden})")
    biases = keys["attention_bias"]
    rule = f"be attention_bias ({show(biases)}): biases in one of the two alone are not supported"
    must(keys["mlp_bias"] == biases, "mlp_bias", keys["mlp_bias"], rule)
    overrides = read_common({**keys, "attention_dropout": keys["attention_dropout"] or 0.0})
    overrides["model"]["linear_bias"] = biases
    return overrides


def _write(config: Config) -> HfConfig:
    biases = config.model.linear_bias
    return {**write_common(config, "llama", "LlamaForCausalLM"), "attention_bias": biases, "mlp_bias": biases}


def carries_nothing(name: str, config: Config, hf: HfConfig) -> bool:
    """Return whether a tensor holds only rotary frequencies, which old files store per layer and an import ignores."""
    return re.fullmatch(r"(model\.)?layers\.\d+\.self_attn\.rotary_emb\.inv_freq", name) is not None


# A family whose files have Llama's names: model type, keys, read, write and rules are still to be given.
family = partial(
    Family,
    base_prefix="model.",
    tied=(("lm_head.weight", "model.embed_tokens.weight"),),
    carries_nothing=carries_nothing,
)
RULES = (*COMMON_RULES, *ATTENTION_RULES, *DENSE_RULES, QKV_BIAS_RULE, *OTHER_BIAS_RULES)
FAMILY = family("llama", KEYS, _read, _write, RULES)
