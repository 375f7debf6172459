"""Hugging Face's GPT-2, Llama, Mixtral, Qwen3-MoE and BERT <-> our config and logical weights.

One table of rules per family says which tensors are the same and how their layouts differ; import and export read the
same table in the two directions. Needs no transformers package.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from configs import derived
from configs.schema import Config, ConfigError
from models.folder import architecture, config_from

Overrides = dict[str, dict[str, Any]]
HfConfig = dict[str, Any]
Get = Callable[[str], torch.Tensor]


# ---------------------------------------------------------------------------------------------------------------------
# Layouts of a tensor
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Heads:
    """n query heads, g key/value heads, d channels each."""

    n: int
    g: int
    d: int


def _join_qkv(parts: list[torch.Tensor], heads: Heads) -> torch.Tensor:
    # Megatron keeps the rows of a group together: its queries, its key, its value.
    sizes = [heads.n // heads.g * heads.d, heads.d, heads.d]
    grouped = [part.reshape(heads.g, size, *part.shape[1:]) for part, size in zip(parts, sizes)]
    return torch.cat(grouped, dim=1).reshape(-1, *parts[0].shape[1:])


def _split_qkv(full: torch.Tensor, heads: Heads) -> list[torch.Tensor]:
    sizes = [heads.n // heads.g * heads.d, heads.d, heads.d]
    grouped = full.reshape(heads.g, sum(sizes), *full.shape[1:]).split(sizes, dim=1)
    return [part.reshape(-1, *full.shape[1:]) for part in grouped]


@dataclass(frozen=True)
class Layout:
    """How one logical tensor comes from Hugging Face's tensors, and back."""

    to_ours: Callable[[list[torch.Tensor], Heads], torch.Tensor]
    to_theirs: Callable[[torch.Tensor, Heads], list[torch.Tensor]]


SAME = Layout(lambda parts, _: parts[0], lambda full, _: [full])
TRANSPOSED = Layout(lambda parts, _: parts[0].t(), lambda full, _: [full.t()])  # GPT-2's Conv1D keeps [inputs, outputs]
QKV = Layout(_join_qkv, _split_qkv)
QKV_IN_ONE = Layout(
    lambda parts, heads: _join_qkv(list(parts[0].chunk(3)), heads), lambda full, heads: [torch.cat(_split_qkv(full, heads))]
)
QKV_IN_ONE_TRANSPOSED = Layout(
    lambda parts, heads: _join_qkv(list(parts[0].t().chunk(3)), heads), lambda full, heads: [torch.cat(_split_qkv(full, heads)).t()]
)
GATE_UP = Layout(lambda parts, _: torch.cat(parts), lambda full, _: list(full.chunk(2)))


@dataclass(frozen=True)
class Rule:
    """`ours` is the same weight as `theirs` in `layout`. {l} stands for every layer, {e} for every expert.

    `only` limits a rule with {l} to "dense" or "moe" layers; `when` to models that have such weights at all.
    """

    ours: str
    theirs: tuple[str, ...]
    layout: Layout = SAME
    only: str = "all"
    when: Callable[[Config], bool] = lambda config: True


def _weight_and_bias(ours: str, theirs: str, layout: Layout = SAME, when: Callable[[Config], bool] = lambda config: True) -> list[Rule]:
    bias_layout = {TRANSPOSED: SAME, QKV_IN_ONE_TRANSPOSED: QKV_IN_ONE}.get(layout, layout)
    return [
        Rule(f"{ours}.weight", tuple(f"{name}.weight" for name in theirs.split()), layout, when=when),
        Rule(f"{ours}.bias", tuple(f"{name}.bias" for name in theirs.split()), bias_layout, when=when),
    ]


# ---------------------------------------------------------------------------------------------------------------------
# The families
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Family:
    """One `model_type`: its config in both directions, its rules, and what its files may hold besides or call otherwise."""

    model_type: str
    read: Callable[[HfConfig], Overrides]
    write: Callable[[Config], HfConfig]
    rules: tuple[Rule, ...]
    base_prefix: str  # files of the bare model lack it
    ignored: tuple[str, ...] = ()  # ends of names that carry nothing of their own
    other_names: tuple[tuple[str, str], ...] = ()  # (now, in old files)


