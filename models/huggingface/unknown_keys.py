"""Keys of a config.json that are not in the family's table. Keys that transformers' code for the family never reads are
carried over: an import prints them in one warning and stores them, and an export writes them again. Other keys may
change the model and are rejected, all in one error.

transformers_reads.yaml lists the keys that transformers reads; benchmarks/kit/transformers_reads.py makes it from
transformers' code. SWITCHES lists names with which models with custom code change numbers. A key in one of the two
lists is rejected unless its value does not change the model.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from base.errors import ConfigError
from configs.architecture import architecture
from configs.schema import Config
from models.huggingface.families.keys import HfConfig, same_json, show
from models.huggingface.families.rules import Family, Overrides

TABLE = Path(__file__).with_name("transformers_reads.yaml")
Harmless = Callable[[Any, Overrides], bool]  # whether a value does not change a model with these overrides


def _anything(value: Any, ours: Overrides) -> bool:
    return True


def _off(value: Any, ours: Overrides) -> bool:
    return not value


def _one(value: Any, ours: Overrides) -> bool:
    return value is None or value is False or (type(value) in (int, float) and value == 1)


def _off_or_one(value: Any, ours: Overrides) -> bool:
    return _off(value, ours) or _one(value, ours)


def _is(of: Callable[[dict[str, Any], dict[str, Any]], Any], *more: Any) -> Harmless:
    """Return a check that a config.json value is harmless: null, the value that `of` computes from our `model` and
    `moe` configs, or one of `more`."""

    def harmless(value: Any, ours: Overrides) -> bool:
        return value is None or any(same_json(value, other) for other in (of(ours["model"], ours["moe"]), *more))

    return harmless


def _bias(value: Any, ours: Overrides) -> bool:
    return _off(value, ours) or value is True and any(ours["model"].get(key) for key in ("linear_bias", "qkv_bias"))


def _words(of: Callable[[dict[str, Any], dict[str, Any]], Any], words: dict[Any, str]) -> Harmless:
    """Return a check that a config.json value is harmless: null, or one of the `words` for the value that `of` computes
    from our `model` and `moe` configs."""

    def harmless(value: Any, ours: Overrides) -> bool:
        means = words[of(ours["model"], ours["moe"])].split()
        return value is None or (isinstance(value, str) and value.lower() in means)

    return harmless


_null = _is(lambda model, moe: None)
_activation = _words(
    lambda model, moe: model["activation"] == "swiglu",
    {True: "silu swish swiglu gated glu", False: "gelu gelu_new gelu_fast gelu_pytorch_tanh"},
)
_normalization = _words(
    lambda model, moe: model["normalization"],
    {"rmsnorm": "rmsnorm rms_norm rms llamarmsnorm", "layernorm": "layernorm layer_norm"},
)
_positions = _words(
    lambda model, moe: model["position_embedding"],
    {"rope": "rope rotary rotary_embedding", "learned": "absolute learned learned_absolute"},
)


def _of_experts(harmless: Harmless) -> Harmless:
    return lambda value, ours: ours["moe"].get("num_experts") is None or harmless(value, ours)


_score = _of_experts(
    _words(lambda model, moe: moe["router_score"], {"softmax": "softmax greedy", "sigmoid": "sigmoid noaux_tc"})
)

# Keys that transformers' code reads and a family's table may lack, with their harmless values.
READ: dict[str, Harmless] = {
    **dict.fromkeys(
        ("attention_chunk_size", "per_layer_config", "text_config", "vision_config", "transformers_weights"), _null
    ),
    "layer_types": _is(lambda model, moe: ["full_attention"] * model["num_layers"]),
    # transformers computes the same with both; other values need a library
    **dict.fromkeys(("attn_implementation", "_attn_implementation"), _is(lambda model, moe: None, "eager", "sdpa")),
    "experts_implementation": _null,
    # for the initialization of weights, and for heads of classifiers
    **dict.fromkeys(("initializer_factor", "init_std", "hidden_dropout", "classifier_dropout"), _anything),
    "mask_token_id": _anything,
    "num_mtp_layers": _off,
}
# Keys that other code than transformers may read: regular expressions, of which the first that matches the whole key
# applies, with its harmless values.
SWITCHES: tuple[tuple[str, Harmless], ...] = (
    # for training only, or for heads of classifiers
    (r".*loss.*|.*jitter.*|.*load_balanc.*|.*aux_coef.*|.*grad.*|(pooler|summary|classifier)_.*", _anything),
    (r".*in_fp32|fp32_.*", _anything),  # the same sums, rounded less
    (r"_pre_quantization_dtype", _anything),  # for weights that are no longer quantised
    (r"max_window_layers", _anything),  # for a sliding window, which has a key of its own
    # norms
    (
        r"(use_)?(qk|q_k)_?(layer_?)?norms?|(use_)?(q|k|query_key)_(layer_?)?norm",
        _is(lambda model, moe: model["qk_norm"]),
    ),
    (r"(layer_?)?norm_?(type|class|func|function)|normali[sz]ation(_type|_function)?", _normalization),
    (r"(use_)?rms_?norm", _is(lambda model, moe: model["normalization"] == "rmsnorm")),
    (r"(use_)?(deep|sandwich|pre|post|peri)_?(layer_?)?norm.*|.*post_(layer_?)?norm.*|normali[sz]e_embed.*", _off),
    (r".*norm_1p|.*zero_cent(er|re)ed.*|.*unit_offset", _off),
    # biases: tensors that must, or must not, be in the folder
    (r"no_bias", lambda value, ours: not isinstance(value, bool) or value or _bias(True, ours)),
    (r"(.*_)?bias(es)?(_.*)?", _bias),
    # factors
    (r".*multipliers?|.*_mult|(.*_)?scal(ar|e|es|ing)(_.*)?|.*scaling_factor|(use_)?mup(_.*)?|dim_model_base", _one),
    (r".*soft_?cap.*|.*logits?_cap.*|.*clip.*|swiglu_(limit|alpha)", _off),
    # experts
    (r"(moe|expert)_(layer_)?(freq|frequency|period|interval|step)|decoder_sparse_step", _off_or_one),
    (r"n_group|num_expert_groups?|topk_group|num_limited_groups", _off_or_one),
    (r"norm_topk_prob|norm_top_?k.*", _of_experts(_is(lambda model, moe: moe["normalize_top_k"]))),
    (r"scoring_func|score_function|topk_method|router_(score|activation).*", _score),
    (r"(n|num)_.*experts.*|.*shared_experts?.*|.*experts?_(size|dim|capacity|gate).*|first_k_dense.*", _off),
    (r"moe_(intermediate|ffn|hidden|num|top|shared|router|gate|layer).*", _off),
    # positions
    (r".*alibi.*|.*no_?rope.*|nope_.*|.*xpos.*|.*ntk.*|.*yarn.*|.*relative_.*", _off),
    (
        r"(use_)?(rope|rotary)(_pos(itions?)?)?(_emb(edding)?s?)?",
        _is(lambda model, moe: model["position_embedding"] == "rope"),
    ),
    (r"(rope|rotary)_(pct|percent|percentage|fraction|ratio)|partial_rotary.*", _one),
    (r"(rope|rotary)_(emb_)?(base|theta)", _is(lambda model, moe: model.get("rotary_base"))),
    (r"(rope|rotary)_dims?", _is(lambda model, moe: model.get("head_dim"))),
    (r".*(rope|rotary).*", _off),
    (r"(position(al)?|pos)_?(emb|embed|embedding|encoding)s?(_type)?", _positions),
    # attention
    (
        r".*window.*|.*sinks?(_.*)?|.*(local|chunk|sparse|linear)(ed)?_att.*|index_.*|.*lora.*|.*hyper_connection.*",
        _off,
    ),
    (r".*(attn|attention)_.*gat(e|ing).*", _off),
    (r"(is_)?(bidirectional|prefix_lm)|use_bidirectional.*", _off),
    (r"causal", _is(lambda model, moe: True)),
    # blocks
    (r"(use_)?parallel_(residual|attn|attention|block|mlp|layers)(_.*)?|.*residual.*", _off),
    (r"(.*_)?act(ivation)?(_fn|_func|_function|_type)?|(ffn|mlp)_type", _activation),
    (r"(use_)?(swiglu|glu|gated_mlp)", _is(lambda model, moe: model["activation"] == "swiglu")),
    (r"tied?_.*embed.*|tied?_(weights?|lm_head)|shared?_.*embed.*", _is(lambda model, moe: model["tie_embeddings"])),
    (r".*quanti[sz].*|quant_.*|compression_config", _off),
)


@cache
def reads(model_type: str) -> frozenset[str]:
    """Return the keys that transformers' code for this family reads."""
    keys = yaml.safe_load(TABLE.read_text())
    return frozenset(f"{keys['every_family']} {keys[model_type]}".split())


