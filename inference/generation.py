"""Continues texts with a model: greedy or sampled, in batches, in any layout."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from configs.schema import ConfigError
from inference.decoder import Cache, Decoder


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen. Temperature 0 is greedy; `top_k` 0 and `top_p` 1 leave all tokens in."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 1234


@dataclass(frozen=True)
class Continuation:
    """The tokens that follow a prompt, without the end token (`end`, if one came); `stopped` tells whether the text
    ended before the limit."""

    tokens: list[int]
    stopped: bool
    end: int | None = None


@torch.inference_mode()
def generate(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    sampling: Sampling = Sampling(),
    *,
    stop: Collection[int] = (),
    is_done: Callable[[list[int]], bool] | None = None,
    batch_size: int = 8,
    use_cache: bool = True,
) -> list[Continuation]:
    """Continue each prompt (token ids, at least one) until a token of `stop`, or until `is_done` says so of the new
    tokens, or `max_tokens` tokens. A collective call.

    A prompt draws from a generator of its own, so its continuation does not depend on its batch. Raises ConfigError for
    a prompt without tokens, a token outside the vocabulary, or a text longer than learned positions allow.
    """
    _check(decoder, prompts, max_tokens)
    completions: dict[int, Continuation] = {}
    # rows of a batch are filled up to the longest
    by_length = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    for begin in range(0, len(by_length), batch_size):
        rows = by_length[begin : begin + batch_size]
        texts = [list(prompts[i]) for i in rows]
        found = _continue_batch(decoder, texts, max_tokens, sampling, frozenset(stop), is_done, use_cache)
        completions.update(zip(rows, found, strict=True))
    return [completions[i] for i in range(len(prompts))]


def room_for_answer(prompt_tokens: int, max_tokens: int, length: int) -> int:
    """How many of `max_tokens` new tokens a text of at most `length` tokens has room for after a prompt; 0 where the
    prompt alone fills it. A prompt is never cut: without its beginning it asks something else."""
    return max(0, min(max_tokens, length - prompt_tokens))


def _continue_batch(
    decoder: Decoder,
    prompts: list[list[int]],
    max_tokens: int,
    sampling: Sampling,
    stop: frozenset[int],
    is_done: Callable[[list[int]], bool] | None,
    use_cache: bool,
) -> list[Continuation]:
    cache = Cache(max(map(len, prompts)) + max_tokens) if use_cache else None
    generators = [torch.Generator().manual_seed(sampling.seed) for _ in prompts]
    texts, ended = [list(prompt) for prompt in prompts], [False] * len(prompts)
    ends: list[int | None] = [None] * len(prompts)
    logits = decoder.prefill(_padded(texts), [len(text) for text in texts], cache)
    for count in range(1, max_tokens + 1):
        tokens = _choose(logits, sampling, generators)
        chosen = tokens.tolist()
        for row, token in enumerate(chosen):
            if not ended[row] and token in stop:
                ended[row], ends[row] = True, token
            if not ended[row]:
                texts[row].append(token)
                ended[row] = is_done is not None and is_done(texts[row][len(prompts[row]) :])
        if all(ended) or count == max_tokens:
            break
        if cache is not None:
            logits = decoder.decode(tokens, cache)
        else:
            logits = decoder.prefill(_padded(texts), [len(text) for text in texts], None)
    rows = zip(texts, prompts, ended, ends, strict=True)
    return [Continuation(text[len(prompt) :], is_ended, end) for text, prompt, is_ended, end in rows]


def _padded(texts: list[list[int]]) -> torch.Tensor:
    """int64 [rows, longest]; what follows a text is never attended to."""
    longest = max(map(len, texts))
    return torch.tensor([text + [0] * (longest - len(text)) for text in texts])


def _choose(logits: torch.Tensor, sampling: Sampling, generators: list[torch.Generator]) -> torch.Tensor:
    """A token for each row of logits [rows, vocabulary], the same on every rank."""
    if sampling.temperature == 0:
        tokens = logits.argmax(dim=1)
    else:
        drawn = [_sample(row, sampling, generator) for row, generator in zip(logits.cpu(), generators, strict=True)]
        tokens = torch.tensor(drawn, device=logits.device)
    if dist.get_world_size() > 1:
        dist.broadcast(tokens, src=0)  # ranks that computed the same logits may differ in the last bit
    return tokens


def _sample(scores: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Draw from the `top_k` likeliest tokens, of those from the smallest set whose probabilities reach `top_p` (nucleus
    sampling, Holtzman et al. 2020)."""
    probabilities, order = (scores / sampling.temperature).softmax(dim=0).sort(descending=True, stable=True)
    if sampling.top_k > 0:
        probabilities = probabilities[: sampling.top_k] / probabilities[: sampling.top_k].sum()
    before = probabilities.cumsum(dim=0) - probabilities
    probabilities = torch.where(before < sampling.top_p, probabilities, 0.0)
    return int(order[torch.multinomial(probabilities, 1, generator=generator)])


def _check(decoder: Decoder, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
    for i, prompt in enumerate(prompts):
        if not prompt:
            raise ConfigError(f"prompt {i + 1} has no tokens: it must have at least one.")
        wrong = [token for token in prompt if not 0 <= token < decoder.vocab_size]
        if wrong:
            raise ConfigError(
                f"prompt {i + 1} has the token {wrong[0]}: the model's vocabulary ends at {decoder.vocab_size - 1}."
            )
        room = None if decoder.max_length is None else decoder.max_length - len(prompt)
        if room is not None and max_tokens > room:
            advice = (
                f"Try --max-tokens {room}." if room > 0 else f"Give a prompt of less than {decoder.max_length} tokens."
            )
            raise ConfigError(
                f"prompt {i + 1} ({len(prompt)} tokens) and --max-tokens ({max_tokens}) do not fit the model's "
                f"{decoder.max_length} learned positions. {advice}"
            )
