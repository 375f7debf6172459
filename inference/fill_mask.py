"""Predict masked words with a BERT: `python -m inference.fill_mask --checkpoint MODEL --text "a [MASK]" [--top-k
5]`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from base.errors import ConfigError
from inference.command import add_model_arguments, run_command

if TYPE_CHECKING:
    from inference.open_model import OpenModel


@dataclass(frozen=True)
class Guess:
    """A candidate token for a masked position, with its probability."""

    token: int
    probability: float


def fill_masks(model: OpenModel, texts: Sequence[list[int]], mask: int, top_k: int) -> list[list[list[Guess]]]:
    """Return the `top_k` most likely tokens for each mask token of each text, from one forward pass.

    mask: id of the mask token. Raises ConfigError for a text without it, a text that is too long, or a token outside
    the vocabulary.
    """
    import torch  # imported here: --help must not wait for torch

    encoder = model.encoder()
    for tokens in texts:
        _check(model, tokens, mask)
    positions = [[i for i, token in enumerate(tokens) if token == mask] for tokens in texts]
    with torch.inference_mode():
        logits = encoder.logits([torch.tensor(tokens) for tokens in texts], positions)
        likeliest = [each.softmax(dim=1).topk(min(top_k, model.vocab_size), dim=1) for each in logits]
    return [
        [
            [Guess(token, probability) for token, probability in zip(tokens, values, strict=True)]
            for tokens, values in zip(found.indices.tolist(), found.values.tolist(), strict=True)
        ]
        for found in likeliest
    ]


def _check(model: OpenModel, tokens: list[int], mask: int) -> None:
    if mask not in tokens:
        raise ConfigError(f"--text has no [MASK] (token id {mask}). Write it in place of each word to predict.")
    limit = model.config.model.sequence_length
    if len(tokens) > limit:
        raise ConfigError(
            f"--text has {len(tokens)} tokens with [CLS] and [SEP], more than the model's sequence length ({limit}). "
            "Give a shorter text."
        )
    wrong = [token for token in tokens if not 0 <= token < model.vocab_size]
    if wrong:
        last = model.vocab_size - 1
        raise ConfigError(f"--text has the token id {wrong[0]}, but the model's token ids are 0 to {last}. Replace it.")


def masked_tokens(model: OpenModel, text: str) -> tuple[list[int], int]:
    """Return the token ids of [CLS] text [SEP], and the id of [MASK]. Raises ConfigError without a tokenizer."""
    tokenizer = model.needed_tokenizer("Give the text as token ids with --ids and --mask-id.")
    return [tokenizer.cls, *tokenizer.encode_masked(text), tokenizer.sep], tokenizer.mask


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m inference.fill_mask", description=__doc__)
    add_model_arguments(parser)
    add = parser.add_argument
    add("--text", action="append", required=True, help="a text with [MASK] in it; may be given several times")
    add("--top-k", type=int, default=5, help="number of tokens to print for each [MASK] (5)")
    add("--ids", action="store_true", help="texts are token ids separated by spaces, special tokens included")
    add("--mask-id", type=int, help="the id of the mask token, with --ids")
    add("--json", action="store_true", help="print one JSON object per text")
    return parser


def _main(options: argparse.Namespace) -> None:
    if options.top_k < 1:
        raise ConfigError(f"--top-k ({options.top_k}) must be at least 1. Omit it to print 5 tokens.")
    if options.ids and options.mask_id is None:
        raise ConfigError("--ids needs the id of the mask token. Add --mask-id ID.")
    import torch.distributed as dist

    from inference.open_model import open_from

    with open_from(options) as model:
        read = [_read(model, text, options) for text in options.text]
        found = fill_masks(model, [tokens for tokens, _ in read], read[0][1], options.top_k)
        for text, guesses in zip(options.text, found, strict=True):
            if dist.get_rank() == 0:
                _show(model, text, guesses, options)
        if dist.get_rank() == 0 and (line := model.weights.progress()) is not None:
            print(line, file=sys.stderr, flush=True)


def _read(model: OpenModel, text: str, options: argparse.Namespace) -> tuple[list[int], int]:
    """Return the token ids of a text, given as words or (with --ids) as integers, and the id of the mask token."""
    if not options.ids:
        return masked_tokens(model, text)
    try:
        return [int(word) for word in text.split()], options.mask_id
    except ValueError as error:
        rule = "must be integers separated by spaces, because of --ids"
        raise ConfigError(f"--text {rule}: {error}. Give token ids, or omit --ids.") from error


def _show(model: OpenModel, text: str, guesses: list[list[Guess]], options: argparse.Namespace) -> None:
    def word(token: int) -> str:
        return str(token) if options.ids else model.needed_tokenizer("").decode([token])

    if options.json:
        found = [
            [{"text": word(g.token), "token": g.token, "probability": g.probability} for g in at_position]
            for at_position in guesses
        ]
        print(json.dumps({"text": text, "places": found}), flush=True)
        return
    print(text)
    for number, at_position in enumerate(guesses, start=1):
        print(
            f"  {number}: " + ", ".join(f"{word(guess.token)!r} {guess.probability:.3f}" for guess in at_position),
            flush=True,
        )


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    return run_command(_main, _arguments(), arguments)


if __name__ == "__main__":
    sys.exit(main())
