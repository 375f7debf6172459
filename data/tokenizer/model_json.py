"""A sentencepiece model as a Hugging Face tokenizer.json, so that transformers makes the same tokens of the same text,
and the same text of the same tokens."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from data.tokenizer.pieces import SPACE, NotConvertible, Symbols, byte_pairs, keeps_text, needs_whole_text
from data.tokenizer.probes import PROBES
from data.tokenizer.unigram import unigram

CONFIG_ROLES = {"cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}


def tokenizer_json(path: Path, family: str = "gpt") -> dict[str, str]:
    """The texts of tokenizer.json and tokenizer_config.json for the sentencepiece model at `path`, by name.

    Raises NotConvertible for a model that has no equal one. For `family` bert a text gets [CLS] and [SEP] around it,
    and may hold [MASK]; else no text of a prompt becomes a special token.
    """
    from tokenizers import AddedToken, processors

    proto = read_model(path)
    kinds = type(proto).SentencePiece
    special = (kinds.CONTROL, kinds.UNKNOWN)
    symbols = [p.piece for p in proto.pieces if p.type == kinds.USER_DEFINED]
    kind = _check(proto, symbols, kinds.UNUSED)
    whole = Symbols(symbols, needs_whole_text(proto))
    tokenizer = kind(proto, whole)
    tokenizer.add_special_tokens(
        [AddedToken(p.piece, special=True, normalized=False) for p in proto.pieces if p.type in special]
    )
    if not whole.stand_ins:
        tokenizer.add_tokens([AddedToken(symbol, special=False, normalized=False) for symbol in symbols])
    assert tokenizer.get_vocab_size() == len(proto.pieces)
    _compare(path, proto, tokenizer, symbols)
    settings = _settings(proto)
    if family == "bert":
        around = [(piece, tokenizer.token_to_id(piece)) for piece in ("[CLS]", "[SEP]")]
        if any(token is None for _, token in around):
            raise NotConvertible("it has no [CLS] and [SEP]")
        tokenizer.post_processor = processors.TemplateProcessing(
            "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", around
        )
        settings["split_special_tokens"] = False
    return {
        "tokenizer.json": tokenizer.to_str(pretty=True),
        "tokenizer_config.json": json.dumps(settings, indent=2) + "\n",
    }


def read_model(path: Path) -> Any:
    """What a sentencepiece model's file holds. Raises NotConvertible."""
    from sentencepiece import sentencepiece_model_pb2  # needs protobuf, which comes with tensorboard

    messages: Any = sentencepiece_model_pb2  # made when it is imported: no type checker sees what is in it
    proto = messages.ModelProto()
    try:
        proto.ParseFromString(path.read_bytes())
    except Exception as error:  # protobuf's DecodeError has no name that all its versions share
        raise NotConvertible(f"it is no sentencepiece model ({error})") from error
    return proto


def _check(proto: Any, symbols: list[str], unused: int) -> Any:
    """What makes a tokenizer of a model of this kind. Raises NotConvertible."""
    trainer = proto.trainer_spec
    kinds = {trainer.UNIGRAM: unigram, trainer.BPE: byte_pairs}
    if trainer.model_type not in kinds:
        raise NotConvertible("it is neither of the kind Unigram nor BPE")
    if trainer.treat_whitespace_as_suffix or not proto.normalizer_spec.escape_whitespaces:
        raise NotConvertible("it treats spaces in another way")
    for piece in [symbol for symbol in symbols if SPACE in symbol or " " in symbol]:
        raise NotConvertible(f"it has the piece {piece!r}")
    for p in proto.pieces:
        if p.type == unused:
            raise NotConvertible(f"it has the piece {p.piece!r}, which is not to be used")
    return kinds[trainer.model_type]


def _compare(path: Path, proto: Any, tokenizer: Any, symbols: list[str]) -> None:
    """Raise NotConvertible where the two come apart, but for splits that are equally likely."""
    import sentencepiece

    by_score = proto.trainer_spec.model_type == proto.trainer_spec.UNIGRAM
    model = sentencepiece.SentencePieceProcessor(model_file=str(path))
    tokenizer.encode_special_tokens = True
    for text in (*PROBES, *(f"{symbol}a {symbol}{symbol}\n{symbol}" for symbol in symbols[:20])):
        if keeps_text(proto):  # U+2581, too, which the model takes for a space
            text = text.replace(SPACE, "")
        theirs, ours = model.encode(text), tokenizer.encode(text).ids
        if theirs != ours and not (by_score and math.isclose(_likelihood(proto, theirs), _likelihood(proto, ours))):
            raise NotConvertible(f"the text {text[:40]!r} would have other tokens")
    tokenizer.encode_special_tokens = False


def _likelihood(proto: Any, ids: list[int]) -> float:
    """The logarithm of the likelihood that a Unigram model gives to a split; the scores are float32."""
    return sum(proto.pieces[i].score for i in ids)


def _settings(proto: Any) -> dict[str, Any]:
    """What tokenizer_config.json says: the special tokens by role, and that no text becomes one."""
    spec = proto.trainer_spec
    ids = {"eos_token": spec.eos_id, "bos_token": spec.bos_id, "pad_token": spec.pad_id, "unk_token": spec.unk_id}
    roles = {role: proto.pieces[i].piece for role, i in ids.items() if 0 <= i < len(proto.pieces)}
    names = {p.piece for p in proto.pieces}
    roles |= {role: piece for role, piece in CONFIG_ROLES.items() if piece in names}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **roles,
        "split_special_tokens": True,
        "clean_up_tokenization_spaces": False,
    }
