"""A sentencepiece model of the kind that is trained here as a Hugging Face tokenizer.json, so that transformers makes
the same tokens of the same text, and the same text of the same tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SPACE = "\u2581"  # sentencepiece's character for a space
# What stands for these characters in the pieces and in a text on its way to them, so that no text matches the pieces
# "<0x41>" or "[SEP]": code points that Unicode keeps out of texts ("noncharacters").
STAND_INS = {"<": "\ufdd0", "[": "\ufdd1"}
CONFIG_ROLES = {"cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}


class NotConvertible(ValueError):
    """Why a sentencepiece model has no equal tokenizer.json here, in words."""


def tokenizer_json(path: Path, family: str = "gpt") -> dict[str, str]:
    """The texts of tokenizer.json and tokenizer_config.json for the sentencepiece model at `path`, by name.

    Raises NotConvertible for what is not as train.py beside it trains it: Unigram with bytes for what is no piece, and
    every character of the text kept. For `family` bert a text gets [CLS] and [SEP] around it, and may hold [MASK]; else
    no text of a prompt becomes a special token.
    """
    import tokenizers
    from sentencepiece import sentencepiece_model_pb2  # needs protobuf, which comes with tensorboard
    from tokenizers import AddedToken, decoders, models, normalizers, processors

    messages: Any = sentencepiece_model_pb2  # made when it is imported: no type checker sees what is in it
    proto = messages.ModelProto()
    try:
        proto.ParseFromString(path.read_bytes())
    except Exception as error:  # protobuf's DecodeError has no name that all its versions share
        raise NotConvertible(f"it is no sentencepiece model ({error})") from error
    kinds = messages.ModelProto.SentencePiece
    special = (kinds.CONTROL, kinds.UNKNOWN)
    _check(proto, special, kinds.USER_DEFINED, kinds.UNUSED)

    texts = [p.piece if p.type in (*special, kinds.BYTE) else _escaped(p.piece) for p in proto.pieces]
    first, last = [], []  # what decodes before bytes are put together, and after
    for character, stand_in in STAND_INS.items():
        if any(stand_in in text for text in texts):
            last.append(decoders.Replace(stand_in, character))
        else:  # the character is a byte, which no other character has in it
            byte = f"<0x{ord(character):02X}>"
            texts[texts.index(byte)] = stand_in
            first.append(decoders.Replace(stand_in, byte))
    pieces = [(text, p.score) for text, p in zip(texts, proto.pieces, strict=True)]
    tokenizer = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=proto.trainer_spec.unk_id, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Replace(old, new) for old, new in STAND_INS.items()])
    tokenizer.decoder = decoders.Sequence([*first, decoders.ByteFallback(), decoders.Fuse(), *last])
    tokenizer.add_special_tokens(
        [AddedToken(p.piece, special=True, normalized=False) for p in proto.pieces if p.type in special]
    )
    symbols = [
        AddedToken(p.piece, special=False, normalized=False) for p in proto.pieces if p.type == kinds.USER_DEFINED
    ]
    tokenizer.add_tokens(symbols)
    assert tokenizer.get_vocab_size() == len(proto.pieces)
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


def _check(proto: Any, special: tuple[int, ...], user_defined: int, unused: int) -> None:
    trainer, normalizer = proto.trainer_spec, proto.normalizer_spec
    if trainer.model_type != trainer.UNIGRAM:
        raise NotConvertible("it is not of the kind Unigram")
    if not trainer.byte_fallback:
        raise NotConvertible("it has no bytes for characters that are no pieces")
    if normalizer.precompiled_charsmap or normalizer.add_dummy_prefix or normalizer.remove_extra_whitespaces:
        raise NotConvertible("it changes characters or spaces of a text")
    if trainer.treat_whitespace_as_suffix or not normalizer.escape_whitespaces:
        raise NotConvertible("it treats spaces in another way")
    for p in proto.pieces:
        odd = p.type == user_defined and any(character in p.piece for character in (*STAND_INS, SPACE, " "))
        if odd or p.type == unused or any(stand_in in p.piece for stand_in in STAND_INS.values()):
            raise NotConvertible(f"it has the piece {p.piece!r}")


def _escaped(piece: str) -> str:
    for old, new in STAND_INS.items():
        piece = piece.replace(old, new)
    return piece.replace(SPACE, " ")


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
