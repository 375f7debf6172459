"""The decoder: it continues texts, and computes the log-probabilities of given texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from base.errors import ConfigError
from configs.schema import Config
from inference.decoder.step import Cache, Step
from inference.decoder.transformer import Transformer, cache_bytes, pass_bytes
from inference.weights.source import SlotWeights, TensorWeights, WeightSource
from memory.transfer import to_device
from models.attention.layers import window_mask
from models.weights import logical_tensors
from moe.layer import layers_of
from parallel.topology import Topology


@dataclass(frozen=True)
class TextBatch:
    """A batch of texts for one forward pass: int64 tokens `[b, s]`, in row i the `lengths[i]` tokens of a text, then
    padding.

    cache: receives the keys and values. prompts: indices of the texts among all prompts, for recorded routing.
    """

    tokens: torch.Tensor
    lengths: Sequence[int]
    cache: Cache | None = None
    prompts: Sequence[int] = ()

    @classmethod
    def of(cls, texts: Sequence[list[int]], cache: Cache | None = None, prompts: Sequence[int] = ()) -> TextBatch:
        """Return a batch of these texts, padded to the longest text."""
        longest = max(map(len, texts))
        tokens = torch.tensor([text + [0] * (longest - len(text)) for text in texts])
        return cls(tokens, [len(text) for text in texts], cache, prompts)


class Decoder(Transformer):
    """A GPT that continues and scores texts. The constructor raises ConfigError for a different model family."""

    def __init__(self, source: WeightSource, config: Config, topology: Topology, vocab_size: int) -> None:
        if config.model.family != "gpt":
            raise ConfigError(
                f"model.family ({config.model.family}) must be gpt to continue or score text. Try python -m "
                "inference.fill_mask, which predicts masked words."
            )
        super().__init__(source, config, topology, vocab_size)
        self._window = config.model.sliding_window

    @classmethod
    def of_chunks(
        cls, chunks: Sequence[torch.nn.Module], config: Config, topology: Topology, vocab_size: int
    ) -> Decoder:
        """Return a decoder that uses the parameters of a model in training in place, with all later updates."""
        weights = {item.name: item.local.detach() for item in logical_tensors(chunks)}
        away = {number: layer for number, layer in layers_of(chunks).items() if layer.experts.off_device}
        layout = config, topology, vocab_size
        source = SlotWeights(weights, away, *layout) if away else TensorWeights(weights, *layout)
        return cls(source, *layout)

    def prefill_all(self, batches: Sequence[TextBatch]) -> list[torch.Tensor]:
        """Run one forward pass over batches of texts and fill their empty caches; return the logits after each text's
        last token, fp32 `[b, V]` per batch."""
        self._reserve_for(batches, generates=True)
        steps = [self._first_step(batch) for batch in batches]
        found = self._run([batch.tokens for batch in batches], steps)
        for batch in batches:
            if batch.cache is not None:
                batch.cache.counts, batch.cache.prompts = list(batch.lengths), batch.prompts
                if self._rotary is not None and self._rotary.switches_at is not None:
                    padded = zip(batch.tokens.tolist(), batch.lengths, strict=True)
                    batch.cache.texts = [text[:length] for text, length in padded]
        hidden = None if found is None else [self._last(each, batch) for each, batch in zip(found, batches)]
        logits = self._logits(hidden, [len(batch.lengths) for batch in batches])
        self.source.end_pass(sum(len(batch.lengths) for batch in batches))
        return logits

    def decode_all(self, batches: Sequence[tuple[torch.Tensor, Cache]]) -> list[torch.Tensor]:
        """Append one token, int64 `[b]`, to the texts of each cache in one forward pass; return the logits after the
        new tokens, fp32 `[b, V]` per cache."""
        again = list[bool]()
        for tokens, cache in batches:
            if cache.texts is not None:
                for text, token in zip(cache.texts, tokens.tolist(), strict=True):
                    text.append(token)
            rotary = self._rotary
            again.append(rotary is not None and rotary.switches([count + 1 for count in cache.counts]))
        if not any(again):
            return self._decode(batches)
        # Rare: a text has become so long that other frequencies rotate all of its keys, as in transformers for Phi-3.
        # The texts of its batch are read again.
        logits = []
        for (tokens, cache), is_again in zip(batches, again, strict=True):
            if is_again:
                assert cache.texts is not None
                logits.append(self.prefill_all([TextBatch.of(cache.texts, cache, cache.prompts)])[0])
            else:
                logits.append(self._decode([(tokens, cache)])[0])
        return logits

    def score_all(self, batches: Sequence[TextBatch]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return two tensors `[b, s - 1]` per batch for the tokens after the first: fp32 log-probabilities, and whether
        the token is the most likely one.

        All batches share one forward pass, which fetches each weight once. The last token is predicted but not read, so
        a text may be one token longer than the model's limit.
        """
        read = [
            replace(batch, tokens=batch.tokens[:, :-1], lengths=[max(1, length - 1) for length in batch.lengths])
            for batch in batches
        ]
        self._reserve_for(read, generates=False)
        found = self._run([batch.tokens for batch in read], [self._first_step(batch) for batch in read])
        targets = [to_device(batch.tokens[:, 1:].reshape(-1), self.device) for batch in batches]
        if found is not None:
            assert self._head is not None
            scores = self._head.scores(found, targets)
        else:
            scores = [
                (torch.empty(len(each), device=self.device), torch.empty_like(each, dtype=torch.bool))
                for each in targets
            ]
        self.source.end_pass(sum(batch.tokens.numel() for batch in read))
        shapes = [(len(batch.tokens), batch.tokens.size(1) - 1) for batch in batches]
        results = [
            (self._from_last(log_probs).view(shape), self._from_last(greedy).view(shape))
            for (log_probs, greedy), shape in zip(scores, shapes, strict=True)
        ]
        self.source.check_finite([log_probs for log_probs, _ in results])
        return results

    def batches_at_once(self, batch_size: int, prompt: int, length: int, generates: bool, most: int) -> int:
        """Return how many batches of `batch_size` texts share a forward pass, and reserve memory for them.

        The number is 1 if all weights stay in memory. Otherwise it is at most `most`, and caches and activations must
        fit into a quarter of the memory budget. prompt: tokens per text that are read at once. length: cached tokens
        per text, 0 without a cache. generates: whether only the last tokens' logits are needed. Raises ConfigError on
        all ranks if one rank's budget is too small for one batch. A collective call.
        """
        if not self.source.has_budget:
            return 1
        self._reserve_together(self._needed(batch_size, length, prompt, generates, 1))
        count, headroom = 1, self.source.batch_headroom
        while count < most and self._needed(batch_size, length, prompt, generates, count + 1) <= headroom:
            count += 1
        every = [(self.source.streams, count)] * dist.get_world_size()
        if len(every) > 1:
            dist.all_gather_object(every, every[0])
        if any(streams for streams, _ in every):
            count = min(of_rank for _, of_rank in every)
            self.source.reserve(self._needed(batch_size, length, prompt, generates, count))
            return count
        return 1

    def _reserve_for(self, batches: Sequence[TextBatch], generates: bool) -> None:
        """Reserve the memory of a forward pass over these batches, unless an earlier reservation is large enough."""
        batch_size = max(len(batch.lengths) for batch in batches)
        prompt = max(batch.tokens.size(1) for batch in batches)
        length = max(0 if batch.cache is None else batch.cache.length for batch in batches)
        self.source.reserve(self._needed(batch_size, length, prompt, generates, len(batches)))

    def _needed(self, batch_size: int, length: int, prompt: int, generates: bool, batches: int) -> int:
        """Return the bytes that a forward pass needs in addition to the weights: caches, activations and logits."""
        scored = batch_size * batches if generates else None
        kept = batches * cache_bytes(self.config, self.source, batch_size, length)
        return kept + pass_bytes(self.config, self.source, batch_size * prompt, batches, scored)

    def _decode(self, batches: Sequence[tuple[torch.Tensor, Cache]]) -> list[torch.Tensor]:
        steps = [self._next_step(len(tokens), cache) for tokens, cache in batches]
        hidden = self._run([tokens[:, None] for tokens, _ in batches], steps)
        logits = self._logits(hidden, [len(tokens) for tokens, _ in batches])
        for _, cache in batches:
            cache.counts = [count + 1 for count in cache.counts]
        self.source.end_pass(sum(len(tokens) for tokens, _ in batches))
        return logits

    def _last(self, hidden: torch.Tensor, batch: TextBatch) -> torch.Tensor:
        """Return the hidden state of the last token of each text, `[b, H]`."""
        last = to_device(torch.tensor(batch.lengths), self.device) - 1
        return hidden.view(*batch.tokens.shape, -1)[torch.arange(len(last), device=self.device), last]

    def _next_step(self, batch_size: int, cache: Cache) -> Step:
        counts = cache.counts
        longest, alike = max(counts), min(counts) == max(counts)
        positions = mask = None
        if not alike:
            positions = to_device(torch.tensor(counts), self.device)
            mask = (torch.arange(longest + 1, device=self.device) <= positions[:, None])[:, None, None]
        where = slice(longest, longest + 1) if positions is None else positions[:, None]
        cos, sin = self._angles(longest + 1, where, [count + 1 for count in counts])
        start = longest if alike else None
        tokens = zip(cache.prompts or range(batch_size), counts, strict=True)
        recorded = None if self.source.record is None else list(tokens)
        within = self._windowed(counts, positions, mask)
        return Step(
            batch_size, 1, cos, sin, cache, start, positions, longest + 1, mask, within, recorded_tokens=recorded
        )

    def _first_step(self, batch: TextBatch) -> Step:
        batch_size, length = batch.tokens.shape
        cos, sin = self._angles(length, slice(0, length), batch.lengths)
        within = window_mask(length, self._window, self.device) if self._window and length > self._window else None
        texts, recorded = None, None
        if min(batch.lengths) < length and self.config.moe.num_experts is not None:
            numbers = [text * length + at for text, count in enumerate(batch.lengths) for at in range(count)]
            texts = to_device(torch.tensor(numbers), self.device)
        if self.source.record is not None:
            prompts = batch.prompts or range(batch_size)
            recorded = [(prompt, at) for prompt, count in zip(prompts, batch.lengths) for at in range(count)]
        return Step(
            batch_size, length, cos, sin, batch.cache, window_mask=within, texts=texts, recorded_tokens=recorded
        )

    def _windowed(
        self, counts: list[int], positions: torch.Tensor | None, mask: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Return `mask` restricted to the sliding window that ends at each text's new token.

        Returns `mask` itself if there is no window, or no text is longer. counts: cached tokens of each text.
        positions: `counts` on the device, if the texts have different counts.
        """
        longest = max(counts)
        if self._window is None or longest < self._window:
            return mask
        keys = torch.arange(longest + 1, device=self.device)
        first = longest if positions is None else positions[:, None]
        within = (keys > first - self._window).view(-1, 1, 1, longest + 1)
        return within if mask is None else mask & within
