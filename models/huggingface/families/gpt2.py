"""GPT-2 (Radford et al. 2019): `GPT2LMHeadModel`."""

from __future__ import annotations

import re

from configs import derived
from configs.schema import Config
from models.huggingface.families import kinds
from models.huggingface.families.keys import EVERY_FAMILY, FamilyKey, HfConfig, Keys, carried, irrelevant, must, only
from models.huggingface.families.rules import (
    GELU_NAMES,
    GELUS,
    QKV_IN_ONE_TRANSPOSED,
    TRANSPOSED,
    Family,
    Overrides,
    Rule,
    is_untied,
    weight_and_bias,
)

OURS, THEIRS = "decoder.layers.{l}", "transformer.h.{l}"
RULES = (
    Rule("embedding.word_embeddings.weight", ("transformer.wte.weight",), "vocab hidden"),
    Rule("embedding.position_embeddings.weight", ("transformer.wpe.weight",), "positions hidden"),
    *weight_and_bias(f"{OURS}.input_layernorm", f"{THEIRS}.ln_1", "hidden"),
    *weight_and_bias(f"{OURS}.self_attention.linear_qkv", f"{THEIRS}.attn.c_attn", "hidden qkv", QKV_IN_ONE_TRANSPOSED),
    *weight_and_bias(f"{OURS}.self_attention.linear_proj", f"{THEIRS}.attn.c_proj", "queries hidden", TRANSPOSED),
    *weight_and_bias(f"{OURS}.pre_mlp_layernorm", f"{THEIRS}.ln_2", "hidden"),
    *weight_and_bias(f"{OURS}.mlp.linear_fc1", f"{THEIRS}.mlp.c_fc", "hidden ffn", TRANSPOSED),
    *weight_and_bias(f"{OURS}.mlp.linear_fc2", f"{THEIRS}.mlp.c_proj", "ffn hidden", TRANSPOSED),
    *weight_and_bias("decoder.final_layernorm", "transformer.ln_f", "hidden"),
    Rule("output_layer.weight", ("lm_head.weight",), "vocab hidden", when=is_untied),
)
KEYS: Keys = {
    **EVERY_FAMILY,
    "n_layer": carried(kinds.LAYERS, also=("num_hidden_layers",)),
    "n_embd": carried(kinds.COUNT, also=("hidden_size",)),
    "n_head": carried(kinds.COUNT, also=("num_attention_heads",)),
    "n_positions": carried(kinds.COUNT, also=("max_position_embeddings",)),
    "n_ctx": irrelevant(kinds.or_null(kinds.COUNT)),  # old files repeat n_positions here, or an earlier value of it
    "n_inner": carried(kinds.or_null(kinds.COUNT), None),
    "tie_word_embeddings": carried(kinds.FLAG, True),
    "layer_norm_epsilon": carried(kinds.POSITIVE_REAL, 1e-5),
    "activation_function": FamilyKey(kinds.ANYTHING, "gelu_new", only=tuple(GELUS)),
    "resid_pdrop": carried(kinds.PROBABILITY, 0.1),
    "embd_pdrop": carried(kinds.PROBABILITY, 0.1),
    "attn_pdrop": carried(kinds.PROBABILITY, 0.1),
    "initializer_range": carried(kinds.SPREAD, 0.02),
    "scale_attn_weights": only(True),
    "scale_attn_by_inverse_layer_idx": only(False),
    "reorder_and_upcast_attn": irrelevant(kinds.FLAG),  # the same sums in another order
    "is_causal": only(True),
    "is_decoder": irrelevant(kinds.FLAG),
    "n_special": only(0),
    "predict_special_tokens": irrelevant(kinds.FLAG),
    # For a head for classification.
    "summary_type": irrelevant(kinds.TEXT),
    "summary_use_proj": irrelevant(kinds.FLAG),
    "summary_activation": irrelevant(kinds.or_null(kinds.TEXT)),
    "summary_proj_to_labels": irrelevant(kinds.FLAG),
    "summary_first_dropout": irrelevant(kinds.NUMBER),
}


def _read(keys: HfConfig) -> Overrides:
    hidden, heads, positions = keys["n_embd"], keys["n_head"], keys["n_positions"]
    must(hidden % heads == 0, "n_head", heads, f"divide n_embd ({hidden})")
    dropout = keys["resid_pdrop"]
    rule = f"be resid_pdrop ({dropout}): Mixtrain has one value for both"
    must(keys["embd_pdrop"] == dropout, "embd_pdrop", keys["embd_pdrop"], rule)
    return {
        "model": {
            "family": "gpt",
            "num_layers": keys["n_layer"],
            "hidden_size": hidden,
            "ffn_hidden_size": keys["n_inner"] or 4 * hidden,
            "num_attention_heads": heads,
            "sequence_length": positions,
            "vocab_size": keys["vocab_size"],
            "tie_embeddings": keys["tie_word_embeddings"],
            "position_embedding": "learned",
            "normalization": "layernorm",
            "norm_epsilon": keys["layer_norm_epsilon"],
            "activation": GELUS[keys["activation_function"]],
            "linear_bias": True,
            "hidden_dropout": float(dropout),
            "attention_dropout": float(keys["attn_pdrop"]),
            "init_std": keys["initializer_range"],
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


CAUSAL_MASK = re.compile(r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)")
TIED = (("lm_head.weight", "transformer.wte.weight"),)
FAMILY = Family(
    "gpt2",
    KEYS,
    _read,
    _write,
    RULES,
    "transformer.",
    TIED,
    carries_nothing=lambda name, config, keys: CAUSAL_MASK.fullmatch(name) is not None,
    telling=r"(transformer\.)?h\.0\.attn\.c_attn\.weight",
)
