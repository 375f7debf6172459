"""Tables of the keys of a config.json: each model family has one. models/huggingface/unknown_keys.py decides about keys
that are not in the table.

A key in a table is either carried over (to our config), irrelevant (for the model's numbers), or limited to some
values. Each key has a kind of value and a default for folders without it. The defaults are those of transformers for
the family; they are written here so that a folder means the same with every installed version.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from base.errors import ConfigError
from models.huggingface.families import kinds
from models.huggingface.families.kinds import Kind

HfConfig = dict[str, Any]
REQUIRED = object()  # instead of a default: a folder without the key is rejected


@dataclass(frozen=True)
class FamilyKey:
    """A key that config.json may have in one family: the kind of its value, its default, and the values and spellings
    that are allowed."""

    kind: Kind
    default: Any = None  # of a folder without the key
    only: tuple[Any, ...] = ()  # other values are rejected
    also: tuple[str, ...] = ()  # other spellings of the key


Keys = dict[str, FamilyKey]
ADVICE = "Correct config.json, or choose a different model."  # ends a message


def carried(kind: Kind, default: Any = REQUIRED, also: tuple[str, ...] = ()) -> FamilyKey:
    """Describe a config.json key that our config also has, or that is compared with other keys."""
    return FamilyKey(kind, default, also=also)


def irrelevant(kind: Kind = kinds.ANYTHING) -> FamilyKey:
    """Describe a config.json key that does not change the model's numbers."""
    return FamilyKey(kind)


def only(*values: Any) -> FamilyKey:
    """Describe a config.json key that must have one of `values`. The first is the default if the key is absent."""
    return FamilyKey(kinds.ANYTHING, values[0], only=values)


def read_keys(hf: HfConfig, model_type: str, table: Keys) -> HfConfig:
    """Return the value of every config.json key that a family knows (`table`), under the table's spelling. Raises
    ConfigError if a key is missing or has a value that the table does not allow."""
    values: HfConfig = {}
    for key, row in table.items():
        given = {spelling: hf[spelling] for spelling in (key, *row.also) if spelling in hf}
        for spelling, value in given.items():
            if not row.kind.fits(value):
                raise ConfigError(f"config.json {spelling} ({show(value)}) must be {row.kind.rule}. {ADVICE}")
            if row.only and not any(same_json(value, allowed) for allowed in row.only):
                allowed = " or ".join(map(show, row.only))
                raise ConfigError(
                    f"config.json {spelling} ({show(value)}) is not supported for {model_type} models: it must be "
                    f"{allowed}. Choose a model with that value."
                )
        (first, value), *others = given.items() or [(key, row.default)]
        for other, another in others:
            if not same_json(value, another):
                raise ConfigError(
                    f"config.json {first} ({show(value)}) and {other} ({show(another)}) are two "
                    "spellings of one key and must be equal. Remove the wrong one."
                )
        if value is REQUIRED:
            raise ConfigError(
                f"config.json has no key '{key}'{' or '.join(['', *row.also])}, which {model_type} models need. "
                f"{ADVICE}"
            )
        values[key] = value
    return values


def same_json(one: Any, other: Any) -> bool:
    """Return whether two JSON values are equal; true does not equal 1."""
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def must(holds: bool, key: str, value: Any, rule: str) -> None:
    """Raise ConfigError about a key of config.json if `holds` is false. `rule` completes the phrase "must"."""
    if not holds:
        raise ConfigError(f"config.json {key} ({show(value)}) must {rule}. {ADVICE}")


def check_padding(keys: HfConfig) -> None:
    """Raise ConfigError if the padding token is outside the vocabulary. A negative id counts from its end."""
    pad, vocab = keys["pad_token_id"], keys["vocab_size"]
    must(pad is None or -vocab <= pad < vocab, "pad_token_id", pad, f"be less than vocab_size ({vocab})")


def show(value: Any) -> str:
    """Return a value as JSON, shortened for a message; a plain word has no quotes."""
    if (
        isinstance(value, str)
        and re.fullmatch(r"[A-Za-z_][\w.-]{0,60}", value)
        and value not in ("true", "false", "null")
    ):
        return value
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else f"{text[:70]}..."


# ---------------------------------------------------------------------------------------------------------------------
# Keys that transformers writes for every family
# ---------------------------------------------------------------------------------------------------------------------

# Defaults of generation, which old versions stored here; generation_config.json has them now.
_GENERATION = (
    "max_length max_new_tokens min_length min_new_tokens do_sample early_stopping num_beams num_beam_groups "
    "diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size "
    "encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores return_dict_in_generate "
    "forced_bos_token_id forced_eos_token_id remove_invalid_values exponential_decay_length_penalty "
    "suppress_tokens begin_suppress_tokens decoder_start_token_id"
).split()
# The folder's origin, other tasks' heads, other frameworks, and the form of outputs.
_NOTES = (
    "_name_or_path name_or_path _commit_hash _attn_implementation_autoset finetuning_task task_specific_params "
    "prefix tokenizer_class sep_token_id tf_legacy_loss use_bfloat16 xla_device output_past torchscript "
    "gradient_checkpointing cross_attention_hidden_size _num_labels eos_token_ids"
).split()
TYPES = ("float32", "bfloat16", "float16")
EVERY_FAMILY: Keys = {
    "model_type": carried(kinds.TEXT),
    "architectures": FamilyKey(kinds.or_null(kinds.TEXTS)),
    "transformers_version": irrelevant(kinds.or_null(kinds.TEXT)),
    "dtype": FamilyKey(kinds.ANYTHING, None, only=(None, *TYPES), also=("torch_dtype",)),
    "vocab_size": carried(kinds.COUNT),
    "bos_token_id": irrelevant(kinds.or_null(kinds.TOKEN)),
    "eos_token_id": irrelevant(kinds.or_null(kinds.TOKENS)),
    "pad_token_id": FamilyKey(kinds.or_null(kinds.TOKEN)),
    "use_cache": irrelevant(kinds.FLAG),
    "return_dict": irrelevant(kinds.or_null(kinds.FLAG)),
    "output_hidden_states": irrelevant(kinds.or_null(kinds.FLAG)),
    "output_attentions": irrelevant(kinds.or_null(kinds.FLAG)),
    "id2label": irrelevant(kinds.or_null(kinds.LABELS)),
    "label2id": irrelevant(kinds.or_null(kinds.OBJECT)),
    "num_labels": irrelevant(kinds.COUNT),
    "auto_map": irrelevant(kinds.CODE),  # its files are not copied
    "problem_type": only(None, "regression", "single_label_classification", "multi_label_classification"),
    "is_encoder_decoder": only(False, None),
    "tie_encoder_decoder": only(False, None),
    "add_cross_attention": only(False),
    "chunk_size_feed_forward": only(0),
    "pruned_heads": only({}, None),
    "quantization_config": carried(kinds.or_null(kinds.OBJECT), None),  # models/huggingface/quantized.py
    **dict.fromkeys((*_GENERATION, *_NOTES), irrelevant()),
}
