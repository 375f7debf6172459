"""What byte pair encodings have in common: bytes as characters, and the merges that a vocabulary with ranks implies."""

from __future__ import annotations

from collections.abc import Mapping


def byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in of each byte: character -> byte (openai/gpt-2, encoder.py, bytes_to_unicode)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


def merges_of(ranks: Mapping[str, float]) -> list[tuple[str, str]]:
    """The merges, first one first, of a vocabulary that knows only which piece is made first: the least rank.

    tiktoken and sentencepiece merge whichever two neighbours are a piece together, the first such pair of the text
    where two would make the same piece; the tokenizers library merges listed pairs, one after the other. So every way
    to halve a piece is a merge. Of these the one with the longer left half comes first: in a run of one character what
    is left over stands at the end, which makes the first pair of the text that one.
    """
    merges = []
    lengths = sorted({len(piece) for piece in ranks})
    for piece, rank in ranks.items():
        for cut in lengths:  # of a piece much longer than others few cuts can be two pieces
            if cut >= len(piece):
                break
            left, right = piece[:cut], piece[cut:]
            if left in ranks and right in ranks:
                merges.append((rank, -cut, left, right))
    merges.sort()
    return [(left, right) for _, _, left, right in merges]
