"""A layer: attention, then a feed-forward block or experts. Made once from the weights, then called on [T, H]."""

from __future__ import annotations

import torch

from configs import derived
from configs.schema import Config
from inference.decoder.attention import Attention, DecoderLatentAttention
from inference.decoder.experts import DecoderExperts
from inference.decoder.linear import Apply, Group, Weights, feed_forward, norm
from inference.decoder.step import Step


class Layer:
    def __init__(self, layer: int, weights: Weights, config: Config, group: Group, expert_group: Group) -> None:
        prefix = f"decoder.layers.{layer}."
        of_layer = {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
        self.attention_norm = norm(of_layer, "input_layernorm", config)
        kind: type[Attention | DecoderLatentAttention] = (
            DecoderLatentAttention if config.model.attention == "latent" else Attention
        )
        self.attention = kind(layer, of_layer, config, group)
        self.feed_forward_norm = norm(of_layer, "pre_mlp_layernorm", config)
        self.feed_forward: Apply
        if derived.moe_layer_pattern(config)[layer]:
            self.feed_forward = DecoderExperts(of_layer, config, group, expert_group)
        else:
            self.feed_forward = feed_forward(of_layer, "mlp.", config, group)

    def __call__(self, hidden: torch.Tensor, step: Step) -> torch.Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden), step)
        return hidden + self.feed_forward(self.feed_forward_norm(hidden))
