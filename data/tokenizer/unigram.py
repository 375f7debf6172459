"""A Unigram model of sentencepiece, such as is trained here, as a Hugging Face tokenizer."""

from __future__ import annotations

from typing import Any

from data.tokenizer.pieces import SPACE, NotConvertible, Symbols, after_pieces, before_pieces, keeps_text

# What stands for these characters in the pieces and in a text on its way to them, so that no text matches the pieces
# "<0x41>" or "[SEP]": code points that Unicode keeps out of texts ("noncharacters").
STAND_INS = {"<": "\ufdd0", "[": "\ufdd1"}


def unigram(proto: Any, symbols: Symbols) -> Any:
    """A `tokenizers.Tokenizer` without added tokens that does what a Unigram model does. Raises NotConvertible."""
    import tokenizers
    from tokenizers import decoders, models, normalizers

    kinds = type(proto).SentencePiece
    special = (kinds.CONTROL, kinds.UNKNOWN)
    for p in proto.pieces:
        odd = p.type == kinds.USER_DEFINED and any(character in p.piece for character in STAND_INS)
        if odd or any(stand_in in p.piece for stand_in in STAND_INS.values()):
            raise NotConvertible(f"it has the piece {p.piece!r}")
    texts = [p.piece if p.type in (*special, kinds.BYTE) else symbols.piece(_escaped(p.piece)) for p in proto.pieces]
    first, last = [], []  # what decodes before bytes are put together, and after
    for character, stand_in in STAND_INS.items():
        byte = f"<0x{ord(character):02X}>"
        if any(stand_in in text for text in texts):
            last.append(decoders.Replace(stand_in, character))
        elif byte in texts:  # the character is a byte, which no other character has in it
            texts[texts.index(byte)] = stand_in
            first.append(decoders.Replace(stand_in, byte))
    pieces = [(text, p.score) for text, p in zip(texts, proto.pieces, strict=True)]
    fallback = proto.trainer_spec.byte_fallback
    tokenizer = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=proto.trainer_spec.unk_id, byte_fallback=fallback))
    steps = before_pieces(proto, symbols)
    if not keeps_text(proto):
        steps.append(normalizers.Replace(SPACE, " "))
    steps += [normalizers.Replace(old, new) for old, new in STAND_INS.items()]
    tokenizer.normalizer = normalizers.Sequence(steps)
    before, after = after_pieces(proto, symbols)
    together = [decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*before, *first, *together, *last, *after])
    return tokenizer


def _escaped(piece: str) -> str:
    for old, new in STAND_INS.items():
        piece = piece.replace(old, new)
    return piece.replace(SPACE, " ")
