"""Readers of vocabularies that list words: GPT-2's `vocab.json` with `merges.txt`, and BERT's `vocab.txt`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from base.errors import ConfigError
from configs.tokenizer_files import merges_of
from data.tokenizer.base import OTHER
from data.tokenizer.formats import spec
from data.tokenizer.formats.patterns import QWEN
from data.tokenizer.settings import first_line, token_name

NFC = {"type": "NFC"}
END = {"unk_token": "<|endoftext|>", "bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
ROBERTA = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "sep_token": "</s>",
    "cls_token": "<s>",
    "unk_token": "<unk>",
    "pad_token": "<pad>",
    "mask_token": {"content": "<mask>", "lstrip": True},
}
# Rules of transformers' classes for vocab.json and merges.txt: normalizer, pattern (None: GPT-2's), usual roles.
BYTE_PAIR_CLASSES: dict[str, tuple[dict[str, Any] | None, str | None, dict[str, Any]]] = {
    "GPT2Tokenizer": (None, None, END),
    "GPTNeoXTokenizer": (NFC, None, {**END, "pad_token": "<|padding|>"}),
    "RobertaTokenizer": (None, None, ROBERTA),
    "Qwen2Tokenizer": (NFC, QWEN, {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}),
}
BERT_ROLES = {
    "unk_token": "[UNK]",
    "sep_token": "[SEP]",
    "pad_token": "[PAD]",
    "cls_token": "[CLS]",
    "mask_token": "[MASK]",
}
WORD_PIECE_CLASSES = ("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer", "MobileBertTokenizer")
SAVE = (
    "python -c \"from transformers import AutoTokenizer as A; A.from_pretrained('{0}').save_pretrained('tokenizer')\" "
    "writes a tokenizer.json that can be given instead"
)


def byte_pairs(file: Path, settings: dict[str, Any]) -> spec.Converted:
    """Read a `vocab.json` (token to id) and the file of merges next to it, one per line. Raises ConfigError."""
    name = _class_of(file, settings, BYTE_PAIR_CLASSES, "GPT2Tokenizer")
    normalizer, pattern, usual = BYTE_PAIR_CLASSES[name]
    merges_file = merges_of(file)
    if merges_file is None:
        raise ConfigError(
            f"data.tokenizer={file}: the file of merges is missing. Put merges.txt next to vocab.json, or "
            "NAME-merges.txt next to NAME-vocab.json"
        )
    try:
        vocabulary = json.loads(_text(file))
    except ValueError as error:
        raise ConfigError(f"data.tokenizer={file} is not JSON: {first_line(error)}. Download it again") from error
    whole = isinstance(vocabulary, dict) and all(type(i) is int and i >= 0 for i in vocabulary.values())
    if not whole or not vocabulary or len(set(vocabulary.values())) < len(vocabulary):
        raise ConfigError(
            f"data.tokenizer={file} must be a JSON object from token to id, with a different id for each token. {OTHER}"
        )
    vocabulary = dict(vocabulary)
    merges = _read_merges(merges_file, vocabulary)
    settings = {**usual, **settings}
    added = spec.add_tokens(vocabulary, settings, file.parent)
    prefix = bool(settings.get("add_prefix_space"))
    after = spec.settings_around(settings, vocabulary)
    if name == "RobertaTokenizer":
        begin, end = (_with_id(settings[role], vocabulary, file) for role in ("cls_token", "sep_token"))
        flags = {"trim_offsets": True, "add_prefix_space": prefix}
        after = {"type": "RobertaProcessing", "sep": end, "cls": begin, **flags}
    content = spec.tokenizer_spec(
        spec.byte_pair_model(vocabulary, merges),
        added,
        normalizer,
        spec.byte_level(prefix, True) if pattern is None else spec.split(pattern),
        after,
        spec.byte_level(True, True),
    )
    notes = [] if "tokenizer_class" in settings else [f"{file} is read as GPT-2's, because no tokenizer_class is named"]
    return spec.Converted(content, settings, notes)


def word_pieces(file: Path, settings: dict[str, Any]) -> spec.Converted:
    """Read BERT's `vocab.txt`, one token per line. Raises ConfigError."""
    _class_of(file, settings, WORD_PIECE_CLASSES, "BertTokenizer")
    lines = _text(file).split("\n")
    if lines[-1] == "":
        lines.pop()
    vocabulary = {line.rstrip("\r"): i for i, line in enumerate(lines)}
    lower_case = settings.get("do_lower_case")
    settings = {**BERT_ROLES, **settings}
    if token_name(settings["unk_token"]) not in vocabulary:
        raise ConfigError(
            f"data.tokenizer={file} lacks {settings['unk_token']}: a vocabulary of BERT has one piece per line, and "
            f"must contain it. {OTHER}"
        )
    added = spec.add_tokens(vocabulary, settings, file.parent)
    begin, end = (_with_id(settings[role], vocabulary, file) for role in ("cls_token", "sep_token"))
    content = spec.tokenizer_spec(
        {
            "type": "WordPiece",
            "unk_token": token_name(settings["unk_token"]),
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": vocabulary,
        },
        added,
        bert_normalizer(settings),
        {"type": "BertPreTokenizer"},
        spec.around([begin], [end], before_second=False),
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
    )
    notes = []
    if lower_case is None:
        capitals = sum(any(character.isupper() for character in token) for token in vocabulary if token[:1] != "[")
        never = f", so {capitals} of its pieces never occur, because they have capitals" if capitals else ""
        notes = [
            f"{file} is read in lower case, as in transformers{never}. To change this, write "
            '{"do_lower_case": false} to tokenizer_config.json next to it'
        ]
    return spec.Converted(content, settings, notes)


