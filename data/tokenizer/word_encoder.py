"""Word-by-word encoding of a text with a Unigram tokenizer.json: the same ids as the library's, in a fraction of the
time.

Hugging Face's Unigram searches each line for its best split, and lines rarely repeat. Words do repeat, so each word is
searched once and then looked up. The ids are the same if no token spans two words, because the best split of a text
then consists of the best splits of its words, and if scores add up without rounding, because the choice between two
equally likely splits then does not depend on the preceding text. Both conditions are checked here. They hold for the
tokenizers that data/tokenizer/sentencepiece_json.py writes.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

import numpy as np

from data.tokenizer.sentencepiece_json import STAND_INS

LETTERS = r"A-Za-z\x80-\U0010ffff"
# A word includes the preceding spaces. The first pattern that fits all tokens is used, since short words repeat more.
WORDS = (rf"\n| *(?:[{LETTERS}]+|[^ \n{LETTERS}]+)| +", r"\n| *[^ \n]+| +")
MOST_WORDS = 1 << 17  # words in the cache, about 40 MB, before it is cleared
LONGEST_WORD = 64  # characters; longer words rarely repeat and are not cached
UNKNOWN_PENALTY = 10.0  # the library scores an unknown character this much below the lowest score
NORMALIZER = {
    "type": "Sequence",
    "normalizers": [{"type": "Replace", "pattern": {"String": old}, "content": new} for old, new in STAND_INS.items()],
}


class WordEncoder:
    """An encoder that looks up the token ids of known words, and lets the library encode each new word once."""

    def __init__(self, model: Any, words: str, symbols: list[str], most_characters: int):
        self._model = model
        self._words = re.compile(words)
        self._symbols = symbols
        self._most_characters = most_characters
        self._end_of_line = int(model.token_to_id("\n"))
        self._ids: dict[str, bytes] = {}  # as int32, which are joined faster than lists

    def encode(self, text: str) -> np.ndarray | None:
        """Return the token ids of a text, int32 [n], without special tokens; None if the library must encode it."""
        if len(text) > self._most_characters or any(symbol in text for symbol in self._symbols):
            return None
        if not 0 < len(self._ids) < MOST_WORDS:
            self._ids = {"\n": np.array([self._end_of_line], dtype=np.int32).tobytes()}
        words = self._words.findall(text)
        unknown = list(set(words).difference(self._ids))
        if unknown:
            # One call for all words: the library encodes each line separately.
            encoding = self._model.encode_batch_fast(["\n".join(unknown)], add_special_tokens=False)[0]
            found = np.array(encoding.ids, dtype=np.int32)
            ends = [*np.flatnonzero(found == self._end_of_line), len(found)]
            for word, begin, end in zip(unknown, [0, *(end + 1 for end in ends[:-1])], ends, strict=True):
                self._ids[word] = found[begin:end].tobytes()
        ids = b"".join(map(self._ids.__getitem__, words))
        for word in unknown:
            if len(word) > LONGEST_WORD:
                del self._ids[word]
        return np.frombuffer(ids, dtype=np.int32)


def word_encoder(model: Any, spec: dict[str, Any]) -> WordEncoder | None:
    """Return the word-by-word encoder for a `tokenizers.Tokenizer` with the tokenizer.json `spec`; None if its ids
    could differ from the library's."""
    unigram = spec["model"]
    if unigram.get("type") != "Unigram" or set(unigram) - {"type", "unk_id", "vocab", "byte_fallback"}:
        return None
    if spec.get("pre_tokenizer") is not None or spec.get("normalizer") != NORMALIZER:
        return None
    vocabulary = dict(unigram["vocab"])
    byte_tokens = {f"<0x{byte:02X}>" for byte in range(256)}
    # Without a token for each byte, the library makes a single token of several unknown characters in a row. The bytes
    # of "<" and "[" never occur, and their stand-ins may have the ids of these bytes.
    replaced = {f"<0x{ord(old):02X}>" for old, new in STAND_INS.items() if new in vocabulary}
    if not unigram.get("byte_fallback") or byte_tokens - set(vocabulary) - replaced:
        return None
    added = {token["content"]: token for token in spec.get("added_tokens", [])}
    flags = ("normalized", "lstrip", "rstrip", "single_word")
    if "\n" not in added or any(token[flag] for token in added.values() for flag in flags):
        return None
    symbols = [content for content in added if content != "\n"]
    if any("\n" in symbol for symbol in symbols):
        return None
    back = str.maketrans({new: old for old, new in STAND_INS.items()})
    texts = [token.translate(back) for token in vocabulary if token not in added and token not in byte_tokens]
    words = next((words for words in WORDS if all(re.fullmatch(words, text) for text in texts)), None)
    if words is None:
        return None
    scores = [float(score) for score in vocabulary.values()]
    scores.append(min(scores) - UNKNOWN_PENALTY)
    # Sums of whole multiples of a power of two have no rounding while they fit the 53 bits of a double.
    unit = max(Fraction(score).denominator for score in scores)
    most_characters = int(2**53 / (unit * max(map(abs, scores))))
    return WordEncoder(model, words, [*symbols, *STAND_INS.values()], most_characters)
