"""What a user should know of a corpus before it is trained on, in a sentence each."""

from __future__ import annotations

from pathlib import Path

from data.tokenizer import Tokenizer

SHOWN_TOKENS = 5


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