GPT2_RULES = (
    Rule("embedding.word_embeddings.weight", ("transformer.wte.weight",)),
    Rule("embedding.position_embeddings.weight", ("transformer.wpe.weight",)),
    *_weight_and_bias("decoder.layers.{l}.input_layernorm", "transformer.h.{l}.ln_1"),
    *_weight_and_bias("decoder.layers.{l}.self_attention.linear_qkv", "transformer.h.{l}.attn.c_attn", QKV_IN_ONE_TRANSPOSED),
    *_weight_and_bias("decoder.layers.{l}.self_attention.linear_proj", "transformer.h.{l}.attn.c_proj", TRANSPOSED),
    *_weight_and_bias("decoder.layers.{l}.pre_mlp_layernorm", "transformer.h.{l}.ln_2"),
    *_weight_and_bias("decoder.layers.{l}.mlp.linear_fc1", "transformer.h.{l}.mlp.c_fc", TRANSPOSED),
    *_weight_and_bias("decoder.layers.{l}.mlp.linear_fc2", "transformer.h.{l}.mlp.c_proj", TRANSPOSED),
    *_weight_and_bias("decoder.final_layernorm", "transformer.ln_f"),
    Rule("output_layer.weight", ("lm_head.weight",), when=lambda config: not config.model.tie_embeddings),
)

# Llama and what descends from it: everything but the feed-forward layers.
LLAMA_LIKE_RULES = (
    Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",)),
    Rule("decoder.layers.{l}.input_layernorm.weight", ("model.layers.{l}.input_layernorm.weight",)),
    Rule(
        "decoder.layers.{l}.self_attention.linear_qkv.weight",
        tuple(f"model.layers.{{l}}.self_attn.{part}_proj.weight" for part in "qkv"),
        QKV,
    ),
    Rule("decoder.layers.{l}.self_attention.linear_proj.weight", ("model.layers.{l}.self_attn.o_proj.weight",)),
    Rule("decoder.layers.{l}.pre_mlp_layernorm.weight", ("model.layers.{l}.post_attention_layernorm.weight",)),
    Rule("decoder.final_layernorm.weight", ("model.norm.weight",)),
    Rule("output_layer.weight", ("lm_head.weight",), when=lambda config: not config.model.tie_embeddings),
)
LLAMA_FEED_FORWARD_RULES = (
    Rule(
        "decoder.layers.{l}.mlp.linear_fc1.weight",
        ("model.layers.{l}.mlp.gate_proj.weight", "model.layers.{l}.mlp.up_proj.weight"),
        GATE_UP,
        only="dense",
    ),
    Rule("decoder.layers.{l}.mlp.linear_fc2.weight", ("model.layers.{l}.mlp.down_proj.weight",), only="dense"),
)
MIXTRAL_FEED_FORWARD_RULES = (
    Rule("decoder.layers.{l}.mlp.router.weight", ("model.layers.{l}.block_sparse_moe.gate.weight",), only="moe"),
    Rule(
        "decoder.layers.{l}.mlp.experts.{e}.linear_fc1.weight",
        ("model.layers.{l}.block_sparse_moe.experts.{e}.w1.weight", "model.layers.{l}.block_sparse_moe.experts.{e}.w3.weight"),
        GATE_UP,
        only="moe",
    ),
    Rule(
        "decoder.layers.{l}.mlp.experts.{e}.linear_fc2.weight",
        ("model.layers.{l}.block_sparse_moe.experts.{e}.w2.weight",),
        only="moe",
    ),
)
QWEN3_MOE_RULES = (
    Rule("decoder.layers.{l}.self_attention.q_layernorm.weight", ("model.layers.{l}.self_attn.q_norm.weight",)),
    Rule("decoder.layers.{l}.self_attention.k_layernorm.weight", ("model.layers.{l}.self_attn.k_norm.weight",)),
    Rule("decoder.layers.{l}.mlp.router.weight", ("model.layers.{l}.mlp.gate.weight",), only="moe"),
    Rule(
        "decoder.layers.{l}.mlp.experts.{e}.linear_fc1.weight",
        ("model.layers.{l}.mlp.experts.{e}.gate_proj.weight", "model.layers.{l}.mlp.experts.{e}.up_proj.weight"),
        GATE_UP,
        only="moe",
    ),
    Rule("decoder.layers.{l}.mlp.experts.{e}.linear_fc2.weight", ("model.layers.{l}.mlp.experts.{e}.down_proj.weight",), only="moe"),
)


def _has_sentence_head(config: Config) -> bool:
    return config.model.sentence_head != "none"


