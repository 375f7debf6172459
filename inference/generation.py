"""Text generation with a model: greedy or sampled, in batches, in any layout."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from base.errors import ConfigError
from inference.decoder import Cache, Decoder, TextBatch
from memory.transfer import to_device


@dataclass(frozen=True)
class Sampling:
    """Settings for choosing the next token. Temperature 0 is greedy; `top_k` 0 and `top_p` 1 exclude no token."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 1234


@dataclass(frozen=True)
class Continuation:
    """The tokens generated after a prompt, without the end token. `end`: the chosen end token, if any. `stopped`:
    whether generation ended before the limit on tokens."""

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
    """Continue each prompt (at least one token id) until a token of `stop`, until `is_done` returns True for the new
    tokens, or for `max_tokens` tokens. A collective call.

    Each prompt has its own random generator, so its continuation does not depend on its batch. Raises ConfigError for a
    prompt without tokens, a token outside the vocabulary, or a text longer than learned positions allow.
    """
    generation = _Generation(decoder, max_tokens, sampling, frozenset(stop), is_done, use_cache)
    completions: dict[int, Continuation] = {}
    for batches in shared_passes(decoder, prompts, max_tokens, batch_size, use_cache):
        found = generation.run([_PromptBatch([list(prompts[i]) for i in indices], indices) for indices in batches])
        for indices, of_batch in zip(batches, found, strict=True):
            completions.update(zip(indices, of_batch, strict=True))
    return [completions[i] for i in range(len(prompts))]


def shared_passes(
    decoder: Decoder, prompts: Sequence[Sequence[int]], max_tokens: int, batch_size: int, use_cache: bool = True
) -> list[list[list[int]]]:
    """Group prompts into batches and shared forward passes, and reserve memory; return prompt indices by pass and
    batch.

    Each pass has one batch if the weights stay in memory. Raises ConfigError as `generate` does, and if the memory
    budget is too small.
    """
    _check(decoder, prompts, max_tokens)
    if not prompts:
        return []
    # texts of a batch are padded to the longest
    by_length = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    batches = [by_length[begin : begin + batch_size] for begin in range(0, len(by_length), batch_size)]
    longest = len(prompts[by_length[-1]])
    whole = longest + max_tokens
    prompt, cached = (longest, whole) if use_cache else (whole, 0)
    size = decoder.batches_at_once(len(batches[0]), prompt, cached, True, len(batches))
    return [batches[begin : begin + size] for begin in range(0, len(batches), size)]


def answer_limit(prompt_tokens: int, max_tokens: int, length: int) -> int:
    """Return how many tokens may be generated: at most `max_tokens`, and together with the prompt at most `length`."""
    return max(0, min(max_tokens, length - prompt_tokens))


class _PromptBatch:
    """A batch of prompts during generation: the texts so far, and which texts have ended."""

    def __init__(self, prompts: list[list[int]], numbers: list[int]) -> None:
        self.prompts, self.numbers = prompts, numbers  # token ids; indices of the prompts
        self.cache: Cache | None = None
        self.generators: list[torch.Generator] = []
        self.texts = [list(prompt) for prompt in prompts]
        self.ended = [False] * len(prompts)
        self.ends: list[int | None] = [None] * len(prompts)

    def so_far(self) -> TextBatch:
        """Return the prompts with all tokens generated so far, as a padded batch."""
        return TextBatch.of(self.texts, self.cache, self.numbers)

    def result(self) -> list[Continuation]:
        """Return the continuation of each prompt."""
        texts = zip(self.texts, self.prompts, self.ended, self.ends, strict=True)
        return [Continuation(text[len(prompt) :], is_ended, end) for text, prompt, is_ended, end in texts]


