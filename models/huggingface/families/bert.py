"""BERT (Devlin et al. 2018): `BertForPreTraining` and `BertForMaskedLM`."""

from __future__ import annotations

import re
from collections.abc import Callable

from base.errors import ConfigError
from configs import derived
from configs.rules.model import MIN_BERT_SEQUENCE
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
)
from models.huggingface.families.rules import QKV, Family, Overrides, Rule, is_tied, is_untied, weight_and_bias


def _has_sentence_head(config: Config) -> bool:
    return config.model.sentence_head != "none"


EMBEDDINGS, LAYER, HEAD = "bert.embeddings", "bert.encoder.layer.{l}", "cls.predictions"
OURS = "encoder.layers.{l}"
QKV_NAMES = " ".join(f"{LAYER}.attention.self.{name}" for name in ("query", "key", "value"))
RULES = (
    Rule("embedding.word_embeddings.weight", (f"{EMBEDDINGS}.word_embeddings.weight",), "vocab hidden"),
    Rule("embedding.position_embeddings.weight", (f"{EMBEDDINGS}.position_embeddings.weight",), "positions hidden"),
    Rule("embedding.tokentype_embeddings.weight", (f"{EMBEDDINGS}.token_type_embeddings.weight",), "two hidden"),
    *weight_and_bias("embedding.layer_norm", f"{EMBEDDINGS}.LayerNorm", "hidden"),
    *weight_and_bias(f"{OURS}.self_attention.linear_qkv", QKV_NAMES, "queries hidden", QKV),
    *weight_and_bias(f"{OURS}.self_attention.linear_proj", f"{LAYER}.attention.output.dense", "hidden queries"),
    *weight_and_bias(f"{OURS}.pre_cross_attn_layernorm", f"{LAYER}.attention.output.LayerNorm", "hidden"),
    *weight_and_bias(f"{OURS}.mlp.linear_fc1", f"{LAYER}.intermediate.dense", "ffn hidden"),
    *weight_and_bias(f"{OURS}.mlp.linear_fc2", f"{LAYER}.output.dense", "hidden ffn"),
    *weight_and_bias(f"{OURS}.mlp_bda.norm", f"{LAYER}.output.LayerNorm", "hidden"),
    *weight_and_bias("lm_head.dense", f"{HEAD}.transform.dense", "hidden hidden"),
    *weight_and_bias("lm_head.layer_norm", f"{HEAD}.transform.LayerNorm", "hidden"),
    # The bias has two names. In a tied model they are one tensor. In an untied one transformers 5 uses the decoder's
    # and ignores the other; transformers 4 has one tensor there too, so both are written.
    Rule("output_layer.bias", (f"{HEAD}.bias",), "vocab", when=is_tied),
    Rule("output_layer.weight", (f"{HEAD}.decoder.weight",), "vocab hidden", when=is_untied),
    Rule("output_layer.bias", (f"{HEAD}.decoder.bias",), "vocab", when=is_untied),
    Rule("output_layer.bias", (f"{HEAD}.bias",), "vocab", when=is_untied, unread=True),
    *weight_and_bias("pooler.dense", "bert.pooler.dense", "hidden hidden", when=_has_sentence_head),
    *weight_and_bias("binary_head", "cls.seq_relationship", "two hidden", when=_has_sentence_head),
)
TIED = ((f"{HEAD}.decoder.weight", f"{EMBEDDINGS}.word_embeddings.weight"), (f"{HEAD}.decoder.bias", f"{HEAD}.bias"))
CLASSES = ("BertForPreTraining", "BertForMaskedLM")
KEYS: Keys = {
    **EVERY_FAMILY,
    "num_hidden_layers": carried(kinds.LAYERS),
    "hidden_size": carried(kinds.COUNT),
    "intermediate_size": carried(kinds.COUNT),
    "num_attention_heads": carried(kinds.COUNT),
    "max_position_embeddings": carried(kinds.COUNT),
    "tie_word_embeddings": carried(kinds.FLAG, True),
    "pad_token_id": carried(EVERY_FAMILY["pad_token_id"].kind, 0),
    "layer_norm_eps": carried(kinds.POSITIVE_REAL, 1e-12),
    "hidden_dropout_prob": carried(kinds.PROBABILITY, 0.1),
    "attention_probs_dropout_prob": carried(kinds.PROBABILITY, 0.1),
    "initializer_range": carried(kinds.SPREAD, 0.02),
    # the head's activation is always exact GELU here; Hugging Face takes hidden_act there too
    "hidden_act": only("gelu"),
    "type_vocab_size": only(2),
    "position_embedding_type": only("absolute"),
    "is_decoder": only(False),
    "classifier_dropout": irrelevant(kinds.or_null(kinds.PROBABILITY)),
    # Keys of the first files, converted from TensorFlow.
    "directionality": irrelevant(),
    **dict.fromkeys(
        (f"pooler_{name}" for name in ("fc_size", "num_attention_heads", "num_fc_layers", "size_per_head", "type")),
        irrelevant(),
    ),
}