def carried_keys(hf: HfConfig, family: Family, ours: Overrides) -> HfConfig:
    """Return the keys of a config.json that its family does not know and that do not change the model. `ours`: the
    overrides for our config. Raises ConfigError that lists all keys that may change the model."""
    model_type, unknown = family.model_type, {key: hf[key] for key in sorted(hf.keys() - family.spellings)}
    refused = {key: value for key, value in unknown.items() if not _is_harmless(key, value, model_type, ours)}
    if refused:
        keys = "a key" if len(refused) == 1 else f"{len(refused)} keys"
        those = "it if you know that it changes" if len(refused) == 1 else "the keys that you know to change"
        raise ConfigError(
            f"config.json has {keys} that Mixtrain does not know for model_type {model_type} and that may change the "
            f"model's outputs: {listed(refused)}. Remove {those} nothing."
        )
    return unknown


def _is_harmless(key: str, value: Any, model_type: str, ours: Overrides) -> bool:
    if key in READ:
        return READ[key](value, ours)
    if key in reads(model_type) or (key.startswith("__") and key.endswith("__")):
        return False
    harmless = next((harmless for keys, harmless in SWITCHES if re.fullmatch(keys, key, re.IGNORECASE)), _anything)
    return harmless(value, ours)


def of_family(config: Config, family: Family) -> tuple[HfConfig, HfConfig]:
    """Split the carried-over keys of a model into keys that this family's config.json may have, and keys that it would
    reject. Raises ConfigError if `model.config_json` is not valid."""
    carried, left_out = HfConfig(), HfConfig()
    ours = architecture(config, config.model.vocab_size or 0)
    for key, value in _from_text(config.model.config_json).items():
        fits = key not in family.spellings and _is_harmless(key, value, family.model_type, ours)
        (carried if fits else left_out)[key] = value
    return carried, left_out


