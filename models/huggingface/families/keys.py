"""Tables of the keys of a config.json: each model family has one. models/huggingface/unknown_keys.py decides about keys
that are not in the table.

A key in a table is either carried over (to our config), irrelevant (for the model's numbers), or limited to some
values. Each key has a kind of value and a default for folders without it. The defaults are those of transformers for
the family; they are written here so that a folder means the same with every installed version.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from base.errors import ConfigError

HfConfig = dict[str, Any]
REQUIRED = object()  # instead of a default: a folder without the key is refused


@dataclass(frozen=True)
class Kind:
    """A kind of JSON value. `rule` completes the phrase "must be"."""

    rule: str
    fits: Callable[[Any], bool]


def _is_whole(value: Any) -> bool:
    return type(value) is int and abs(value) < 2**63


def _is_number(value: Any) -> bool:
    return type(value) is float and math.isfinite(value) or _is_whole(value)


ANYTHING = Kind("anything", lambda value: True)
FLAG = Kind("true or false", lambda value: type(value) is bool)
TEXT = Kind("a text", lambda value: isinstance(value, str))
TEXTS = Kind("a list of texts", lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value))
OBJECT = Kind("an object", lambda value: isinstance(value, dict))
CODE = Kind(
    "an object with the names of classes",
    lambda value: OBJECT.fits(value) and all(isinstance(item, str | list) for item in value.values()),
)
LABELS = Kind(
    "an object with numbers as keys", lambda value: OBJECT.fits(value) and all(str(key).isdecimal() for key in value)
)
COUNT = Kind("a whole number from 1 to 2147483647", lambda value: _is_whole(value) and 1 <= value < 2**31)
LAYERS = Kind("a whole number from 1 to 10000", lambda value: _is_whole(value) and 1 <= value <= 10_000)
INDEX = Kind("a whole number from 0 to 2147483647", lambda value: _is_whole(value) and 0 <= value < 2**31)
INDICES = Kind("a list of whole numbers from 0", lambda value: isinstance(value, list) and all(map(INDEX.fits, value)))
TOKEN = Kind("a token id", _is_whole)
TOKENS = Kind(
    "a token id or a list of token ids",
    lambda value: all(map(_is_whole, value if isinstance(value, list) else [value])),
)
NUMBER = Kind("a number", _is_number)
POSITIVE = Kind("a number above 0", lambda value: _is_number(value) and value > 0)
PROBABILITY = Kind("a number of at least 0 and less than 1", lambda value: _is_number(value) and 0 <= value < 1)
# transformers 5 refuses whole numbers for these.
REAL = Kind("a number with a decimal point", lambda value: type(value) is float and math.isfinite(value))
POSITIVE_REAL = Kind("a number above 0 with a decimal point", lambda value: REAL.fits(value) and value > 0)
SPREAD = Kind("a number from 0 to 1 with a decimal point", lambda value: REAL.fits(value) and 0 <= value <= 1)


def or_null(kind: Kind) -> Kind:
    """Return a kind of value that may also be null."""
    return Kind(f"{kind.rule}, or null", lambda value: value is None or kind.fits(value))


@dataclass(frozen=True)
class FamilyKey:
    """A key in a family's table: the kind of its value, its default, and the values and spellings that are allowed."""

    kind: Kind
    default: Any = None  # of a folder without the key
    only: tuple[Any, ...] = ()  # other values are refused
    also: tuple[str, ...] = ()  # other spellings of the key


Keys = dict[str, FamilyKey]


def carried(kind: Kind, default: Any = REQUIRED, also: tuple[str, ...] = ()) -> FamilyKey:
    """Return a table entry for a key that our config has too, or that another key is checked against."""
    return FamilyKey(kind, default, also=also)


def irrelevant(kind: Kind = ANYTHING) -> FamilyKey:
    """Return a table entry for a key that does not change the model's numbers."""
    return FamilyKey(kind)


def only(*values: Any) -> FamilyKey:
    """Return a table entry for a key that must have one of these values; the first is the default without the key."""
    return FamilyKey(ANYTHING, values[0], only=values)


def read_keys(hf: HfConfig, model_type: str, table: Keys) -> HfConfig:
    """Return the value of every key in the table, under the table's spelling. Raises ConfigError if a key is missing or
    has a value that the table does not allow."""
    values: HfConfig = {}
    for key, row in table.items():
        given = {spelling: hf[spelling] for spelling in (key, *row.also) if spelling in hf}
        for spelling, value in given.items():
            if not row.kind.fits(value):
                raise ConfigError(f"config.json {spelling} ({show(value)}) must be {row.kind.rule}.")
            if row.only and not any(_same(value, allowed) for allowed in row.only):
                allowed = " or ".join(map(show, row.only))
                raise ConfigError(
                    f"config.json {spelling} ({show(value)}) of a {model_type} model is not supported: it must be "
                    f"{allowed}."
                )
        (first, value), *others = given.items() or [(key, row.default)]
        for other, another in others:
            if not _same(value, another):
                raise ConfigError(
                    f"config.json {first} ({show(value)}) and {other} ({show(another)}) are two "
                    "spellings of one key and must be equal."
                )
        if value is REQUIRED:
            raise ConfigError(
                f"config.json of a {model_type} model must have the key '{key}'{' or '.join(['', *row.also])}."
            )
        values[key] = value
    return values


def _same(one: Any, other: Any) -> bool:
    """Whether two JSON values are equal; true does not equal 1."""
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def must(holds: bool, key: str, value: Any, rule: str) -> None:
    """Raise ConfigError for a key of config.json unless `holds`. `rule` completes the phrase "must"."""
    if not holds:
        raise ConfigError(f"config.json {key} ({show(value)}) must {rule}.")


def check_padding(keys: HfConfig) -> None:
    """Raise ConfigError if the padding token is outside the vocabulary. A negative id counts from the end."""
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
    "model_type": carried(TEXT),
    "architectures": FamilyKey(or_null(TEXTS)),
    "transformers_version": irrelevant(or_null(TEXT)),
    "dtype": FamilyKey(ANYTHING, None, only=(None, *TYPES), also=("torch_dtype",)),
    "vocab_size": carried(COUNT),
    "bos_token_id": irrelevant(or_null(TOKEN)),
    "eos_token_id": irrelevant(or_null(TOKENS)),
    "pad_token_id": FamilyKey(or_null(TOKEN)),
    "use_cache": irrelevant(FLAG),
    "return_dict": irrelevant(or_null(FLAG)),
    "output_hidden_states": irrelevant(or_null(FLAG)),
    "output_attentions": irrelevant(or_null(FLAG)),
    "id2label": irrelevant(or_null(LABELS)),
    "label2id": irrelevant(or_null(OBJECT)),
    "num_labels": irrelevant(COUNT),
    "auto_map": irrelevant(CODE),  # its files are not copied
    "problem_type": only(None, "regression", "single_label_classification", "multi_label_classification"),
    "is_encoder_decoder": only(False, None),
    "tie_encoder_decoder": only(False, None),
    "add_cross_attention": only(False),
    "chunk_size_feed_forward": only(0),
    "pruned_heads": only({}, None),
    "quantization_config": carried(or_null(OBJECT), None),  # models/huggingface/quantized.py
    **dict.fromkeys((*_GENERATION, *_NOTES), irrelevant()),
}
