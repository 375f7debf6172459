"""Conversion of sentencepiece models to Hugging Face's tokenizer.json with the same tokens and the same decoded texts.

The changes that sentencepiece makes to a text before tokenization become normalizers, and their inverses decoders.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data.tokenizer.base import SPACE
from data.tokenizer.formats.spec import merges_of
from data.tokenizer.probes import PROBES

CONFIG_ROLES = {"cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}


def tokenizer_json(path: Path, family: str = "gpt") -> dict[str, str]:
    """Convert the sentencepiece model at `path` to the texts of tokenizer.json and tokenizer_config.json, by name.

    If `family` is bert, [CLS] and [SEP] are put around a text, and [MASK] in a text is the mask token; otherwise no
    part of a text becomes a special token. Raises NotConvertible if the model has no equivalent tokenizer.json.
    """
    from tokenizers import AddedToken, processors

    proto = read_model(path)
    kinds = type(proto).SentencePiece
    special = [p.piece for p in proto.pieces if p.type in (kinds.CONTROL, kinds.UNKNOWN)]
    symbols = [p.piece for p in proto.pieces if p.type == kinds.USER_DEFINED]
    kind = _check(proto, symbols, kinds.UNUSED)
    whole = Symbols(symbols, needs_whole_text(proto))
    tokenizer = kind(proto, whole)
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    if not whole.stand_ins:
        tokenizer.add_tokens([AddedToken(symbol, special=False, normalized=False) for symbol in symbols])
    assert tokenizer.get_vocab_size() == len(proto.pieces)
    _compare(path, proto, tokenizer, symbols)
    # Settings: the special tokens by role, and that no text becomes a special token.
    spec = proto.trainer_spec
    ids = {"eos_token": spec.eos_id, "bos_token": spec.bos_id, "pad_token": spec.pad_id, "unk_token": spec.unk_id}
    roles = {role: proto.pieces[i].piece for role, i in ids.items() if 0 <= i < len(proto.pieces)}
    names = {p.piece for p in proto.pieces}
    roles |= {role: name for role, name in CONFIG_ROLES.items() if name in names}
    flags = {"split_special_tokens": family != "bert", "clean_up_tokenization_spaces": False}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **roles, **flags}
    if family == "bert":
        around = [(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
        if any(token is None for _, token in around):
            raise NotConvertible("it lacks the piece [CLS] or [SEP], which BERT needs")
        pair = "[CLS] $A [SEP] $B:1 [SEP]:1"
        tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", pair, around)
    config = json.dumps(settings, indent=2) + "\n"
    return {"tokenizer.json": tokenizer.to_str(pretty=True), "tokenizer_config.json": config}


def read_model(path: Path) -> Any:
    """Return the protobuf message in the file of a sentencepiece model. Raises NotConvertible."""
    from sentencepiece import sentencepiece_model_pb2  # needs protobuf, which comes with tensorboard

    messages: Any = sentencepiece_model_pb2  # made at import: no type checker knows its content
    proto = messages.ModelProto()
    try:
        proto.ParseFromString(path.read_bytes())
    except Exception as error:  # protobuf's DecodeError has no name that all its versions share
        raise NotConvertible(f"it is not a sentencepiece model ({error})") from error
    return proto


def _check(proto: Any, symbols: list[str], unused: int) -> Any:
    """Return the function that converts the sentencepiece model `proto`. symbols: its user-defined symbols. unused: the
    type of unused pieces. Raises NotConvertible if the model is not supported."""
    trainer = proto.trainer_spec
    kinds = {trainer.UNIGRAM: _unigram, trainer.BPE: _byte_pairs}
    if trainer.model_type not in kinds:
        raise NotConvertible(f"its type ({trainer.ModelType.Name(trainer.model_type)}) is neither Unigram nor BPE")
    if trainer.treat_whitespace_as_suffix or not proto.normalizer_spec.escape_whitespaces:
        raise NotConvertible("it marks spaces at the end of a word, or not at all, instead of at its beginning")
    if spaced := [symbol for symbol in symbols if SPACE in symbol or " " in symbol]:
        raise NotConvertible(f"its piece {spaced[0]!r} contains a space")
    if left_out := [p.piece for p in proto.pieces if p.type == unused]:
        raise NotConvertible(f"its piece {left_out[0]!r} is marked as unused")
    return kinds[trainer.model_type]


def _compare(path: Path, proto: Any, tokenizer: Any, symbols: list[str]) -> None:
    """Raise NotConvertible if the model and `tokenizer` give different tokens for a probe text. Splits of equal
    likelihood may differ."""
    import sentencepiece

    by_score = proto.trainer_spec.model_type == proto.trainer_spec.UNIGRAM
    model = sentencepiece.SentencePieceProcessor(model_file=str(path))
    tokenizer.encode_special_tokens = True
    for text in (*PROBES, *(f"{symbol}a {symbol}{symbol}\n{symbol}" for symbol in symbols[:20])):
        if keeps_text(proto):  # the model takes U+2581 for a space
            text = text.replace(SPACE, "")
        splits = model.encode(text), tokenizer.encode(text).ids
        if splits[0] == splits[1]:
            continue
        likelihoods = [sum(proto.pieces[i].score for i in ids) for ids in splits]  # logarithms; scores are float32
        if not (by_score and math.isclose(*likelihoods)):
            raise NotConvertible(f"the text {text[:40]!r} would get other tokens than from sentencepiece")
    tokenizer.encode_special_tokens = False


# Noncharacters of Unicode, which never occur in texts, stand for symbols, which must be neither cut nor composed.
# U+FDD0 and U+FDD1 are in STAND_INS. Private code points follow if a model has more symbols.
BETWEEN = "\ufdef"
NONCHARACTERS = [chr(point) for point in range(0xFDD2, 0xFDEF)]
PRIVATE = 0x100000
# Rules of sentencepiece that compose characters as Unicode does.
COMPOSING = ("nfkc", "nmt_nfkc", "nfkc_cf", "nmt_nfkc_cf")
# Positions where the library would process more than one character at a time: between two marks, and next to
# characters outside ASCII, because it looks up entire graphemes and loses parts of them.
BETWEEN_MARKS = r"(?<=\p{Mn})(?=\p{Mn})"
# Before a mark that Unicode would order before the one above the letter; letters with horns may combine with it.
BEFORE_LOWER_MARKS = "(?<=[^\\x00-\\x7f\u01a0\u01a1\u01af\u01b0])(?=[\u0316-\u0319\u031b-\u0333\u0339-\u033c])"
NEXT_TO_OTHERS = r"(?<=[^\x00-\x7f])(?=[\s\S])|(?<=[\s\S])(?=[^\x00-\x7f])|(?<=\r)(?=\n)"


class NotConvertible(ValueError):
    """Raised if a sentencepiece model has no equivalent tokenizer.json. The message is a clause with the reason."""


class Symbols:
    """The user-defined symbols of a model: strings that are never cut and never changed.

    The tokenizers library also cuts texts at such symbols, but treats the spans between symbols as separate texts, each
    with its own prefix. If a model adds a prefix or removes spaces, a stand-in character replaces each symbol instead.
    """

    def __init__(self, symbols: Sequence[str], whole_text: bool):
        self.stand_ins: dict[str, str] = {}
        if not whole_text:
            return
        pool = itertools.chain(NONCHARACTERS, map(chr, itertools.count(PRIVATE)))
        self.stand_ins = dict(zip(sorted(symbols, key=len, reverse=True), pool, strict=False))
        begins: dict[str, list[str]] = {}
        for symbol in symbols:
            for length in range(1, len(symbol)):
                begins.setdefault(symbol[:length], []).append(symbol)
        for first in symbols:
            for begin in range(1, len(first)):
                for second in begins.get(first[begin:], ()):
                    text = replaced = first[:begin] + second
                    for stood_for, stand_in in self.stand_ins.items():  # as the normalizers do
                        replaced = replaced.replace(stood_for, stand_in)
                    if replaced != self._from_the_left(text):
                        raise NotConvertible(f"its user-defined symbols {first!r} and {second!r} overlap")

    def _from_the_left(self, text: str) -> str:
        """Replace the longest symbol at each position by its stand-in, from left to right, as sentencepiece does."""
        found, position = "", 0
        while position < len(text):
            symbol = next((symbol for symbol in self.stand_ins if text.startswith(symbol, position)), text[position])
            found, position = found + self.stand_ins.get(symbol, symbol), position + len(symbol)
        return found


def needs_whole_text(proto: Any) -> bool:
    """Return whether a model changes the beginning or the end of a text."""
    return bool(proto.normalizer_spec.add_dummy_prefix or proto.normalizer_spec.remove_extra_whitespaces)


def keeps_text(proto: Any) -> bool:
    """Return whether a model is Unigram and tokenizes texts unchanged, like the models that Mixtrain trains."""
    changed = proto.normalizer_spec.precompiled_charsmap or needs_whole_text(proto)
    return proto.trainer_spec.model_type == proto.trainer_spec.UNIGRAM and not changed


def _normalizers(proto: Any, symbols: Symbols) -> list[Any]:
    """Return the normalizers that change a text like the model, except for spaces. Raises NotConvertible."""
    from tokenizers import Regex, normalizers

    spec = proto.normalizer_spec
    steps: list[Any] = [normalizers.Replace(symbol, stand_in) for symbol, stand_in in symbols.stand_ins.items()]
    prefix = [normalizers.Prepend(" ")] if spec.add_dummy_prefix else []
    if not spec.remove_extra_whitespaces:
        steps += prefix  # also for a text that becomes empty
    if spec.precompiled_charsmap:
        if spec.name not in COMPOSING:
            known, rules = ", ".join(sorted(COMPOSING)), spec.name or "without a name"
            raise NotConvertible(f"its normalization rules ({rules}) must be one of {known}")
        remove_separators = normalizers.Replace(BETWEEN, "")
        # One mark at a time, up to three per letter, in the given order: sentencepiece does not sort them.
        marks = Regex(f"{BETWEEN_MARKS}|{BEFORE_LOWER_MARKS}")
        compose = [normalizers.Replace(marks, BETWEEN), normalizers.NFC(), remove_separators] * 3
        separate = normalizers.Replace(Regex(NEXT_TO_OTHERS), BETWEEN)
        lookup = normalizers.Precompiled(spec.precompiled_charsmap)
        steps += [*compose, separate, lookup, remove_separators, *compose]
    if spec.remove_extra_whitespaces:
        ends = Regex(rf"\A +|[ {SPACE}]+\z")
        steps += [normalizers.Replace(Regex(" {2,}"), " "), normalizers.Replace(ends, ""), *prefix]
    return steps


def _decoders(proto: Any, symbols: Symbols) -> tuple[list[Any], list[Any]]:
    """Return the decoders that undo the normalizers: a list for before bytes are joined, and a list for afterwards."""
    from tokenizers import decoders

    first = [decoders.Replace(stand_in, symbol) for symbol, stand_in in symbols.stand_ins.items()]
    return first, [decoders.Strip(content=" ", left=1)] if proto.normalizer_spec.add_dummy_prefix else []


def _byte_pairs(proto: Any, symbols: Symbols) -> Any:
    """Return a `tokenizers.Tokenizer` equivalent to a BPE model, without added tokens. Raises NotConvertible."""
    import tokenizers
    from tokenizers import decoders, models, normalizers

    kinds = type(proto).SentencePiece
    scores = {p.piece: -p.score for p in proto.pieces if p.type == kinds.NORMAL}
    by_score: dict[float, list[str]] = {}
    for token, score in scores.items():
        if len(token) > 1:
            if not set(token) <= scores.keys():
                raise NotConvertible(
                    f"its piece {token!r} contains a character that has no piece of its own, but each must have one"
                )
            by_score.setdefault(score, []).append(token)
    # Of pieces with equal scores, sentencepiece merges the leftmost first, and the library all of one piece before
    # those of another. Runs of a single character give the same result.
    for tied in by_score.values():
        if len(tied) > 1 and len(set("".join(tied))) > 1:
            raise NotConvertible(f"its pieces {tied[0]!r} and {tied[1]!r} have the same score")
    vocabulary = {symbols.stand_ins.get(p.piece, p.piece): i for i, p in enumerate(proto.pieces)}
    unknown, fallback = proto.pieces[proto.trainer_spec.unk_id].piece, proto.trainer_spec.byte_fallback
    model = models.BPE(vocabulary, merges_of(scores), unk_token=unknown, fuse_unk=True, byte_fallback=fallback)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([*_normalizers(proto, symbols), normalizers.Replace(" ", SPACE)])
    first, last = _decoders(proto, symbols)
    together = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*first, *together, *last])
    return tokenizer


# Stand-ins for these characters in a Unigram model's vocabulary and in normalized texts, so that no text matches the
# tokens "<0x41>" or "[SEP]". They are noncharacters of Unicode, which never occur in texts.
STAND_INS = {"<": "\ufdd0", "[": "\ufdd1"}


def _unigram(proto: Any, symbols: Symbols) -> Any:
    """Return a `tokenizers.Tokenizer` equivalent to a Unigram model, without added tokens. Raises NotConvertible."""
    import tokenizers
    from tokenizers import decoders, models, normalizers

    kinds = type(proto).SentencePiece
    special = (kinds.CONTROL, kinds.UNKNOWN)
    for p in proto.pieces:
        odd = p.type == kinds.USER_DEFINED and any(character in p.piece for character in STAND_INS)
        if odd or any(stand_in in p.piece for stand_in in STAND_INS.values()):
            raise NotConvertible(f"its piece {p.piece!r} contains <, [ or a character that stands for them")
    texts = [
        p.piece if p.type in (*special, kinds.BYTE) else symbols.stand_ins.get(_escaped(p.piece), _escaped(p.piece))
        for p in proto.pieces
    ]
    first, last = [], []  # decoders before and after bytes are joined
    for character, stand_in in STAND_INS.items():
        byte = f"<0x{ord(character):02X}>"
        if any(stand_in in text for text in texts):
            last.append(decoders.Replace(stand_in, character))
        elif byte in texts:  # the character is encoded as a byte, which no other character contains
            texts[texts.index(byte)] = stand_in
            first.append(decoders.Replace(stand_in, byte))
    scores = [(text, p.score) for text, p in zip(texts, proto.pieces, strict=True)]
    fallback = proto.trainer_spec.byte_fallback
    tokenizer = tokenizers.Tokenizer(models.Unigram(scores, unk_id=proto.trainer_spec.unk_id, byte_fallback=fallback))
    steps = _normalizers(proto, symbols)
    if not keeps_text(proto):
        steps.append(normalizers.Replace(SPACE, " "))
    steps += [normalizers.Replace(old, new) for old, new in STAND_INS.items()]
    tokenizer.normalizer = normalizers.Sequence(steps)
    before, after = _decoders(proto, symbols)
    tokenizer.decoder = decoders.Sequence([*before, *first, decoders.ByteFallback(), decoders.Fuse(), *last, *after])
    return tokenizer


def _escaped(token: str) -> str:
    for old, new in STAND_INS.items():
        token = token.replace(old, new)
    return token.replace(SPACE, " ")
