"""Readers of vocabularies of ranked bytes: tiktoken's files (lines of base64 and rank) and Mistral's `tekken.json`."""

from __future__ import annotations

import base64
import binascii
import json
import re
from pathlib import Path
from typing import Any

from base.errors import ConfigError
from data.tokenizer.base import OTHER
from data.tokenizer.formats import patterns, spec
from data.tokenizer.settings import ROLES, first_line, token_name

LINE = re.compile(rb"([A-Za-z0-9+/]+=*) (\d+)")
# Special tokens of tekken.json files that list none (mistral-common, tokens/tokenizers/tekken.py).
TEKKEN_SPECIALS = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)
MOST_SPECIALS = 1 << 16  # published files have 1000
# Oniguruma interprets these differently from the library that the pattern was written for.
OTHERWISE_READ = re.compile(r"(?<!\\)(?:\\\\)*(?:\$|\^(?<!\[\^)|[}*+?]\+)")


def tiktoken(file: Path, settings: dict[str, Any]) -> spec.Converted:
    """Read a tiktoken file. Its name determines the pattern and the special tokens. Raises ConfigError."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        if not line:
            continue
        match = LINE.fullmatch(line)
        try:
            token = base64.b64decode(match[1], validate=True) if match else b""
        except binascii.Error:
            token = b""
        if not match or not token:
            raise ConfigError(
                f"data.tokenizer={file}: line {number} ({line[:40]!r}) must consist of base64, a space and a rank, as "
                "in all tiktoken files. Download the file again"
            )
        ranks[token] = int(match[2])
    if len(set(ranks.values())) < len(ranks):
        raise ConfigError(
            f"data.tokenizer={file}: two tokens have the same rank. The file is damaged; download it again"
        )
    known = patterns.published(file, len(ranks))
    if known is None:
        raise ConfigError(
            f"data.tokenizer={file}: the name of a tiktoken file must be one of {', '.join(patterns.NAMES)} or "
            "tokenizer.model (Llama 3), because only the name tells how texts are split. Rename the file to one of them"
        )
    first = max(ranks.values()) + 1
    decoder = settings.get("added_tokens_decoder") or {}
    listed = {int(i): entry["content"] for i, entry in decoder.items() if int(i) >= first}
    specials = {first + n: name for n, name in enumerate(known.specials)} | {i: name for name, i in known.at} | listed
    for i in range(first, first + known.reserved):
        specials.setdefault(i, patterns.RESERVED.format(i))
    roles = {"eos_token": known.eos, "bos_token": known.bos, "pad_token": known.pad}
    there = set(specials.values())
    settings = {**{role: name for role, name in roles.items() if name in there}, **settings}
    return _converted(file, ranks, specials, known.pattern, settings, known.nfc)


def tekken(file: Path, settings: dict[str, Any]) -> spec.Converted:
    """Read Mistral's tekken.json, whose special tokens have ids below the vocabulary's. Raises ConfigError."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        config, listed = content["config"], content.get("special_tokens")
        if listed is None:
            listed = [{"rank": i, "token_str": name} for i, name in enumerate(TEKKEN_SPECIALS)]
        specials = {int(token["rank"]): str(token["token_str"]) for token in listed}
        count = int(config.get("default_num_special_tokens") or len(specials))
        size = int(config.get("default_vocab_size") or count + len(content["vocab"]))
        ranks = {base64.b64decode(token["token_bytes"]): int(token["rank"]) for token in content["vocab"]}
        pattern = str(config["pattern"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"data.tokenizer={file} is not a tekken.json: {first_line(error)}. Download it again"
        ) from error
    if size > count + len(ranks) or count > MOST_SPECIALS or any(not 0 <= i < count for i in specials):
        raise ConfigError(
            f"data.tokenizer={file} contains {len(ranks)} tokens and {len(specials)} special tokens, but its "
            f"config declares {size} tokens in all, {count} of them special (at most {MOST_SPECIALS} are allowed). "
            "Download the file again"
        )
    found = OTHERWISE_READ.search(pattern)
    if found is not None:
        raise ConfigError(
            f"data.tokenizer={file}: its pattern contains {found[0]!r}, which the tokenizers library interprets "
            f"differently from tiktoken. {OTHER}"
        )
    specials = {i: specials.get(i, f"<SPECIAL_{i}>") for i in range(count)}
    ranks = {token: rank + count for token, rank in ranks.items() if rank < size - count}
    there = set(specials.values())
    roles = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    settings = {**{role: name for role, name in roles.items() if name in there}, **settings}
    return _converted(file, ranks, specials, pattern, settings, nfc=False)


def _converted(
    file: Path, ranks: dict[bytes, int], specials: dict[int, str], pattern: str, settings: dict[str, Any], nfc: bool
) -> spec.Converted:
    missing = sorted(set(range(256)) - {token[0] for token in ranks if len(token) == 1})
    if missing:
        raise ConfigError(
            f"data.tokenizer={file} must have a token for every byte, but has none for byte {missing[0]}. {OTHER}"
        )
    characters = {byte: character for character, byte in spec.byte_level_alphabet().items()}
    vocabulary = {"".join(map(characters.__getitem__, token)): rank for token, rank in ranks.items()}
    merges = spec.merges_of(vocabulary)
    for role in ROLES:
        name = token_name(settings.get(role))
        if name and name not in specials.values():
            raise ConfigError(
                f"data.tokenizer={file}: {role} ({name!r}) in tokenizer_config.json must be one of the special tokens, "
                f"such as {', '.join(list(specials.values())[:5])}. Correct tokenizer_config.json"
            )
    taken = set(ranks.values())
    for i, name in specials.items():
        if name in vocabulary or i in taken:
            raise ConfigError(
                f"data.tokenizer={file}: special token {name!r} (id {i}) must not be an ordinary token, too. {OTHER}"
            )
        vocabulary[name] = i
    content = spec.tokenizer_spec(
        spec.byte_pair_model(vocabulary, merges, ignore_merges=True),
        [spec.added_token(i, name) for i, name in specials.items()],
        {"type": "NFC"} if nfc else None,
        spec.split(pattern),
        spec.settings_around(settings, vocabulary),
        spec.byte_level(True, True),
    )
    # As in the libraries of these formats, "<|endoftext|>" in a text is not a special token.
    return spec.Converted(content, {"split_special_tokens": True, **settings})