@dataclass(frozen=True)
class _Generation:
    """The settings of one call of `generate`, and the loop that adds one token per text and forward pass."""

    decoder: Decoder
    max_tokens: int
    sampling: Sampling
    stop: frozenset[int]
    is_done: Callable[[list[int]], bool] | None
    use_cache: bool

    def run(self, batches: list[_PromptBatch]) -> list[list[Continuation]]:
        """Return the continuations of each batch. A text's end and random draws do not depend on other texts."""
        for batch in batches:
            if self.use_cache:
                batch.cache = Cache(max(map(len, batch.prompts)) + self.max_tokens)
            batch.generators = [torch.Generator().manual_seed(self.sampling.seed) for _ in batch.prompts]
        active = list(batches)
        logits = self.decoder.prefill_all([batch.so_far() for batch in active])
        for count in range(1, self.max_tokens + 1):
            drawn = [_choose(each, self.sampling, batch.generators) for batch, each in zip(active, logits, strict=True)]
            chosen = []
            for batch, found in zip(active, drawn, strict=True):
                tokens = found.cpu()
                self._add(batch, tokens.tolist())
                if all(batch.ended):
                    batch.cache = None
                else:
                    chosen.append((batch, tokens))
            active = [batch for batch, _ in chosen]
            if not active or count == self.max_tokens:
                break
            if self.use_cache:
                caches = [(tokens, batch.cache) for batch, tokens in chosen if batch.cache is not None]
                logits = self.decoder.decode_all(caches)
            else:
                logits = self.decoder.prefill_all([batch.so_far() for batch in active])
        return [batch.result() for batch in batches]

    def _add(self, batch: _PromptBatch, tokens: list[int]) -> None:
        for i, token in enumerate(tokens):
            if not batch.ended[i] and token in self.stop:
                batch.ended[i], batch.ends[i] = True, token
            if not batch.ended[i]:
                text = batch.texts[i]
                text.append(token)
                batch.ended[i] = self.is_done is not None and self.is_done(text[len(batch.prompts[i]) :])


def _choose(logits: torch.Tensor, sampling: Sampling, generators: list[torch.Generator]) -> torch.Tensor:
    """Return the next token for each row of logits [b, V], equal on all ranks, as a host or device tensor [b]."""
    if sampling.temperature == 0:
        tokens = logits.argmax(dim=1)
    else:
        drawn = [_sample(row, sampling, generator) for row, generator in zip(logits.cpu(), generators, strict=True)]
        tokens = torch.tensor(drawn)  # on the host
    if dist.get_world_size() > 1:
        tokens = to_device(tokens, logits.device)
        dist.broadcast(tokens, src=0)  # ranks that computed the same logits may differ in the last bit
    return tokens


def _sample(scores: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Sample a token from the `top_k` most likely tokens, restricted to the smallest set whose probabilities reach
    `top_p` (nucleus sampling, Holtzman et al. 2020)."""
    probabilities, order = (scores / sampling.temperature).softmax(dim=0).sort(descending=True, stable=True)
    if sampling.top_k > 0:
        probabilities = probabilities[: sampling.top_k] / probabilities[: sampling.top_k].sum()
    before = probabilities.cumsum(dim=0) - probabilities
    probabilities = torch.where(before < sampling.top_p, probabilities, 0.0)
    return int(order[torch.multinomial(probabilities, 1, generator=generator)])


def _check(decoder: Decoder, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
    for i, prompt in enumerate(prompts):
        if not prompt:
            raise ConfigError(f"prompt {i + 1} has no tokens; expected at least one. Omit it or add text to it.")
        wrong = [token for token in prompt if not 0 <= token < decoder.vocab_size]
        if wrong:
            raise ConfigError(
                f"prompt {i + 1} has the token id {wrong[0]}, but the model's token ids are 0 to "
                f"{decoder.vocab_size - 1}. Replace it."
            )
        left = None if decoder.max_length is None else decoder.max_length - len(prompt)
        if left is not None and max_tokens > left:
            shorter = f"Give a prompt of fewer than {decoder.max_length} tokens."
            advice = f"Try --max-tokens {left}." if left > 0 else shorter
            raise ConfigError(
                f"prompt {i + 1} ({len(prompt)} tokens) and --max-tokens ({max_tokens}) do not fit the model's "
                f"{decoder.max_length} learned positions. {advice}"
            )
