"""The decoder: a stage after the other, from tokens to logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.distributed as dist
import torch.nn.functional as F

from configs.schema import Config, ConfigError
from inference.decoder.attention import DecoderRotary
from inference.decoder.layer import Layer
from inference.decoder.linear import gather, if_split, norm
from inference.decoder.step import Cache, Step
from models.attention.layers import window_mask
from models.weights import logical_tensors
from parallel.topology import Topology

SCORED_AT_ONCE = 1024  # tokens whose logits exist at the same time


@dataclass(frozen=True)
class _Stage:
    layers: Sequence[int]
    is_mine: bool
    comes_from: int | None  # rank in the pipeline group
    goes_to: int | None


class Decoder:
    """Runs the model chunks of this rank on token ids. It reads the chunks' own storage: later changes of the weights
    count.

    Raises ConfigError for a model that does not generate text. Under parallelism every method is a collective call,
    with the same arguments on all ranks; each returns the same on all ranks.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module], config: Config, topology: Topology, vocab_size: int) -> None:
        if config.model.family != "gpt":
            raise ConfigError(
                f"model.family ({config.model.family}) does not continue text: it fills in masked words. Try python -m "
                "inference.fill_mask."
            )
        weights = {item.name: item.local.detach() for item in logical_tensors(chunks)}
        self.vocab_size = vocab_size
        self.max_length = config.model.sequence_length if config.model.position_embedding == "learned" else None
        self.device = next(iter(weights.values())).device
        self._tensor_group = if_split(topology.tensor.group)
        self._pipeline_group = if_split(topology.pipeline.group)
        self._hidden_size, self._dtype = config.model.hidden_size, next(iter(weights.values())).dtype
        self._embedding = weights.get("embedding.word_embeddings.weight")
        self._position_embedding = weights.get("embedding.position_embeddings.weight")
        self._output = weights.get("output_layer.weight", self._embedding)
        if self._output is not None and self._tensor_group is None:
            self._output = self._output[:vocab_size]
        self._final_norm = (
            norm(weights, "decoder.final_layernorm", config) if "decoder.final_layernorm.weight" in weights else None
        )
        self._window = config.model.sliding_window
        self._rotary = DecoderRotary(config, self.device) if config.model.position_embedding == "rope" else None
        held = {int(name.split(".")[2]) for name in weights if name.startswith("decoder.layers.")}
        expert_group = if_split(topology.groups.tp_ep)  # the ranks that together hold all experts of a layer
        self._layers = {layer: Layer(layer, weights, config, self._tensor_group, expert_group) for layer in held}
        self._stages = self._find_stages(config.model.num_layers)

    def prefill(self, tokens: torch.Tensor, lengths: Sequence[int], cache: Cache | None) -> torch.Tensor:
        """Read the first tokens of each row, int64 `[b, s]`, of which row i has `lengths[i]` (what follows them is
        ignored), into an empty cache. Returns the logits after each row's last token, fp32 `[b, V]`."""
        hidden = self._run(tokens, self._first_step(tokens, cache, lengths))
        if cache is not None:
            cache.counts = list(lengths)
            if self._rotary is not None and self._rotary.switches_at is not None:
                cache.texts = [row[:length] for row, length in zip(tokens.tolist(), lengths, strict=True)]
        if hidden is not None:
            last = torch.tensor(lengths, device=self.device) - 1
            hidden = hidden.view(*tokens.shape, -1)[torch.arange(len(last), device=self.device), last]
        return self._logits(hidden, len(lengths))

    def decode(self, tokens: torch.Tensor, cache: Cache) -> torch.Tensor:
        """Add one token to each row, int64 `[b]`, and return the logits after it, fp32 `[b, V]`."""
        counts = cache.counts
        if cache.texts is not None:
            for text, token in zip(cache.texts, tokens.tolist(), strict=True):
                text.append(token)
        if self._rotary is not None and self._rotary.switches([count + 1 for count in counts]):
            return self._again(cache)
        longest, alike = max(counts), min(counts) == max(counts)
        positions = mask = None
        if not alike:
            positions = torch.tensor(counts, device=self.device)
            mask = (torch.arange(longest + 1, device=self.device) <= positions[:, None])[:, None, None]
        cos = sin = None
        if self._rotary is not None:
            where = slice(longest, longest + 1) if positions is None else positions[:, None]
            cos, sin = self._rotary.at(longest + 1, where, [count + 1 for count in counts])
        start = longest if alike else None
        step = Step(len(tokens), 1, cos, sin, cache, start, positions, longest + 1, mask, self._windowed(counts, mask))
        logits = self._logits(self._run(tokens[:, None], step), len(tokens))
        cache.counts = [count + 1 for count in counts]
        return logits

    def _again(self, cache: Cache) -> torch.Tensor:
        """Read all rows again, where one has become so long that all of its keys turn otherwise (as transformers does
        for Phi-3)."""
        assert cache.texts is not None
        lengths = [len(text) for text in cache.texts]
        rows = [text + [0] * (max(lengths) - len(text)) for text in cache.texts]
        return self.prefill(torch.tensor(rows), lengths, cache)

    def score(self, tokens: torch.Tensor, lengths: Sequence[int] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability of each token after the ones before it, and whether it is the likeliest: fp32 and bool `[b, s
        - 1]`. `lengths`: tokens of each row's text, without what fills the row up."""
        hidden = self._run(tokens, self._first_step(tokens, None, lengths or [tokens.size(1)] * len(tokens)))
        num_rows, length = tokens.shape
        if hidden is not None:
            hidden = hidden.view(num_rows, length, -1)[:, :-1].reshape(num_rows * (length - 1), -1)
        targets = tokens[:, 1:].reshape(-1).to(self.device)
        log_probs, greedy = [], []
        for begin in range(0, len(targets), SCORED_AT_ONCE):  # logits are the largest tensor by far
            part = targets[begin : begin + SCORED_AT_ONCE]
            logits = self._logits(None if hidden is None else hidden[begin : begin + SCORED_AT_ONCE], len(part))
            log_probs.append(-F.cross_entropy(logits, part, reduction="none"))
            greedy.append(logits.argmax(dim=1) == part)
        shape = (num_rows, length - 1)
        return torch.cat(log_probs).view(shape), torch.cat(greedy).view(shape)

    def _first_step(self, tokens: torch.Tensor, cache: Cache | None, lengths: Sequence[int]) -> Step:
        cos = sin = None
        if self._rotary is not None:
            cos, sin = self._rotary.at(tokens.size(1), slice(0, tokens.size(1)), lengths)
        beyond = self._window is not None and tokens.size(1) > self._window
        within = window_mask(tokens.size(1), self._window, self.device) if beyond and self._window else None
        return Step(tokens.size(0), tokens.size(1), cos, sin, cache, window_mask=within)

    def _windowed(self, counts: list[int], mask: torch.Tensor | None) -> torch.Tensor | None:
        """What a sliding window leaves of `mask` for one token a row behind `counts` others."""
        if self._window is None or max(counts) < self._window:
            return mask
        keys = torch.arange(max(counts) + 1, device=self.device)
        within = (keys > torch.tensor(counts, device=self.device)[:, None] - self._window)[:, None, None]
        return within if mask is None else mask & within

    def _run(self, tokens: torch.Tensor, step: Step) -> torch.Tensor | None:
        """The final hidden states [T, H], normalized, on the ranks of the last pipeline stage; None on the others."""
        hidden = self._embed(tokens.to(self.device), step) if self._stages[0].is_mine else None
        for stage in self._stages:
            if stage.is_mine:
                if hidden is None:
                    hidden = torch.empty(step.rows * step.new, self._hidden_size, dtype=self._dtype, device=self.device)
                    dist.recv(hidden, group=self._pipeline_group, group_src=stage.comes_from)
                assert hidden is not None
                for layer in stage.layers:
                    hidden = self._layers[layer](hidden, step)
                if stage.goes_to is not None:
                    dist.send(hidden, group=self._pipeline_group, group_dst=stage.goes_to)
                    hidden = None
        return None if hidden is None or self._final_norm is None else self._final_norm(hidden)

    def _embed(self, tokens: torch.Tensor, step: Step) -> torch.Tensor:
        weight = self._embedding
        assert weight is not None
        flat = tokens.reshape(-1)
        if self._tensor_group is None:
            hidden = F.embedding(flat, weight)
        else:
            local = flat - self._tensor_group.rank() * len(weight)
            elsewhere = (local < 0) | (local >= len(weight))
            hidden = F.embedding(local.masked_fill(elsewhere, 0), weight).masked_fill_(elsewhere[:, None], 0.0)
            dist.all_reduce(hidden, group=self._tensor_group)
        if self._position_embedding is not None:
            if step.is_prefill:
                positions = self._position_embedding[: step.new].repeat(step.rows, 1)
            else:
                positions = self._position_embedding[step.start if step.positions is None else step.positions]
            hidden = hidden + positions
        return hidden

    def _logits(self, hidden: torch.Tensor | None, num_tokens: int) -> torch.Tensor:
        if hidden is not None:
            assert self._output is not None
            logits = F.linear(hidden, self._output).float()
            logits = gather(logits, self._tensor_group)[:, : self.vocab_size].contiguous()
        else:
            logits = torch.empty(num_tokens, self.vocab_size, device=self.device)
        if self._pipeline_group is not None:
            dist.broadcast(logits, group=self._pipeline_group, group_src=self._pipeline_group.size() - 1)
        return logits

    def _find_stages(self, num_layers: int) -> list[_Stage]:
        """Runs of layers that one pipeline rank holds, in the order of the model; with virtual stages a rank has
        several."""
        if self._pipeline_group is None:
            return [_Stage(range(num_layers), True, None, None)]
        rank = self._pipeline_group.rank()
        held: list[list[int] | None] = [None] * self._pipeline_group.size()
        dist.all_gather_object(held, sorted(self._layers), group=self._pipeline_group)
        owner = {layer: i for i, layers in enumerate(held) for layer in layers or []}
        runs = [(who, list(layers)) for who, layers in groupby(range(num_layers), owner.__getitem__)]
        comes_from = [None, *(who for who, _ in runs[:-1])]
        goes_to = [*(who for who, _ in runs[1:]), None]
        return [
            _Stage(layers, who == rank, before, after)
            for (who, layers), before, after in zip(runs, comes_from, goes_to, strict=True)
        ]
