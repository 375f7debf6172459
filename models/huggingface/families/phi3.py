"""Phi-3 (arXiv:2404.14219) and Phi-4: `Phi3ForCausalLM`. Queries, keys and values are one matrix, and so are the gate
and up projections; a fraction of each head's channels may rotate."""

from __future__ import annotations

from configs import derived
from configs.rotary import LENGTH, kind_of
from configs.schema import Config
from models.huggingface.families import kinds, llama
from models.huggingface.families.keys import FamilyKey, HfConfig, Keys, carried, must, only
from models.huggingface.families.rules import QKV_IN_ONE, Overrides
from models.huggingface.rotary import SECTIONS, renamed, rotary_fraction

RULES = (
    *llama.COMMON_RULES,
    llama.layer_rule("self_attention.linear_qkv", "self_attn.qkv_proj", "qkv hidden", QKV_IN_ONE),
    llama.OUTPUT_RULE,
    llama.layer_rule("mlp.linear_fc1", "mlp.gate_up_proj", "gate_up hidden"),
    llama.DOWN_RULE,
)
SHARE = kinds.Kind("a number above 0 and at most 1", lambda value: kinds.NUMBER.fits(value) and 0 < value <= 1)
KEYS: Keys = {
    **llama.COMMON_KEYS,
    "max_position_embeddings": carried(kinds.COUNT, 4096),
    "original_max_position_embeddings": carried(kinds.COUNT, 4096),
    "head_dim": carried(kinds.COUNT, None),
    "partial_rotary_factor": carried(SHARE, None),
    "rms_norm_eps": carried(kinds.POSITIVE_REAL, 1e-5),
    "resid_pdrop": carried(kinds.PROBABILITY, 0.0),
    "embd_pdrop": carried(kinds.PROBABILITY, 0.0),
    "sliding_window": carried(kinds.or_null(kinds.COUNT), None),
    "layer_types": only(None),  # transformers applies the window to all layers, and loads no model with the key
    "pad_token_id": FamilyKey(kinds.or_null(kinds.TOKEN), 32000),
}


def _read(keys: HfConfig) -> Overrides:
    keys = {**keys, **renamed(keys, {"su": "longrope", "yarn": "longrope"})}  # older names of longrope
    share = rotary_fraction(keys)
    must(SHARE.fits(share), "partial_rotary_factor", share, f"be {SHARE.rule}")
    size, dropout = llama.head_dim(keys), keys["resid_pdrop"]
    channels = int(size * share)
    rule = f"select an even number of the {size} channels of a head: rotary positions rotate pairs of channels"
    must(channels > 0 and channels % 2 == 0, "partial_rotary_factor", share, rule)
    rule = f"be resid_pdrop ({dropout}): Mixtrain has one value for both"
    must(keys["embd_pdrop"] == dropout, "embd_pdrop", keys["embd_pdrop"], rule)
    overrides = llama.read_common(keys)
    kind = kind_of(overrides["model"]["rotary_scaling"] or {"rope_type": "longrope"})
    must(kind == "longrope", "rope_scaling.rope_type", kind, "be longrope, the only kind that phi3 models have")
    overrides["model"] |= {
        "rotary_fraction": channels / size,
        "hidden_dropout": float(dropout),
        "sliding_window": keys["sliding_window"],
    }
    return overrides


def _write(config: Config) -> HfConfig:
    model = config.model
    hf = llama.write_common(config, "phi3", "Phi3ForCausalLM")
    share = {"partial_rotary_factor": model.rotary_fraction}
    if derived.head_dim(config) * model.num_attention_heads == model.hidden_size:
        del hf["head_dim"]
    return {
        **hf,
        **share,
        **{section: {**hf[section], **share} for section in SECTIONS if section in hf},
        LENGTH: (model.rotary_scaling or {}).get(LENGTH, hf["max_position_embeddings"]),
        "pad_token_id": None,  # without the key transformers takes 32000
        "resid_pdrop": model.hidden_dropout,
        "embd_pdrop": model.hidden_dropout,
        "sliding_window": model.sliding_window,
    }


FAMILY = llama.family("phi3", KEYS, _read, _write, RULES)
