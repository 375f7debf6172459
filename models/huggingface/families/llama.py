"""Llama (Touvron et al. 2023): `LlamaForCausalLM`, with the keys and rules that families derived from it share."""

from __future__ import annotations

import re
from functools import partial

from configs import derived
from configs.schema import Config
from models.huggingface.families.keys import (
    COUNT,
    EVERY_FAMILY,
    FLAG,
    LAYERS,
    OBJECT,
    POSITIVE,
    POSITIVE_REAL,
    PROBABILITY,
    REAL,
    SPREAD,
    HfConfig,
    Keys,
    carried,
    check_padding,
    irrelevant,
    must,
    only,
    or_null,
    show,
)
from models.huggingface.families.rules import (
    GATE_UP,
    QKV,
    Family,
    Overrides,
    Rule,
    has_biases,
    has_qkv_biases,
    is_untied,
)
from models.huggingface.rotary import rotary_base, rotary_scaling, write_rotary

# Rules of every descendant of Llama.
COMMON_RULES = (
    Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "vocab hidden"),
    Rule("decoder.layers.{l}.input_layernorm.weight", ("model.layers.{l}.input_layernorm.weight",), "hidden"),
    Rule(
        "decoder.layers.{l}.pre_mlp_layernorm.weight", ("model.layers.{l}.post_attention_layernorm.weight",), "hidden"
    ),
    Rule("decoder.final_layernorm.weight", ("model.norm.weight",), "hidden"),
    Rule("output_layer.weight", ("lm_head.weight",), "vocab hidden", when=is_untied),
)
DOWN_RULE = Rule(
    "decoder.layers.{l}.mlp.linear_fc2.weight", ("model.layers.{l}.mlp.down_proj.weight",), "hidden ffn", only="dense"
)
DENSE_RULES = (
    Rule(
        "decoder.layers.{l}.mlp.linear_fc1.weight",
        ("model.layers.{l}.mlp.gate_proj.weight", "model.layers.{l}.mlp.up_proj.weight"),
        "ffn hidden",
        GATE_UP,
        only="dense",
    ),
    DOWN_RULE,
)
OUTPUT_RULE = Rule(
    "decoder.layers.{l}.self_attention.linear_proj.weight",
    ("model.layers.{l}.self_attn.o_proj.weight",),
    "hidden queries",
)
ATTENTION_RULES = (
    Rule(
        "decoder.layers.{l}.self_attention.linear_qkv.weight",
        tuple(f"model.layers.{{l}}.self_attn.{name}_proj.weight" for name in "qkv"),
        ("queries hidden", "keys hidden", "keys hidden"),
        QKV,
    ),
    OUTPUT_RULE,
)
QKV_BIAS_RULES = (
    Rule(
        "decoder.layers.{l}.self_attention.linear_qkv.bias",
        tuple(f"model.layers.{{l}}.self_attn.{name}_proj.bias" for name in "qkv"),
        ("queries", "keys", "keys"),
        QKV,
        when=has_qkv_biases,
    ),
)
OTHER_BIAS_RULES = (
    Rule(
        "decoder.layers.{l}.self_attention.linear_proj.bias",
        ("model.layers.{l}.self_attn.o_proj.bias",),
        "hidden",
        when=has_biases,
    ),
    Rule(
        "decoder.layers.{l}.mlp.linear_fc1.bias",
        ("model.layers.{l}.mlp.gate_proj.bias", "model.layers.{l}.mlp.up_proj.bias"),
        "ffn",
        GATE_UP,
        when=has_biases,
    ),
    Rule("decoder.layers.{l}.mlp.linear_fc2.bias", ("model.layers.{l}.mlp.down_proj.bias",), "hidden", when=has_biases),
)


def expert_rules(block: str, gate: str, up: str, down: str) -> tuple[Rule, ...]:
    """Return the tensor rules of the router and the experts, with a family's names of them."""
    theirs = f"model.layers.{{l}}.{block}."
    return (
        Rule("decoder.layers.{l}.mlp.router.weight", (f"{theirs}gate.weight",), "experts hidden", only="moe"),
        Rule(
            "decoder.layers.{l}.mlp.experts.{e}.linear_fc1.weight",
            (f"{theirs}experts.{{e}}.{gate}.weight", f"{theirs}experts.{{e}}.{up}.weight"),
            "expert_ffn hidden",
            GATE_UP,
            only="moe",
        ),
        Rule(
            "decoder.layers.{l}.mlp.experts.{e}.linear_fc2.weight",
            (f"{theirs}experts.{{e}}.{down}.weight",),
            "hidden expert_ffn",
            only="moe",
        ),
    )


