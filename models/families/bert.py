"""BERT (Devlin et al. 2018): `BertForPreTraining` and `BertForMaskedLM`."""

from __future__ import annotations

from configs import derived
from configs.schema import Config, ConfigError
from models.families.rules import GELUS, QKV, Family, HfConfig, Overrides, Rule, expect, is_untied, weight_and_bias


def _has_sentence_head(config: Config) -> bool:
    return config.model.sentence_head != "none"


LAYER = "bert.encoder.layer.{l}"
RULES = (
    Rule("embedding.word_embeddings.weight", ("bert.embeddings.word_embeddings.weight",)),
    Rule("embedding.position_embeddings.weight", ("bert.embeddings.position_embeddings.weight",)),
    Rule("embedding.tokentype_embeddings.weight", ("bert.embeddings.token_type_embeddings.weight",)),
    *weight_and_bias("embedding.layer_norm", "bert.embeddings.LayerNorm"),
    *weight_and_bias(
        "encoder.layers.{l}.self_attention.linear_qkv",
        " ".join(f"{LAYER}.attention.self.{part}" for part in ("query", "key", "value")),
        QKV,
    ),
    *weight_and_bias("encoder.layers.{l}.self_attention.linear_proj", f"{LAYER}.attention.output.dense"),
    *weight_and_bias("encoder.layers.{l}.pre_cross_attn_layernorm", f"{LAYER}.attention.output.LayerNorm"),
    *weight_and_bias("encoder.layers.{l}.mlp.linear_fc1", f"{LAYER}.intermediate.dense"),
    *weight_and_bias("encoder.layers.{l}.mlp.linear_fc2", f"{LAYER}.output.dense"),
    *weight_and_bias("encoder.layers.{l}.mlp_bda.norm", f"{LAYER}.output.LayerNorm"),
    *weight_and_bias("lm_head.dense", "cls.predictions.transform.dense"),
    *weight_and_bias("lm_head.layer_norm", "cls.predictions.transform.LayerNorm"),
    Rule("output_layer.weight", ("cls.predictions.decoder.weight",), when=is_untied),
    Rule("output_layer.bias", ("cls.predictions.bias",)),
    *weight_and_bias("pooler.dense", "bert.pooler.dense", when=_has_sentence_head),
    *weight_and_bias("binary_head", "cls.seq_relationship", when=_has_sentence_head),
)


def _read(hf: HfConfig) -> Overrides:
    expect(hf, "type_vocab_size", (2,), 2)
    expect(hf, "position_embedding_type", ("absolute",), "absolute")
    expect(hf, "is_decoder", (False,), False)
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
            "activation": GELUS[expect(hf, "hidden_act", ("gelu",), "gelu")],
            "linear_bias": True,
            "hidden_dropout": hf["hidden_dropout_prob"],
            "attention_dropout": hf["attention_probs_dropout_prob"],
            "init_std": hf["initializer_range"],
            "sentence_head": "next_sentence" if names[0] == "BertForPreTraining" else "none",
        },
        "moe": {"num_experts": None},
    }


def _write(config: Config) -> HfConfig:
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


def _carries_nothing(name: str, config: Config) -> bool:
    # A masked-LM model's file may keep the pooler of the model that it came from.
    unused_head = config.model.sentence_head == "none" and name.startswith(("bert.pooler.", "cls.seq_relationship."))
    return unused_head or name.endswith((".position_ids", "cls.predictions.decoder.bias"))


FAMILY = Family(
    "bert",
    _read,
    _write,
    RULES,
    "bert.",
    carries_nothing=_carries_nothing,
    other_names=(("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta")),
)
