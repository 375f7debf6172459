"""Attention of the decoder over cached keys and values: grouped-query and latent attention, with rotary positions."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from configs import derived
from configs.rotary import attention_factor, scores_factor, switches_at
from configs.schema import Config
from inference.decoder.linear import Group, Weights, all_heads_norm, gather, norm, row_linear
from inference.decoder.step import Step
from memory.transfer import to_device
from models.norm import LATENT_NORM_EPSILON
from models.pointwise.rotary import HOST, angles, inverse_frequencies


class Attention:
    """Grouped-query attention over the key-value cache.

    The fused QKV weight has Megatron's layout: for each group of heads, the rows of r queries, one key and one value.
    """

    def __init__(self, layer: int, weights: Weights, config: Config, group: Group) -> None:
        self.layer, self.slides = layer, bool(derived.window_pattern(config)[layer])
        self.weight = weights["self_attention.linear_qkv.weight"]
        self.bias = weights.get("self_attention.linear_qkv.bias")
        self.d = derived.head_dim(config)
        self.r = config.model.num_attention_heads // derived.num_query_groups(config)
        self.g = self.weight.size(0) // ((self.r + 2) * self.d)
        self.project = row_linear(weights, "self_attention.linear_proj", group)
        self.query_norm = self.key_norm = None
        if config.model.qk_norm:
            make = norm if config.model.qk_norm_over == "head" else functools.partial(all_heads_norm, group)
            self.query_norm = make(weights, "self_attention.q_layernorm", config)
            self.key_norm = make(weights, "self_attention.k_layernorm", config)

    def __call__(self, hidden: torch.Tensor, step: Step) -> torch.Tensor:
        r = self.r
        qkv = F.linear(hidden, self.weight, self.bias).view(step.batch_size, step.new, self.g, r + 2, self.d)
        if self.query_norm is not None and self.key_norm is not None:
            query_key = torch.cat([self.query_norm(qkv[..., :r, :]), self.key_norm(qkv[..., r : r + 1, :])], dim=-2)
        else:
            query_key = qkv[..., : r + 1, :]
        if step.cos is not None:
            query_key = _rotate(query_key, step.cos, step.sin)
        query, new_key, new_value = query_key[..., :r, :], query_key[..., r, :], qkv[..., r + 1, :]
        key, value = step.remember(self.layer, new_key.transpose(1, 2), new_value.transpose(1, 2))
        mask = step.window_mask if self.slides else step.mask
        if step.is_prefill:
            query, causal = query.flatten(2, 3).transpose(1, 2), step.is_causal and mask is None
            output = F.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, is_causal=causal, enable_gqa=r > 1
            )
            output = output.transpose(1, 2)
        else:
            # The r queries of a group read the same keys: the kernel takes them as r tokens of one head.
            output = F.scaled_dot_product_attention(query.squeeze(1), key, value, attn_mask=mask)
        return self.project(output.reshape(len(hidden), -1))


class DecoderLatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434). The cache stores full keys and values."""

    def __init__(self, layer: int, weights: Weights, config: Config, group: Group) -> None:
        of_attention = {name.removeprefix("self_attention."): tensor for name, tensor in weights.items()}
        model = config.model
        self.layer, self.group, self.slides = layer, group, bool(derived.window_pattern(config)[layer])
        self.plain, self.rotary, self.value = derived.head_dim(config), model.rotary_head_dim, model.value_head_dim
        self.kv_rank = model.kv_lora_rank
        self.query_down = of_attention.get("linear_q_down_proj.weight")
        self.query_up = of_attention["linear_q_proj.weight" if self.query_down is None else "linear_q_up_proj.weight"]
        self.key_value_down = of_attention["linear_kv_down_proj.weight"]
        self.key_value_up = of_attention["linear_kv_up_proj.weight"]
        if self.query_down is not None:
            self.query_norm = norm(of_attention, "q_layernorm", config, LATENT_NORM_EPSILON)
        self.key_value_norm = norm(of_attention, "kv_layernorm", config, LATENT_NORM_EPSILON)
        self.project = row_linear(of_attention, "linear_proj", group)
        self.scale = scores_factor(model.rotary_scaling) / math.sqrt(self.plain + self.rotary)

    def __call__(self, hidden: torch.Tensor, step: Step) -> torch.Tensor:
        query_input = hidden
        if self.query_down is not None:
            query_input = self.query_norm(gather(F.linear(hidden, self.query_down), self.group))
        shape = (step.batch_size, step.new)
        query = F.linear(query_input, self.query_up).view(*shape, -1, self.plain + self.rotary)
        down = gather(F.linear(hidden, self.key_value_down), self.group)
        compressed, rotary_key = down.split([self.kv_rank, self.rotary], dim=1)
        key_value = F.linear(self.key_value_norm(compressed), self.key_value_up)
        key_value = key_value.view(*shape, -1, self.plain + self.value)
        plain_query, rotary_query = query.split([self.plain, self.rotary], dim=-1)
        plain_key, value = key_value.split([self.plain, self.value], dim=-1)
        # The key that all heads share is rotated as one more head of the queries.
        turned = torch.cat([rotary_query, rotary_key.view(*shape, 1, self.rotary)], dim=2)
        # DeepSeek stores the channels of a rotated pair side by side; `_rotate` needs them half the channels apart.
        turned = torch.cat([turned[..., 0::2], turned[..., 1::2]], dim=-1)
        turned = _rotate(turned[..., None, :], step.cos, step.sin).squeeze(3)
        query = torch.cat([plain_query, turned[:, :, :-1]], dim=-1).transpose(1, 2)
        key = torch.cat([plain_key, turned[:, :, -1:].expand_as(rotary_query)], dim=-1).transpose(1, 2)
        key, value = step.remember(self.layer, key, value.transpose(1, 2))
        mask = step.window_mask if self.slides else step.mask
        causal = step.is_prefill and step.is_causal and mask is None
        output = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal, scale=self.scale)
        return self.project(output.transpose(1, 2).reshape(len(hidden), -1))


