"""A text of a Unigram tokenizer.json word by word: the ids that the library gives, in a fraction of its time.

Hugging Face's Unigram searches a whole line, and one line is rarely like another. Words come again: each is searched
once and then looked up. That gives the same ids where no piece crosses from one word into the next, since the best
split of a text is then the best splits of its words, and where scores add up without rounding, since which of two
equally likely splits the search takes then does not depend on the text before. Both are checked here. What
data/tokenizer/unigram.py writes is such a tokenizer.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

import numpy as np

from data.tokenizer.unigram import STAND_INS

LETTERS = r"A-Za-z\x80-\U0010ffff"
# A word has the spaces before it. The first that fits all pieces is taken: short words come again more often.
WORDS = (rf"\n| *(?:[{LETTERS}]+|[^ \n{LETTERS}]+)| +", r"\n| *[^ \n]+| +")
MOST_WORDS = 1 << 17  # that are kept, in about 40 MB; then it begins anew
LONGEST_WORD = 64  # characters; what is longer hardly comes again
UNKNOWN_PENALTY = 10.0  # what the library takes off the least score for a character that is no piece
NORMALIZER = {
    "type": "Sequence",
    "normalizers": [{"type": "Replace", "pattern": {"String": old}, "content": new} for old, new in STAND_INS.items()],
}


class WordEncoder:
    """The ids of words, kept. Made by `word_encoder`."""

    def __init__(self, model: Any, words: str, symbols: list[str], most_characters: int):
        self._model = model
        self._words = re.compile(words)
        self._symbols = symbols
        self._most_characters = most_characters
        self._end_of_line = int(model.token_to_id("\n"))
        self._ids: dict[str, bytes] = {}  # as int32, which are joined faster than lists

    def encode(self, text: str) -> np.ndarray | None:
        """Token ids of `text`, int32 [n], without special tokens; None for a text that must be searched as a whole."""
        if len(text) > self._most_characters or any(symbol in text for symbol in self._symbols):
            return None
        if not 0 < len(self._ids) < MOST_WORDS:
            self._ids = {"\n": np.array([self._end_of_line], dtype=np.int32).tobytes()}
        words = self._words.findall(text)
        unknown = list(set(words).difference(self._ids))
        if unknown:
            self._search(unknown)
        ids = b"".join(map(self._ids.__getitem__, words))
        for word in unknown:
            if len(word) > LONGEST_WORD:
                del self._ids[word]
        return np.frombuffer(ids, dtype=np.int32)

    def _search(self, words: list[str]) -> None:
        """Find the ids of each word, by one call: the library searches each line by itself."""
        encoding = self._model.encode_batch_fast(["\n".join(words)], add_special_tokens=False)[0]
        ids = np.array(encoding.ids, dtype=np.int32)
        ends = [*np.flatnonzero(ids == self._end_of_line), len(ids)]
        for word, begin, end in zip(words, [0, *(end + 1 for end in ends[:-1])], ends, strict=True):
            self._ids[word] = ids[begin:end].tobytes()


def word_encoder(model: Any, spec: dict[str, Any]) -> WordEncoder | None:
    """What encodes by words as `model` does, a `tokenizers.Tokenizer` made of the tokenizer.json `spec`; None where the
    ids could be others."""
    unigram = spec["model"]
    if unigram.get("type") != "Unigram" or set(unigram) - {"type", "unk_id", "vocab", "byte_fallback"}:
        return None
    if spec.get("pre_tokenizer") is not None or spec.get("normalizer") != NORMALIZER:
        return None
    vocabulary = dict(unigram["vocab"])
    byte_pieces = {f"<0x{byte:02X}>" for byte in range(256)}
    # Without a piece for each byte the library makes one token of several unknown characters in a row. No text has the
    # bytes of "<" and "[", whose places their stand-ins may have.
    absent = (
        byte_pieces - set(vocabulary) - {f"<0x{ord(old):02X}>" for old, new in STAND_INS.items() if new in vocabulary}
    )
    if not unigram.get("byte_fallback") or absent:
        return None
    added = {token["content"]: token for token in spec.get("added_tokens", [])}
    if "\n" not in added or any(
        token["normalized"] or token["lstrip"] or token["rstrip"] or token["single_word"] for token in added.values()
    ):
        return None
    symbols = [content for content in added if content != "\n"]
    if any("\n" in symbol for symbol in symbols):
        return None
    pieces = [_as_text(piece) for piece in vocabulary if piece not in added and piece not in byte_pieces]
    words = next((words for words in WORDS if all(re.fullmatch(words, piece) for piece in pieces)), None)
    if words is None:
        return None
    scores = [float(score) for score in vocabulary.values()]
    scores.append(min(scores) - UNKNOWN_PENALTY)
    # Sums of whole multiples of a power of two have no rounding while they fit the 53 bits of a double.
    unit = max(Fraction(score).denominator for score in scores)
    most_characters = int(2**53 / (unit * max(map(abs, scores))))
    return WordEncoder(model, words, [*symbols, *STAND_INS.values()], most_characters)


def _as_text(piece: str) -> str:
    for old, new in STAND_INS.items():
        piece = piece.replace(new, old)
    return piece
