"""What sentencepiece does to a text before it looks for pieces, as normalizers of a tokenizer.json; and byte pair
encodings of sentencepiece as such a file."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from data.tokenizer.formats.byte_pairs import merges_of

SPACE = "\u2581"  # sentencepiece's character for a space
# Code points that Unicode keeps out of texts ("noncharacters") stand for what must not be cut or composed on the way;
# U+FDD0 and U+FDD1 are unigram.py's. Where a model has more symbols, private ones stand for these.
BETWEEN = "\ufdef"
NONCHARACTERS = [chr(point) for point in range(0xFDD2, 0xFDEF)]
PRIVATE = 0x100000
# Rules of sentencepiece that compose characters as Unicode does.
COMPOSING = ("nfkc", "nmt_nfkc", "nfkc_cf", "nmt_nfkc_cf")
# Where the library would take more than one character at a time: between two marks; next to what is not ASCII, as it
# looks up whole graphemes and loses parts of them.
BETWEEN_MARKS = r"(?<=\p{Mn})(?=\p{Mn})"
# Before a mark that Unicode would put below the one that a letter has above it; the letters with horns may take it.
BEFORE_LOWER_MARKS = "(?<=[^\\x00-\\x7f\u01a0\u01a1\u01af\u01b0])(?=[\u0316-\u0319\u031b-\u0333\u0339-\u033c])"
NEXT_TO_OTHERS = r"(?<=[^\x00-\x7f])(?=[\s\S])|(?<=[\s\S])(?=[^\x00-\x7f])|(?<=\r)(?=\n)"


class NotConvertible(ValueError):
    """Why a sentencepiece model has no equal tokenizer.json here, in words."""


class Symbols:
    """The symbols of a model that stand in a text as they are, and are never cut.

    The tokenizers library can cut a text at such symbols, too, but then treats what is between them as texts, each with
    a prefix of its own. So where a model adds a prefix or takes spaces away, one character stands for each symbol.
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
                    text = first[:begin] + second
                    if self._one_after_the_other(text) != self._from_the_left(text):
                        raise NotConvertible(f"its symbols {first!r} and {second!r} overlap")

    def _one_after_the_other(self, text: str) -> str:
        for symbol, stand_in in self.stand_ins.items():
            text = text.replace(symbol, stand_in)
        return text

    def _from_the_left(self, text: str) -> str:
        """The longest symbol at the first place, and so on, as sentencepiece takes them."""
        found, place = "", 0
        while place < len(text):
            symbol = next((symbol for symbol in self.stand_ins if text.startswith(symbol, place)), text[place])
            found, place = found + self.stand_ins.get(symbol, symbol), place + len(symbol)
        return found

    def piece(self, text: str) -> str:
        """How a piece is written in tokenizer.json."""
        return self.stand_ins.get(text, text)


def needs_whole_text(proto: Any) -> bool:
    """Whether what is done to a text depends on where it begins and ends."""
    return bool(proto.normalizer_spec.add_dummy_prefix or proto.normalizer_spec.remove_extra_whitespaces)


def keeps_text(proto: Any) -> bool:
    """Whether a model is one of those that are trained here, whose pieces are the text, character by character."""
    changed = proto.normalizer_spec.precompiled_charsmap or needs_whole_text(proto)
    return proto.trainer_spec.model_type == proto.trainer_spec.UNIGRAM and not changed


def before_pieces(proto: Any, symbols: Symbols) -> list[Any]:
    """The normalizers that do to a text what the model does, but for its writing of spaces. Raises NotConvertible."""
    from tokenizers import Regex, normalizers

    spec = proto.normalizer_spec
    steps: list[Any] = [normalizers.Replace(symbol, stand_in) for symbol, stand_in in symbols.stand_ins.items()]
    prefix = [normalizers.Prepend(" ")] if spec.add_dummy_prefix else []
    if not spec.remove_extra_whitespaces:
        steps += prefix  # also before what becomes nothing
    if spec.precompiled_charsmap:
        if spec.name not in COMPOSING:
            raise NotConvertible(f"its normalization rules ({spec.name or 'without a name'}) are its own")
        apart = normalizers.Replace(BETWEEN, "")
        # A mark at a time, up to three on a letter, and none passes another one: sentencepiece does not sort them.
        marks = Regex(f"{BETWEEN_MARKS}|{BEFORE_LOWER_MARKS}")
        compose = [normalizers.Replace(marks, BETWEEN), normalizers.NFC(), apart] * 3
        lookup = normalizers.Precompiled(spec.precompiled_charsmap)
        steps += [*compose, normalizers.Replace(Regex(NEXT_TO_OTHERS), BETWEEN), lookup, apart, *compose]
    if spec.remove_extra_whitespaces:
        ends = Regex(rf"\A +|[ {SPACE}]+\z")
        steps += [normalizers.Replace(Regex(" {2,}"), " "), normalizers.Replace(ends, ""), *prefix]
    return steps


def after_pieces(proto: Any, symbols: Symbols) -> tuple[list[Any], list[Any]]:
    """The decoders that undo it: before bytes are put together, and after."""
    from tokenizers import decoders

    first = [decoders.Replace(stand_in, symbol) for symbol, stand_in in symbols.stand_ins.items()]
    return first, [decoders.Strip(content=" ", left=1)] if proto.normalizer_spec.add_dummy_prefix else []


def byte_pairs(proto: Any, symbols: Symbols) -> Any:
    """A `tokenizers.Tokenizer` without added tokens that does what a BPE model does. Raises NotConvertible."""
    import tokenizers
    from tokenizers import decoders, models, normalizers

    kinds = type(proto).SentencePiece
    scores = {p.piece: -p.score for p in proto.pieces if p.type == kinds.NORMAL}
    merged = [piece for piece in scores if len(piece) > 1]
    missing = next((piece for piece in merged if not set(piece) <= scores.keys()), None)
    if missing is not None:
        raise NotConvertible(f"its piece {missing!r} has a character that is no piece")
    tied = _tied(scores)
    if tied:
        raise NotConvertible(f"its pieces {tied[0]!r} and {tied[1]!r} have the same score")
    vocabulary = {symbols.piece(p.piece): i for i, p in enumerate(proto.pieces)}
    model = models.BPE(
        vocabulary,
        merges_of(scores),
        unk_token=proto.pieces[proto.trainer_spec.unk_id].piece,
        fuse_unk=True,
        byte_fallback=proto.trainer_spec.byte_fallback,
    )
    tokenizer = tokenizers.Tokenizer(model)
    steps = [*before_pieces(proto, symbols), normalizers.Replace(" ", SPACE)]
    tokenizer.normalizer = normalizers.Sequence(steps)
    first, last = after_pieces(proto, symbols)
    together = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*first, *together, *last])
    return tokenizer


def _tied(scores: dict[str, float]) -> list[str]:
    """Pieces of equal scores, which sentencepiece makes from left to right, whichever comes first, and the library one
    kind after the other. Runs of one character come out the same."""
    by_score: dict[float, list[str]] = {}
    for piece, score in scores.items():
        if len(piece) > 1:
            by_score.setdefault(score, []).append(piece)
    return next((pieces for pieces in by_score.values() if len(pieces) > 1 and len(set("".join(pieces))) > 1), [])
