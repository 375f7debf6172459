"""What a user should know of a corpus before it is trained on, in a sentence each."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from data.indexed import IndexedTokens
from data.tokenizer import Tokenizer

SHOWN_TOKENS = 5
MOST_ENDS = 20_000  # documents whose last token is read


def written_out(name: str, counts: dict[int, int], tokenizer: Tokenizer) -> str:
    """The sentence on special tokens that the texts of a corpus hold: how often, by id."""
    names = tokenizer.control_tokens()
    most = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    shown = ", ".join(f"{names.get(token, token)!r} {count:,}" for token, count in most[:SHOWN_TOKENS])
    more = f" and {len(most) - SHOWN_TOKENS} others" if len(most) > SHOWN_TOKENS else ""
    total = sum(counts.values())
    text = f"the text of {name} holds {total:,} special tokens by their names ({shown}{more}). They are control tokens "
    if "split_special_tokens" in tokenizer.rules:
        return f"{text}here, as the model of {tokenizer.path} has pieces of these names"
    place = Path(tokenizer.path)
    file = (place if place.is_dir() else place.parent) / "tokenizer_config.json"
    return f'{text}here and in transformers; "split_special_tokens": true in {file} makes them plain text in both'


def other_ends(name: str, tokens: IndexedTokens, tokenizer: Tokenizer) -> str | None:
    """The sentence on documents of token files that do not end with the tokenizer's end token; None where all do.

    The last tokens of all documents are counted, or of MOST_ENDS of them, evenly chosen.
    """
    lengths, bounds = tokens.sequence_lengths, tokens.document_bounds
    through = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])[bounds]
    last = bounds[1:][np.diff(through) > 0] - 1  # the last sequence of each document that has a token
    total = len(last)
    if not total:
        return None
    if total > MOST_ENDS:
        last = last[np.linspace(0, total - 1, MOST_ENDS).astype(np.int64)]
    while np.any(empty := lengths[last] == 0):  # before sequences without a token
        last = last - empty
    places = (tokens.sequence_starts[last] + lengths[last] - 1).tolist()
    ends, counts = np.unique(tokens.tokens.read([(place, place + 1) for place in places]), return_counts=True)
    found = dict(zip(ends.tolist(), counts.tolist(), strict=True))
    right, counted = found.get(tokenizer.eod, 0), len(last)
    if right == counted:
        return None

    def shown(token: int) -> str:
        return f"{token} ({tokenizer.piece(token)!r})" if 0 <= token < tokenizer.vocab_size else str(token)

    of = f"{counted:,} documents" + (f", a sample of {total:,}," if counted < total else "")
    wanted = f"the end token of {tokenizer.path}, {shown(tokenizer.eod)}"
    most = max(found, key=lambda token: (found[token], -token))
    if most == tokenizer.eod and found[most] * 2 > counted:
        return f"{counted - right:,} of {of} of {name} do not end with {wanted}, as the others do"
    without = "Make the files with an end token (Megatron-LM: --append-eod)"
    if found[most] * 2 <= counted:
        return (
            f"{right:,} of {of} of {name} end with {wanted}, and no other token ends most of them (the most frequent "
            f"is {shown(most)}, {found[most]:,} times): a model cannot learn where a text ends, and one document runs "
            f"into the next. {without}"
        )
    text = f"{found[most]:,} of {of} of {name} end with {shown(most)}, and {right:,} with {wanted}: "
    if most not in tokenizer.special_ids():
        return f"{text}the first is plain text, so a model cannot learn where a text ends. {without}"
    return (
        f"{text}a model learns to end texts with the first, and generation waits for the second. Give the tokenizer "
        f"that made the files, or name the first as eos_token in {tokenizer.end_file}"
    )