_BERT_LAYER = "bert.encoder.layer.{l}"
BERT_RULES = (
    Rule("embedding.word_embeddings.weight", ("bert.embeddings.word_embeddings.weight",)),
    Rule("embedding.position_embeddings.weight", ("bert.embeddings.position_embeddings.weight",)),
    Rule("embedding.tokentype_embeddings.weight", ("bert.embeddings.token_type_embeddings.weight",)),
    *_weight_and_bias("embedding.layer_norm", "bert.embeddings.LayerNorm"),
    *_weight_and_bias(
        "encoder.layers.{l}.self_attention.linear_qkv",
        " ".join(f"{_BERT_LAYER}.attention.self.{part}" for part in ("query", "key", "value")),
        QKV,
    ),
    *_weight_and_bias("encoder.layers.{l}.self_attention.linear_proj", f"{_BERT_LAYER}.attention.output.dense"),
    *_weight_and_bias("encoder.layers.{l}.pre_cross_attn_layernorm", f"{_BERT_LAYER}.attention.output.LayerNorm"),
    *_weight_and_bias("encoder.layers.{l}.mlp.linear_fc1", f"{_BERT_LAYER}.intermediate.dense"),
    *_weight_and_bias("encoder.layers.{l}.mlp.linear_fc2", f"{_BERT_LAYER}.output.dense"),
    *_weight_and_bias("encoder.layers.{l}.mlp_bda.norm", f"{_BERT_LAYER}.output.LayerNorm"),
    *_weight_and_bias("lm_head.dense", "cls.predictions.transform.dense"),
    *_weight_and_bias("lm_head.layer_norm", "cls.predictions.transform.LayerNorm"),
    Rule("output_layer.weight", ("cls.predictions.decoder.weight",), when=lambda config: not config.model.tie_embeddings),
    Rule("output_layer.bias", ("cls.predictions.bias",)),
    *_weight_and_bias("pooler.dense", "bert.pooler.dense", when=_has_sentence_head),
    *_weight_and_bias("binary_head", "cls.seq_relationship", when=_has_sentence_head),
)


def _expect(hf: HfConfig, key: str, allowed: tuple[Any, ...], default: Any = None) -> Any:
    value = hf.get(key, default)
    if value not in allowed:
        raise ConfigError(f"config.json {key} ({value}) is not supported: it must be one of {', '.join(map(str, allowed))}.")
    return value


GELUS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
GELU_NAMES = {"gelu": "gelu", "gelu_tanh": "gelu_new"}


def _read_gpt2(hf: HfConfig) -> Overrides:
    _expect(hf, "scale_attn_weights", (True,), True)
    _expect(hf, "scale_attn_by_inverse_layer_idx", (False,), False)
    _expect(hf, "add_cross_attention", (False,), False)
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
            "activation": GELUS[_expect(hf, "activation_function", tuple(GELUS), "gelu_new")],
            "linear_bias": True,
            "hidden_dropout": hf["resid_pdrop"],
            "attention_dropout": hf["attn_pdrop"],
            "init_std": hf["initializer_range"],
        },
        "moe": {"num_experts": None},
    }


def _write_gpt2(config: Config) -> HfConfig:
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


def _read_llama_like(hf: HfConfig, architecture_name: str) -> Overrides:
    _expect(hf, "hidden_act", ("silu",), "silu")
    _expect(hf, "attention_bias", (False,), False)
    _expect(hf, "mlp_bias", (False,), False)
    if hf.get("use_sliding_window", True):
        _expect(hf, "sliding_window", (None,))
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


def _write_llama_like(config: Config, model_type: str, architecture_name: str) -> HfConfig:
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


def _read_llama(hf: HfConfig) -> Overrides:
    return _read_llama_like(hf, "LlamaForCausalLM")


def _write_llama(config: Config) -> HfConfig:
    return {**_write_llama_like(config, "llama", "LlamaForCausalLM"), "mlp_bias": False}


def _read_mixtral(hf: HfConfig) -> Overrides:
    overrides = _read_llama_like(hf, "MixtralForCausalLM")
    overrides["moe"] = {
        "num_experts": hf["num_local_experts"],
        "top_k": hf["num_experts_per_tok"],
        "ffn_hidden_size": hf["intermediate_size"],
        "normalize_top_k": True,
    }
    return overrides


def _write_mixtral(config: Config) -> HfConfig:
    return {
        **_write_llama_like(config, "mixtral", "MixtralForCausalLM"),
        "intermediate_size": derived.expert_ffn_hidden_size(config),
        "num_local_experts": config.moe.num_experts,
        "num_experts_per_tok": config.moe.top_k,
        "sliding_window": None,
    }


