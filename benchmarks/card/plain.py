"""A Llama and its training step as in a plain script like nanoGPT: what people use without a framework.

Weights in fp32, products in bf16 by autocast, attention by torch's scaled_dot_product_attention, AdamW fused. Names are
those of transformers' LlamaForCausalLM, so weights of one load into the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class LlamaSizes:
    """The sizes of a Llama; `vocab_size` is that of the embedding, which is also the output layer."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    head_dim: int
    vocab_size: int
    rotary_base: float = 500_000.0
    norm_epsilon: float = 1e-5


class RMSNorm(nn.Module):
    """Root mean square in fp32."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, hidden_bsH: torch.Tensor) -> torch.Tensor:
        normal = hidden_bsH.float()
        normal = normal * torch.rsqrt(normal.square().mean(-1, keepdim=True) + self.epsilon)
        return self.weight * normal.to(hidden_bsH.dtype)


def rotary_tables(length: int, head_dim: int, base: float, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines [s, head_dim], the same for both halves of a head."""
    frequencies = base ** -(torch.arange(0, head_dim, 2, device=device).float() / head_dim)
    angles = torch.outer(torch.arange(length, device=device).float(), frequencies)
    both = torch.cat((angles, angles), dim=-1)
    return both.cos(), both.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply the rotary embedding to x [b, heads, s, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


class Attention(nn.Module):
    """Causal, with groups of queries."""

    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        self.heads, self.groups, self.head_dim = sizes.num_attention_heads, sizes.num_query_groups, sizes.head_dim
        self.q_proj = nn.Linear(sizes.hidden_size, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(sizes.hidden_size, self.groups * self.head_dim, bias=False)
        self.v_proj = nn.Linear(sizes.hidden_size, self.groups * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, sizes.hidden_size, bias=False)

    def forward(self, hidden_bsH: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        b, s, _ = hidden_bsH.shape
        q = self.q_proj(hidden_bsH).view(b, s, self.heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(hidden_bsH).view(b, s, self.groups, self.head_dim).transpose(1, 2)
        v = self.v_proj(hidden_bsH).view(b, s, self.groups, self.head_dim).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.groups != self.heads)
        return self.o_proj(attended.transpose(1, 2).reshape(b, s, -1))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(sizes.hidden_size, sizes.ffn_hidden_size, bias=False)
        self.up_proj = nn.Linear(sizes.hidden_size, sizes.ffn_hidden_size, bias=False)
        self.down_proj = nn.Linear(sizes.ffn_hidden_size, sizes.hidden_size, bias=False)

    def forward(self, hidden_bsH: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(hidden_bsH)) * self.up_proj(hidden_bsH))


class Block(nn.Module):
    """A decoder layer."""

    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(sizes), FeedForward(sizes)
        self.input_layernorm = RMSNorm(sizes.hidden_size, sizes.norm_epsilon)
        self.post_attention_layernorm = RMSNorm(sizes.hidden_size, sizes.norm_epsilon)

    def forward(self, hidden_bsH: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        hidden_bsH = hidden_bsH + self.self_attn(self.input_layernorm(hidden_bsH), cos, sin)
        return hidden_bsH + self.mlp(self.post_attention_layernorm(hidden_bsH))


class Body(nn.Module):
    """All layers but the output layer."""

    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.embed_tokens = nn.Embedding(sizes.vocab_size, sizes.hidden_size)
        self.layers = nn.ModuleList(Block(sizes) for _ in range(sizes.num_layers))
        self.norm = RMSNorm(sizes.hidden_size, sizes.norm_epsilon)

    def forward(self, tokens_bs: torch.Tensor) -> torch.Tensor:
        hidden = self.embed_tokens(tokens_bs)
        cos, sin = rotary_tables(tokens_bs.size(1), self.sizes.head_dim, self.sizes.rotary_base, tokens_bs.device)
        for layer in self.layers:
            hidden = layer(hidden, cos, sin)
        return self.norm(hidden)


class PlainLlama(nn.Module):
    """A Llama with a loss; the output layer is the embedding."""

    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        self.model = Body(sizes)
        self.lm_head = nn.Linear(sizes.hidden_size, sizes.vocab_size, bias=False)
        self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens_bs: torch.Tensor, labels_bs: torch.Tensor) -> torch.Tensor:
        """Return the mean loss, fp32 []; labels are the tokens that follow."""
        logits = self.lm_head(self.model(tokens_bs)).float()
        return F.cross_entropy(logits.flatten(0, 1), labels_bs.flatten())


def draw(model: nn.Module, std: float = 0.02) -> None:
    """Draw the weights in place; smaller ones for layers that write to the residual stream, as in GPT-2."""
    layers = sum(name.endswith("down_proj.weight") for name, _ in model.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                added = name.endswith(("o_proj.weight", "down_proj.weight"))
                parameter.normal_(std=std / math.sqrt(2 * layers) if added else std)


def training_step(
    model: nn.Module, loss_of: Callable[..., torch.Tensor], device: torch.device
) -> Callable[[dict[str, torch.Tensor]], float]:
    """Return a function that takes a step as such scripts do: autocast, clipping, fused AdamW."""
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": 0.1},
        {"params": others, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95), fused=True)

    def step(batch: dict[str, torch.Tensor]) -> float:
        tokens, labels = (batch[name].to(device, non_blocking=True) for name in ("tokens", "labels"))
        with torch.autocast(device.type, torch.bfloat16):
            loss = loss_of(tokens, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step
