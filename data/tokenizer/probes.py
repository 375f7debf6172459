"""Texts on which tokenizers often differ: spaces, bytes, names of special tokens, diacritics, scripts, rare
characters."""

from __future__ import annotations

from collections.abc import Iterable

RUN = 64  # characters: enough to stop a pattern that tries every cut of them
MOST_RUNS = 128

PROBES = (
    "",
    " ",
    "  a  b   c ",
    "a",
    "\n",
    "a\n\nb\r\n\tc",
    "</s>",
    "<s> <unk> <pad> [MASK] <0x41><0x0A>",
    "\u2581a \u2581",
    "\ta\t\tb \t",
    "it's 3.14 and 1,000,000 (x[0] == {y}); // end",
    "The quick brown fox; THE QUICK BROWN FOX. the end",
    "caf\xe9 cafe\u0301 na\xefve \xdf \u0130",
    "\u0435\u0451 \u041f\u0440\u0438\u0432\u0435\u0442",
    "\u0395\u03bb\u03bb\u03ac\u03c2",
    "\u4e2d\u6587\uff0c\u3002\u3000\u4eba",
    "\u5410\u8f29\u306f\u30ab\u3099 \uff76\uff9e",
    "\ud55c\uad6d \u1112\u1161\u11ab",
    "\U0001f600\U0001f468\u200d\U0001f469 \U0001f1e9\U0001f1ea \U0001f44d\U0001f3fd\ufe0f",
    "\u0939\u093f\u0928\u094d\u0926\u0940 \u0915\u094d\u200d\u0937",
    "\ufb01 \uff21\uff22 \u2460 \u2122 \xbd \xb2 \u2126",
    "a\x00b\x01c\x7f\x85d\xade",
    "a\xa0b\u2003c\u200bd\u2028e\ufefff\u3000",
    "\x01",
    " \n ",
    "a\u0323\u0302 x\u0301",
    "\ufffd\ue000\U0010fffe",
    "     a",
    "                  b",
    " " * 67,
    "\n" * 9 + "=" * 40 + "a" * 37 + "-" * 70 + "0" * 21,
)


def runs_of(texts: Iterable[str]) -> list[str]:
    """Return texts on which a slow regular expression takes long: repetitions of each of `texts`, and runs of their
    characters and of some common ones; a run ends in a character that no pattern matches."""
    texts = list(texts)
    characters = dict.fromkeys(["a", "Z", "0", " ", "_", ".", "\n", "\xe9", "\u4e2d", *"".join(texts)[:4096]])
    repeated = [text[:RUN] * 8 for text in texts[:MOST_RUNS]]
    return [*(f"{character * RUN}\x01" for character in list(characters)[:MOST_RUNS]), *repeated]