def _read_qwen3_moe(hf: HfConfig) -> Overrides:
    overrides = _read_llama_like(hf, "Qwen3MoeForCausalLM")
    overrides["model"]["qk_norm"] = True
    dense = set(hf.get("mlp_only_layers") or [])
    step = hf.get("decoder_sparse_step", 1)
    overrides["moe"] = {
        "num_experts": hf.get("num_experts", hf.get("num_local_experts")),
        "top_k": hf["num_experts_per_tok"],
        "ffn_hidden_size": hf["moe_intermediate_size"],
        "normalize_top_k": hf["norm_topk_prob"],
        "layers": [int(i not in dense and (i + 1) % step == 0) for i in range(hf["num_hidden_layers"])],
    }
    return overrides


def _write_qwen3_moe(config: Config) -> HfConfig:
    return {
        **_write_llama_like(config, "qwen3_moe", "Qwen3MoeForCausalLM"),
        "num_experts": config.moe.num_experts,
        "num_experts_per_tok": config.moe.top_k,
        "moe_intermediate_size": derived.expert_ffn_hidden_size(config),
        "norm_topk_prob": config.moe.normalize_top_k,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i, is_moe in enumerate(derived.moe_layer_pattern(config)) if not is_moe],
        "use_sliding_window": False,
        "sliding_window": None,
    }


def _read_bert(hf: HfConfig) -> Overrides:
    _expect(hf, "type_vocab_size", (2,), 2)
    _expect(hf, "position_embedding_type", ("absolute",), "absolute")
    _expect(hf, "is_decoder", (False,), False)
    names = hf.get("architectures") or ["BertForPreTraining"]
    if names[0] not in ("BertForPreTraining", "BertForMaskedLM"):
        raise ConfigError(f"config.json architectures ({names[0]}) is not supported: it must be BertForPreTraining or BertForMaskedLM.")
    return {
        "model": {
            "family": "bert",
            "num_layers": hf["num_hidden_layers"],
            "hidden_size": hf["hidden_size"],
            "ffn_hidden_size": hf["intermediate_size"],
            "num_attention_heads": hf["num_attention_heads"],
            "sequence_length": hf["max_position_embeddings"],
            "vocab_size": hf["vocab_size"],
            "tie_embeddings": hf.get("tie_word_embeddings", True),
            "position_embedding": "learned",
            "normalization": "layernorm",
            "norm_epsilon": hf["layer_norm_eps"],
            "norm_position": "post",
            # The head's activation is always exact GELU here; Hugging Face takes hidden_act there too.
            "activation": GELUS[_expect(hf, "hidden_act", ("gelu",), "gelu")],
            "linear_bias": True,
            "hidden_dropout": hf["hidden_dropout_prob"],
            "attention_dropout": hf["attention_probs_dropout_prob"],
            "init_std": hf["initializer_range"],
            "sentence_head": "next_sentence" if names[0] == "BertForPreTraining" else "none",
        },
        "moe": {"num_experts": None},
    }


def _write_bert(config: Config) -> HfConfig:
    model = config.model
    return {
        "architectures": ["BertForPreTraining" if _has_sentence_head(config) else "BertForMaskedLM"],
        "model_type": "bert",
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "intermediate_size": derived.ffn_hidden_size(config),
        "num_attention_heads": model.num_attention_heads,
        "max_position_embeddings": model.sequence_length,
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": model.tie_embeddings,
        "type_vocab_size": 2,
        "layer_norm_eps": model.norm_epsilon,
        "hidden_act": "gelu",
        "hidden_dropout_prob": model.hidden_dropout,
        "attention_probs_dropout_prob": model.attention_dropout,
        "initializer_range": model.init_std,
    }


FAMILIES = {
    family.model_type: family
    for family in (
        Family("gpt2", _read_gpt2, _write_gpt2, GPT2_RULES, "transformer.", (".attn.bias", ".attn.masked_bias")),
        Family("llama", _read_llama, _write_llama, LLAMA_LIKE_RULES + LLAMA_FEED_FORWARD_RULES, "model.", (".inv_freq",)),
        Family("mixtral", _read_mixtral, _write_mixtral, LLAMA_LIKE_RULES + MIXTRAL_FEED_FORWARD_RULES, "model."),
        Family("qwen3_moe", _read_qwen3_moe, _write_qwen3_moe, LLAMA_LIKE_RULES + LLAMA_FEED_FORWARD_RULES + QWEN3_MOE_RULES, "model."),
        Family(
            "bert",
            _read_bert,
            _write_bert,
            BERT_RULES,
            "bert.",
            (".position_ids", "cls.predictions.decoder.bias"),
            (("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta")),
        ),
    )
}


# ---------------------------------------------------------------------------------------------------------------------
# Use
# ---------------------------------------------------------------------------------------------------------------------


