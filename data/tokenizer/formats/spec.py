"""Sections of a tokenizer.json, built from tokenizers of other formats."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from base.errors import ConfigError
from data.tokenizer.settings import ROLES, first_line, token_name


@dataclass
class Converted:
    """The contents of a tokenizer.json and a tokenizer_config.json, and notes for the user."""

    spec: dict[str, Any]
    settings: dict[str, Any]
    notes: list[str] = field(default_factory=list)


def tokenizer_spec(
    model: dict[str, Any],
    added: list[dict[str, Any]],
    normalizer: dict[str, Any] | None,
    pre_tokenizer: dict[str, Any] | None,
    post_processor: dict[str, Any] | None,
    decoder: dict[str, Any] | None,
) -> dict[str, Any]:
    """Return the content of a tokenizer.json that consists of the given sections."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": sorted(added, key=lambda token: token["id"]),
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": post_processor,
        "decoder": decoder,
        "model": model,
    }


def added_token(token: int, content: str, special: bool = True, **flags: bool) -> dict[str, Any]:
    """Return an entry for the `added_tokens` of a tokenizer.json."""
    usual = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": token, "content": content, **usual, **flags, "special": special}


def add_tokens(vocabulary: dict[str, int], settings: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Return the added tokens of a tokenizer: from added_tokens.json, and from `added_tokens_decoder` and the roles in
    tokenizer_config.json. Adds them to `vocabulary`. Raises ConfigError."""
    tokens: dict[str, dict[str, Any]] = {}
    file = folder / "added_tokens.json"
    listed: Any = {}
    if file.is_file():
        try:
            listed = json.loads(file.read_text(encoding="utf-8"))
            tokens = {name: added_token(int(i), name, special=False) for name, i in listed.items()}
        except (ValueError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{file} must be a JSON object from token to id: {first_line(error)}. Download it again"
            ) from error
    for i, entry in (settings.get("added_tokens_decoder") or {}).items():
        flags = {key: bool(entry.get(key)) for key in ("single_word", "lstrip", "rstrip", "normalized")}
        tokens[entry["content"]] = added_token(int(i), entry["content"], bool(entry.get("special")), **flags)
    for role in ROLES:
        name = token_name(settings.get(role))
        if name and (name in vocabulary or name in tokens):
            token = tokens.setdefault(name, added_token(vocabulary.get(name, -1), name))
            token["special"] = True
            if isinstance(settings[role], dict):
                token |= {key: bool(settings[role].get(key)) for key in ("single_word", "lstrip", "rstrip")}
    by_id = {i: name for name, i in vocabulary.items()}
    for name, token in tokens.items():
        if vocabulary.get(name, token["id"]) != token["id"] or by_id.get(token["id"], name) != name:
            raise ConfigError(
                f"data.tokenizer={folder}: the added token {name!r} has id {token['id']}, which contradicts the "
                f"vocabulary: {by_id.get(token['id'], name)!r} has that id there, and {name!r} has id "
                f"{vocabulary.get(name)}. Download the files of the tokenizer again"
            )
        vocabulary[name] = token["id"]
        by_id[token["id"]] = name
    return list(tokens.values())


def around(
    before: list[tuple[str, int]], after: list[tuple[str, int]], before_second: bool = True
) -> dict[str, Any] | None:
    """Return the post-processor that puts tokens, given as (content, id), around a text and around both texts of a
    pair; None without tokens. before_second: put tokens also before the second text of a pair."""
    if not before and not after:
        return None

    def sides(kind: str, type_id: int, first: bool) -> list[dict[str, Any]]:
        special = [[{"SpecialToken": {"id": name, "type_id": type_id}} for name, _ in side] for side in (before, after)]
        return [*(special[0] if first else []), {"Sequence": {"id": kind, "type_id": type_id}}, *special[1]]

    return {
        "type": "TemplateProcessing",
        "single": sides("A", 0, True),
        "pair": [*sides("A", 0, True), *sides("B", 1, before_second)],
        "special_tokens": {name: {"id": name, "ids": [i], "tokens": [name]} for name, i in [*before, *after]},
    }


def settings_around(settings: dict[str, Any], vocabulary: dict[str, int]) -> dict[str, Any] | None:
    """Return the post-processor that `add_bos_token` and `add_eos_token` of tokenizer_config.json request, or None."""

    def side(key: str, role: str) -> list[tuple[str, int]]:
        name = token_name(settings.get(role))
        return [(name, vocabulary[name])] if settings.get(key) and name in vocabulary else []

    return around(side("add_bos_token", "bos_token"), side("add_eos_token", "eos_token"))


def byte_level(add_prefix_space: bool, use_regex: bool) -> dict[str, Any]:
    """Return the pre-tokenizer or decoder that represents bytes as characters. use_regex: split words like GPT-2."""
    return {"type": "ByteLevel", "add_prefix_space": add_prefix_space, "trim_offsets": True, "use_regex": use_regex}


def split(pattern: str) -> dict[str, Any]:
    """Return the pre-tokenizer that splits a text by a regular expression and represents bytes as characters."""
    regex = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [regex, byte_level(False, False)]}


def byte_pair_model(vocabulary: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> dict[str, Any]:
    """Return the `model` section of a tokenizer.json for byte pair encoding."""
    unset = dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"))
    off = dict.fromkeys(("fuse_unk", "byte_fallback", "ignore_merges"), False)
    return {"type": "BPE", **unset, **off, **options, "vocab": vocabulary, "merges": list(map(list, merges))}


def byte_level_alphabet() -> dict[str, int]:
    """Return the byte that each printable character represents in GPT-2's vocabulary, by character (openai/gpt-2,
    encoder.py, bytes_to_unicode)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


def merges_of(ranks: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return the ordered merges of a vocabulary that has only ranks; the lowest rank is merged first.

    tiktoken and sentencepiece merge any two neighbours that together form a token, the leftmost pair first if two pairs
    form the same token. The tokenizers library merges listed pairs in order. So each split of a token in two is a
    merge, and the split with the longest left half is listed first: a run of one character then leaves its remainder at
    the end, as if the leftmost pair had been merged.
    """
    merges = []
    lengths = sorted(set(map(len, ranks)))
    for token, rank in ranks.items():
        for cut in lengths:  # lengths of tokens only, so that a very long token has few cuts to try
            if cut >= len(token):
                break
            left, right = token[:cut], token[cut:]
            if left in ranks and right in ranks:
                merges.append((rank, -cut, left, right))
    merges.sort()
    return [(left, right) for _, _, left, right in merges]