def bert_normalizer(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the normalizer of transformers' BertTokenizer for the settings of a tokenizer_config.json."""
    lower, chinese = settings.get("do_lower_case"), settings.get("tokenize_chinese_chars")
    return {
        "type": "BertNormalizer",
        "clean_text": True,
        "handle_chinese_chars": True if chinese is None else bool(chinese),
        "strip_accents": settings.get("strip_accents"),
        "lowercase": True if lower is None else bool(lower),
    }


def _class_of(file: Path, settings: dict[str, Any], known: Any, usual: str) -> str:
    """Return the name of the tokenizer class whose rules apply: the class in tokenizer_config.json, by default `usual`.
    Raises ConfigError if the class is not in `known`."""
    name = str(settings.get("tokenizer_class", usual)).removesuffix("Fast")
    if name in ("PreTrainedTokenizer", "TokenizersBackend"):  # classes without own rules
        name = usual
    if name not in known:
        raise ConfigError(
            f"data.tokenizer={file}: the tokenizer_class {name} of tokenizer_config.json must be one of "
            f"{', '.join(known)}. {SAVE.format(file.parent)}"
        )
    return name


def _with_id(token: Any, vocabulary: dict[str, int], file: Path) -> tuple[str, int]:
    name = token_name(token)
    if name not in vocabulary:
        raise ConfigError(f"data.tokenizer={file} must contain the token {name}, which is added to each text. {OTHER}")
    return name, vocabulary[name]


def _read_merges(file: Path, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    merges = []
    for number, line in enumerate(_text(file).split("\n"), 1):
        line = line.rstrip("\r")
        if not line or line.startswith("#version"):
            continue
        left, _, right = line.partition(" ")
        if not left or not right or " " in right:
            raise ConfigError(
                f"data.tokenizer: line {number} of {file} ({line[:40]!r}) must consist of two pieces. Download the "
                "file again"
            )
        missing = next((token for token in (left, right, left + right) if token not in vocabulary), None)
        if missing is not None:
            raise ConfigError(
                f"data.tokenizer: {missing!r} in line {number} of {file} must be in the vocabulary next to it. "
                "Download both files again"
            )
        merges.append((left, right))
    return merges


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"data.tokenizer={file} is not UTF-8: {first_line(error)}. Download it again") from error