def read_config(hf: HfConfig) -> tuple[Family, Overrides]:
    """The family of a config.json and our overrides for it. Raises ConfigError for what is not supported."""
    model_type = hf.get("model_type")
    if model_type not in FAMILIES:
        raise ConfigError(f"config.json model_type ({model_type}) is not supported: it must be one of {', '.join(FAMILIES)}.")
    family = FAMILIES[model_type]
    try:
        return family, family.read(hf)
    except KeyError as error:
        raise ConfigError(f"config.json of a {model_type} model must have the key {error}.") from error


def write_config(config: Config) -> tuple[Family, HfConfig]:
    """The family that can hold this model, and its config.json. Raises ConfigError if none can, with what differs from the nearest."""
    vocab_size = config.model.vocab_size
    if vocab_size is None:
        raise ConfigError("model.vocab_size (null) must be set to export a model.")
    ours = architecture(config, vocab_size)
    if ours["model"].get("sentence_head") == "sentence_order":
        ours["model"]["sentence_head"] = "next_sentence"  # the same weights, trained with other labels
    nearest: list[str] | None = None
    for family in FAMILIES.values():
        if (family.model_type in ("mixtral", "qwen3_moe")) != (config.moe.num_experts is not None):
            continue
        hf = family.write(config)
        theirs = architecture(config_from(family.read(hf)), vocab_size)
        wrong = [
            f"{section}.{key} ({value}; {family.model_type} has {theirs[section].get(key)})"
            for section in ours
            for key, value in ours[section].items()
            if theirs[section].get(key) != value
        ]
        if not wrong:
            return family, hf
        if nearest is None or len(wrong) < len(nearest):
            nearest = wrong
    raise ConfigError(f"no Hugging Face family of {', '.join(FAMILIES)} has this model: {', '.join(nearest or [])}.")


def expand_rules(family: Family, config: Config) -> Iterator[Rule]:
    """The family's rules with every layer and expert of this model filled in."""
    pattern = derived.moe_layer_pattern(config)
    for rule in family.rules:
        if not rule.when(config):
            continue
        layers = range(config.model.num_layers) if "{l}" in rule.ours else [0]
        for layer in layers:
            if rule.only != "all" and (rule.only == "moe") != bool(pattern[layer]):
                continue
            for expert in range(config.moe.num_experts or 0) if "{e}" in rule.ours else [0]:
                fill = {"l": layer, "e": expert}
                yield Rule(rule.ours.format(**fill), tuple(name.format(**fill) for name in rule.theirs), rule.layout)


def import_weights(family: Family, config: Config, names: set[str], get: Get) -> Iterator[tuple[str, torch.Tensor]]:
    """Stream (logical name, tensor) from Hugging Face's tensors `names`, read by `get`.

    Raises ConfigError for a tensor that is missing, or left over because the model is another than config.json says.
    """
    heads = _heads(config)
    used = set()
    for rule in expand_rules(family, config):
        found = [_find(family, name, names) for name in rule.theirs]
        used.update(found)
        yield rule.ours, rule.layout.to_ours([get(name) for name in found], heads)
    tied = {"lm_head.weight", "cls.predictions.decoder.weight"} if config.model.tie_embeddings else set()
    left = sorted(name for name in names - used - tied if not name.endswith(family.ignored or ("\0",)))
    if left and not (family.model_type == "bert" and config.model.sentence_head == "none" and _is_sentence_head(left)):
        raise ConfigError(
            f"{len(left)} tensors of the Hugging Face folder have no place in a {family.model_type} model, the first: {left[0]}."
        )


def export_weights(family: Family, config: Config, get: Get) -> Iterator[tuple[str, torch.Tensor]]:
    """Stream (Hugging Face name, tensor) from logical tensors, read by `get`."""
    heads = _heads(config)
    for rule in expand_rules(family, config):
        yield from zip(rule.theirs, rule.layout.to_theirs(get(rule.ours), heads), strict=True)


def _heads(config: Config) -> Heads:
    return Heads(config.model.num_attention_heads, derived.num_query_groups(config), derived.head_dim(config))


def _is_sentence_head(names: list[str]) -> bool:
    # A masked-LM model's file may keep the pooler of the model that it came from.
    return all(name.startswith(("bert.pooler.", "cls.seq_relationship.")) for name in names)


def _find(family: Family, name: str, names: set[str]) -> str:
    candidates = [name] + [name.replace(now, before) for now, before in family.other_names if name.endswith(now)]
    candidates += [candidate.removeprefix(family.base_prefix) for candidate in candidates]
    for candidate in candidates:
        if candidate in names:
            return candidate
    raise ConfigError(f"the Hugging Face folder has no tensor {name}, which config.json calls for.")