def warn(config: Config, model_type: str) -> None:
    """Print one line to stderr with the carried-over keys that neither transformers nor Mixtrain reads."""
    keys = _from_text(config.model.config_json)
    never_read = {key: value for key, value in keys.items() if key not in reads(model_type)}
    if never_read:
        print(
            f"note: neither transformers' code for a {model_type} model nor Mixtrain reads these keys of config.json; "
            f"an import keeps them for an export: {listed(never_read)}.",
            file=sys.stderr,
            flush=True,
        )


def listed(keys: HfConfig) -> str:
    """Return keys with their values as one line of text."""
    return ", ".join(f"{show(key)} ({show(value)})" for key, value in keys.items())


def to_text(keys: HfConfig) -> str | None:
    """Return the value of `model.config_json` for these keys: JSON text with escaped dollar signs, because a config
    takes a dollar sign for a reference. None for no keys."""
    return json.dumps(keys, sort_keys=True).replace("$", "\\u0024") if keys else None


def _from_text(text: str | None) -> HfConfig:
    try:
        keys = {} if text is None else json.loads(text)
    except (ValueError, RecursionError):
        keys = None
    if not isinstance(keys, dict):
        raise ConfigError(
            f"model.config_json ({show(text)}) must be a text that contains a JSON object, as an import writes it. Set "
            "it to null."
        )
    return keys
