"""Tokenizer classes of transformers 5 that use only the vocabulary of a tokenizer.json and replace its rules by their
own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from configs.tokenizer_files import ALWAYS_READ_WITH
from data.tokenizer.formats.patterns import QWEN
from data.tokenizer.formats.spec import byte_level, split
from data.tokenizer.formats.word_lists import NFC, bert_normalizer
from data.tokenizer.probes import PROBES

AS_IT_IS = "PreTrainedTokenizerFast"  # the class that uses tokenizer.json unchanged
# The class that transformers 5.23 uses for a model type (models/auto/tokenization_auto.py) if tokenizer_config.json
# names no class, and for the types of ALWAYS_READ_WITH in any case.
OF_MODEL = {
    "gpt2": "GPT2Tokenizer",
    "bert": "BertTokenizer",
    "olmo": "GPTNeoXTokenizer",
    "olmoe": "GPTNeoXTokenizer",
    "qwen3": "Qwen2Tokenizer",
    "qwen3_moe": "Qwen2Tokenizer",
    **ALWAYS_READ_WITH,
}


def class_of(settings: dict[str, Any], folder: Path) -> str:
    """Return the name of the tokenizer class that transformers uses for a folder; an empty string if unknown."""
    try:
        model = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type")
    except (OSError, ValueError, AttributeError):  # not a folder of a model
        model = None
    named = str(settings.get("tokenizer_class") or "")
    return OF_MODEL.get(model, "") if model in ALWAYS_READ_WITH or not named else named.removesuffix("Fast")


def differing_text(spec: dict[str, Any], settings: dict[str, Any], name: str) -> str | None:
    """Return a text that transformers' class `name` and the tokenizer.json `spec` tokenize differently, or None."""
    import tokenizers

    changed = _changed(spec, settings, name)
    if not changed or all(spec.get(key) == value for key, value in changed.items()):
        return None
    both = [{**spec, "post_processor": None}, {**spec, **changed, "post_processor": None}]
    ours, theirs = (tokenizers.Tokenizer.from_str(json.dumps(each)) for each in both)
    return next((text for text in PROBES if ours.encode(text).ids != theirs.encode(text).ids), None)


def _changed(spec: dict[str, Any], settings: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the sections of the tokenizer.json `spec` that transformers' class `name` would replace, with the contents
    that it would use."""
    model = spec["model"]
    prefix = bool(settings.get("add_prefix_space"))
    own = {
        "GPT2Tokenizer": (None, byte_level(prefix, True)),
        "RobertaTokenizer": (None, byte_level(prefix, True)),
        "GPTNeoXTokenizer": (NFC, byte_level(prefix, True)),
        "Qwen2Tokenizer": (NFC, split(QWEN)),
    }
    if name in own and model.get("type") == "BPE":
        plain = {"ignore_merges": False, "byte_fallback": False, "fuse_unk": False, "dropout": None}
        return {"normalizer": own[name][0], "pre_tokenizer": own[name][1], "model": {**model, **plain}}
    if name == "LlamaTokenizer" and model.get("type") == "BPE" and "ByteLevel" not in json.dumps(spec["pre_tokenizer"]):
        before = "always" if settings.get("legacy") else "first"
        scheme = before if settings.get("add_prefix_space") in (None, True) else "never"
        space = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": scheme, "split": False}
        return {"normalizer": None, "pre_tokenizer": space, "model": {**model, "fuse_unk": True, "byte_fallback": True}}
    if name == "BertTokenizer" and model.get("type") == "WordPiece":
        return {"normalizer": bert_normalizer(settings), "pre_tokenizer": {"type": "BertPreTokenizer"}}
    return {}
