"""A layer: attention, then a feed-forward block or experts, each with a residual sum. It goes through several batches
in turn, so that its weights come once for all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from configs import derived
from configs.schema import Config
from inference.decoder.attention import Attention, DecoderLatentAttention
from inference.decoder.experts import DecoderExperts
from inference.decoder.linear import Apply, Group, Weights, feed_forward, norm
from inference.decoder.step import Step
from inference.weights.parts import ATTENTION, FEED_FORWARD, layer_key
from inference.weights.source import WeightSource

# What a post-norm layer calls the norms behind its sums; a pre-norm layer has them before what is added.
NORMS = {"pre": ("input_layernorm", "pre_mlp_layernorm"), "post": ("pre_cross_attn_layernorm", "mlp_bda.norm")}


class Layer:
    def __init__(self, layer: int, source: WeightSource, config: Config, group: Group, expert_group: Group) -> None:
        self.layer, self.source, self.config, self.group = layer, source, config, group
        self.small = source.small_of(layer)
        self.is_pre_norm = config.model.norm_position == "pre"
        self.attention_norm, self.feed_forward_norm = (
            norm(self.small, name, config) for name in NORMS[config.model.norm_position]
        )
        self.experts: DecoderExperts | None = None
        if derived.moe_layer_pattern(config)[layer]:
            self.experts = DecoderExperts(layer, source, config, group, expert_group)
        self.next_moe: Layer | None = None  # the next layer of this rank with experts

    def __call__(self, hidden: Sequence[torch.Tensor], steps: Sequence[Step]) -> list[torch.Tensor]:
        """Hidden states [T, H] of each batch."""
        with self.source.use(layer_key(self.layer, ATTENTION), self._attention) as attend:
            middle = [
                self._sum(each, attend(self._before(self.attention_norm, each), step), self.attention_norm)
                for each, step in zip(hidden, steps, strict=True)
            ]
        inputs = [self._before(self.feed_forward_norm, each) for each in middle]
        if self.experts is not None:
            outputs = self.experts(inputs, steps, self._expected(middle, steps), self._expect)
        else:
            with self.source.use(layer_key(self.layer, FEED_FORWARD), self._feed_forward) as apply:
                outputs = [apply(each) for each in inputs]
        return [self._sum(each, output, self.feed_forward_norm) for each, output in zip(middle, outputs, strict=True)]

    def _before(self, normed: Apply, hidden: torch.Tensor) -> torch.Tensor:
        return normed(hidden) if self.is_pre_norm else hidden

    def _sum(self, hidden: torch.Tensor, output: torch.Tensor, normed: Apply) -> torch.Tensor:
        return hidden + output if self.is_pre_norm else normed(hidden + output)

    def _attention(self, weights: Weights) -> Attention | DecoderLatentAttention:
        kind = DecoderLatentAttention if self.config.model.attention == "latent" else Attention
        return kind(self.layer, {**self.small, **weights}, self.config, self.group)

    def _feed_forward(self, weights: Weights) -> Apply:
        return feed_forward({**self.small, **weights}, "mlp.", self.config, self.group)

    def _expected(self, middle: Sequence[torch.Tensor], steps: Sequence[Step]) -> list[torch.Tensor]:
        """The experts of each token that the next layer will probably want, by its router on what this one's experts
        have not changed yet; empty where nobody fetches them ahead."""
        after = self.next_moe
        if after is None or not self.source.streams_experts:
            return []
        assert after.experts is not None
        texts = [each if step.texts is None else each[step.texts] for each, step in zip(middle, steps, strict=True)]
        return [after.experts.route(after._before(after.feed_forward_norm, each))[1] for each in texts]

    def _expect(self, chosen: Sequence[int]) -> None:
        """Have the next layer's experts fetched ahead: one number for each token and choice."""
        assert self.next_moe is not None
        self.source.expect(self.next_moe.layer, [expert for expert, _ in Counter(chosen).most_common()])