class DecoderRotary:
    """Cosines and sines of rotary positions (Su et al. 2021), computed once up to the longest text so far.

    longrope has two sets of frequencies. The length of a text selects the set that rotates all of its tokens.
    """

    def __init__(self, config: Config, device: torch.device) -> None:
        self.switches_at = switches_at(config.model.rotary_scaling)  # tokens
        sets = [False] if self.switches_at is None else [False, True]
        self.frequencies = [inverse_frequencies(config, HOST, is_long, torch.float64) for is_long in sets]
        self.factor = attention_factor(config.model.rotary_scaling)
        self.cos = self.sin = torch.empty(len(sets), 0, device=device)

    def switches(self, lengths: Sequence[int]) -> bool:
        """Return whether the newest token of a text changes its rotary frequencies. lengths: tokens per text."""
        return self.switches_at is not None and self.switches_at + 1 in lengths

    def at(
        self, length: int, positions: slice | torch.Tensor, lengths: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return fp32 cosines and signed sines of positions: `[s, 1, 1, d]`, or `[b, s, 1, 1, d]` if the texts differ.

        positions: a slice for all texts or int64 `[b, 1]`, all below `length`. lengths: tokens per text, which select
        the frequencies.
        """
        if self.cos.size(1) < length:
            turned = to_device(torch.stack([angles(2 * length, each) for each in self.frequencies]), self.cos.device)
            cos, sin = turned.cos() * self.factor, turned.sin() * self.factor
            self.cos = torch.cat([cos, cos], dim=2)[:, :, None, None]
            # The sign of rotate_half([a, b]) = [-b, a], so that the halves need only be swapped.
            self.sin = torch.cat([-sin, sin], dim=2)[:, :, None, None]
        is_long = [self.switches_at is not None and tokens > self.switches_at for tokens in lengths]
        if all(is_long) or not any(is_long):
            return self.cos[int(is_long[0]), positions], self.sin[int(is_long[0]), positions]
        which = to_device(torch.tensor(is_long).long(), self.cos.device)
        if isinstance(positions, slice):
            return self.cos[which, positions], self.sin[which, positions]
        return self.cos[which[:, None], positions], self.sin[which[:, None], positions]


def _rotate(x: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None) -> torch.Tensor:
    """Rotate the first channels of `x` [..., d], as many as `cos` and `sin` have, and keep the other channels."""
    assert cos is not None and sin is not None
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    size = cos.size(-1)
    if size < x.size(-1):
        return torch.cat([_rotate(x[..., :size], cos, sin), x[..., size:]], dim=-1)
    return torch.addcmul(x * cos, x.roll(size // 2, dims=-1), sin)