def _read(keys: HfConfig) -> Overrides:
    hidden, heads = keys["hidden_size"], keys["num_attention_heads"]
    must(hidden % heads == 0, "num_attention_heads", heads, f"divide hidden_size ({hidden})")
    positions = keys["max_position_embeddings"]
    rule = f"be at least {MIN_BERT_SEQUENCE} to hold two sentences"
    must(positions >= MIN_BERT_SEQUENCE, "max_position_embeddings", positions, rule)
    check_padding(keys)
    names = keys["architectures"] or [CLASSES[0]]
    if names[0] not in CLASSES:
        raise ConfigError(
            f"config.json architectures ({names[0]}) is not supported: it must be {' or '.join(CLASSES)}. Choose a "
            "model that was saved as one of them."
        )
    return {
        "model": {
            "family": "bert",
            "num_layers": keys["num_hidden_layers"],
            "hidden_size": hidden,
            "ffn_hidden_size": keys["intermediate_size"],
            "num_attention_heads": heads,
            "sequence_length": positions,
            "vocab_size": keys["vocab_size"],
            "tie_embeddings": keys["tie_word_embeddings"],
            "position_embedding": "learned",
            "normalization": "layernorm",
            "norm_epsilon": keys["layer_norm_eps"],
            "norm_position": "post",
            "activation": "gelu",
            "linear_bias": True,
            "hidden_dropout": float(keys["hidden_dropout_prob"]),
            "attention_dropout": float(keys["attention_probs_dropout_prob"]),
            "init_std": keys["initializer_range"],
            "sentence_head": "next_sentence" if names[0] == CLASSES[0] else "none",
        },
        "moe": {"num_experts": None},
    }


def _class_by_tensors(hf: HfConfig, names: Callable[[], set[str]]) -> str | None:
    # Encoders are saved under many classes, and files may have more heads than their class.
    classes = hf.get("architectures")
    if classes and not (isinstance(classes, list) and isinstance(classes[0], str)):
        return None
    if classes and (classes[0] in CLASSES or not re.fullmatch(r"Bert(Model|LMHeadModel|For[A-Z]\w*)", classes[0])):
        return None
    return CLASSES[0 if "cls.seq_relationship.weight" in names() else 1]


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


def _carries_nothing(name: str, config: Config, keys: HfConfig) -> bool:
    # The file of a masked-LM model may still hold the pooler of the model that it was trained from.
    unused_head = r"(bert\.)?pooler\.dense\.(weight|bias)|cls\.seq_relationship\.(weight|bias)"
    unused = r"(bert\.)?embeddings\.position_ids" + ("" if _has_sentence_head(config) else f"|{unused_head}")
    return re.fullmatch(unused, name) is not None


FAMILY = Family(
    "bert",
    KEYS,
    _read,
    _write,
    RULES,
    "bert.",
    TIED,
    carries_nothing=_carries_nothing,
    telling=r"bert\.encoder\.layer\.0\.attention\.self\.query\.weight",
    class_by_tensors=_class_by_tensors,
    other_names=(("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta")),
)
