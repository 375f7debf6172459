"""Norms, linear layers that are split over the tensor ranks, and the dense feed-forward block of the decoder."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F

from configs.schema import Config

Group: TypeAlias = dist.ProcessGroup | None
Weights = dict[str, torch.Tensor]
Apply = Callable[[torch.Tensor], torch.Tensor]


def norm(weights: Weights, name: str, config: Config, epsilon: float | None = None) -> Apply:
    """Return a function that applies the LayerNorm or RMSNorm with the weights `name`."""
    weight, bias, epsilon = weights[f"{name}.weight"], weights.get(f"{name}.bias"), epsilon or config.model.norm_epsilon
    shape = weight.shape
    if config.model.normalization == "layernorm":
        return lambda x: F.layer_norm(x, shape, weight, bias, epsilon)
    return lambda x: F.rms_norm(x, shape, weight, epsilon)


def all_heads_norm(group: Group, weights: Weights, name: str, config: Config) -> Apply:
    """Return a function that applies RMSNorm over the heads of all tensor ranks together.

    It takes this rank's queries `[b, s, g, r, d]` or keys `[b, s, g, 1, d]`.
    """
    weight, epsilon = weights[f"{name}.weight"], config.model.norm_epsilon

    def apply(x: torch.Tensor) -> torch.Tensor:
        if group is None:
            return F.rms_norm(x.flatten(2), weight.shape, weight, epsilon).view(x.shape)
        squares = x.float().square().sum(dim=(2, 3, 4), keepdim=True)
        dist.all_reduce(squares, group=group)
        scaled = x.float() * torch.rsqrt(squares / len(weight) + epsilon)
        return scaled.to(x.dtype) * weight.chunk(group.size())[group.rank()].view(x.shape[2:])

    return apply


def gather(columns: torch.Tensor, group: Group) -> torch.Tensor:
    """All-gather the columns `[T, width / ranks]` of the tensor ranks into `[T, width]`."""
    if group is None:
        return columns
    of_ranks = [torch.empty_like(columns) for _ in range(group.size())]
    dist.all_gather(of_ranks, columns.contiguous(), group=group)
    return torch.cat(of_ranks, dim=1)


def row_linear(weights: Weights, name: str, group: Group) -> Apply:
    """Return a row-parallel linear layer, which all-reduces outputs over `group` and then adds the bias once."""
    weight, bias = weights[f"{name}.weight"], weights.get(f"{name}.bias")
    if group is None:
        return lambda x: F.linear(x, weight, bias)

    def apply(x: torch.Tensor) -> torch.Tensor:
        output = F.linear(x, weight)
        dist.all_reduce(output, group=group)
        return output if bias is None else output.add_(bias)

    return apply


def feed_forward(weights: Weights, prefix: str, config: Config, group: Group) -> Apply:
    weight, bias = weights[f"{prefix}linear_fc1.weight"], weights.get(f"{prefix}linear_fc1.bias")
    project = row_linear(weights, f"{prefix}linear_fc2", group)
    if config.model.activation == "swiglu":

        def apply(x: torch.Tensor) -> torch.Tensor:
            gate, up = F.linear(x, weight, bias).chunk(2, dim=1)
            return project(F.silu(gate).mul_(up))

        return apply
    approximate = "tanh" if config.model.activation == "gelu_tanh" else "none"
    return lambda x: project(F.gelu(F.linear(x, weight, bias), approximate=approximate))


def if_split(group: dist.ProcessGroup) -> Group:
    """Return `group`, or None if it has only one rank and needs no communication."""
    return group if group.size() > 1 else None