EXPERT_RULES = expert_rules("mlp", "gate_proj", "up_proj", "down_proj")


def qk_norm_rules(query: str, key: str) -> tuple[Rule, ...]:
    """Return the tensor rules of the query norm and the key norm; `query` and `key` name their lengths."""
    ours, theirs = "decoder.layers.{l}.self_attention.", "model.layers.{l}.self_attn."
    return (
        Rule(f"{ours}q_layernorm.weight", (f"{theirs}q_norm.weight",), query),
        Rule(f"{ours}k_layernorm.weight", (f"{theirs}k_norm.weight",), key),
    )


COMMON_KEYS: Keys = {
    **EVERY_FAMILY,
    "num_hidden_layers": carried(LAYERS),
    "hidden_size": carried(COUNT),
    "intermediate_size": carried(COUNT),
    "num_attention_heads": carried(COUNT),
    "num_key_value_heads": carried(or_null(COUNT), None),
    "max_position_embeddings": carried(COUNT),
    "tie_word_embeddings": carried(FLAG, False),
    # models/huggingface/rotary.py reads these
    "rope_theta": carried(POSITIVE, None),
    "rope_scaling": carried(or_null(OBJECT), None),
    "rope_parameters": carried(or_null(OBJECT), None),
    "original_max_position_embeddings": carried(COUNT, None),
    "rms_norm_eps": carried(POSITIVE_REAL, 1e-6),
    "attention_dropout": carried(PROBABILITY, 0.0),
    "initializer_range": carried(SPREAD, 0.02),
    "hidden_act": only("silu", "swish"),  # two names of one function
    "attention_bias": only(False),
    "sliding_window": only(None),
    "is_causal": only(True),
    "is_decoder": irrelevant(or_null(FLAG)),
    "add_cross_attention": only(False, None),
}
MOE_KEYS: Keys = {
    "num_experts_per_tok": carried(COUNT, 8),
    "output_router_logits": irrelevant(FLAG),
    "router_aux_loss_coef": irrelevant(REAL),
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
    """Return the config overrides of every family derived from Llama. `theta` is the family's default rotary base;
    models/huggingface/rotary.py describes how a family with its own rotary keys calls this. Raises ConfigError."""
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


def read_experts(keys: HfConfig) -> tuple[int, int]:
    """Return the number of experts and the number of experts per token. Raises ConfigError."""
    experts, top_k = keys["num_experts"], keys["num_experts_per_tok"]
    rule = f"not exceed the number of experts ({experts}: num_experts, num_local_experts or n_routed_experts)"
    must(top_k <= experts, "num_experts_per_tok", top_k, rule)
    return experts, top_k


def write_common(config: Config, model_type: str, architecture_name: str) -> HfConfig:
    """Return the config.json keys that every family derived from Llama has."""
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
    "head_dim": carried(or_null(COUNT), None),
    "max_position_embeddings": carried(COUNT, 2048),
    "attention_dropout": carried(or_null(PROBABILITY), 0.0),
    "attention_bias": carried(FLAG, False),
    "mlp_bias": carried(FLAG, False),
    "pretraining_tp": irrelevant(or_null(COUNT)),  # splits matrix products, without effect on the result
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
    """Whether a tensor holds only rotary frequencies, which old files store for each layer and an import ignores."""
    return re.fullmatch(r"(model\.)?layers\.\d+\.self_attn\.rotary_emb\.inv_freq", name) is not None


# A family whose files have Llama's names: model type, keys, read, write and rules are still to be given.
family = partial(
    Family,
    base_prefix="model.",
    tied=(("lm_head.weight", "model.embed_tokens.weight"),),
    carries_nothing=carries_nothing,
)
RULES = (*COMMON_RULES, *ATTENTION_RULES, *DENSE_RULES, *QKV_BIAS_RULES, *OTHER_BIAS_RULES)
FAMILY = family("llama", KEYS, _read, _write, RULES)
