"""LayerNorm and RMSNorm in plain torch, for model specs.

Megatron-core's WrappedTorchNorm rejects sequence parallelism, where the gradient of a norm must be summed over the
tensor ranks. Setting the attribute `sequence_parallel` on its parameters is enough: finalize_model_grads then sums
their gradients.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.nn.functional as dist_nn
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

from parallel.topology import Axis

LATENT_NORM_EPSILON = 1e-6


class LayerNorm(torch.nn.LayerNorm):
    """Layer normalization (Ba et al. 2016) over the last dimension, `[..., hidden_size] -> [..., hidden_size]`."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        mark_sequence_parallel(self, config)


class RMSNorm(torch.nn.RMSNorm):
    """Root mean square normalization (Zhang and Sennrich 2019) over the last dimension, `[..., hidden_size]`."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        mark_sequence_parallel(self, config)


class AllHeadsRMSNorm(torch.nn.Module):
    """RMSNorm over the channels of all heads together, `[s, b, heads of this rank, d]` (OLMoE, Muennighoff et al.
    2024).

    Every tensor rank stores the weight of all heads and uses the values for its own heads. Megatron-core sums the
    gradients over the ranks, as for any q_layernorm.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, *, num_heads: int, tensor: Axis, **_: Any
    ) -> None:
        super().__init__()
        self._tensor = tensor
        self.num_channels, self.eps = num_heads * hidden_size, eps
        self.weight = torch.nn.Parameter(torch.ones(self.num_channels, dtype=config.params_dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normalized heads, `[s, b, heads of this rank, d]`."""
        if self._tensor.size == 1:
            return F.rms_norm(x.flatten(-2), self.weight.shape, self.weight, self.eps).view_as(x)
        squares = x.float().square().sum(dim=(-2, -1), keepdim=True)
        squares = dist_nn.all_reduce(squares, group=self._tensor.group)  # its backward pass sums the ranks' gradients
        scaled = x.float() * torch.rsqrt(squares / self.num_channels + self.eps)
        return scaled.to(x.dtype) * self.weight.view(-1, x.size(-1)).chunk(self._tensor.size)[self._tensor.rank]


class LatentNorm(RMSNorm):
    """RMSNorm of latent attention's compressed queries, keys and values, with epsilon 1e-6 as in DeepSeek's code."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(config, hidden_size, eps=LATENT_NORM_EPSILON)


def norm_class(config: TransformerConfig) -> type[torch.nn.Module]:
    """Return the norm class that the model uses: LayerNorm or RMSNorm."""
    return {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}[config.normalization]


def mark_sequence_parallel(module: torch.nn.Module, config: TransformerConfig) -> None:
    """Mark a module's parameters, so that Megatron-core sums their gradients over the tensor ranks under sequence
    parallelism."""
    for parameter in module.parameters(recurse=False):
        # Megatron reads the mark from the parameter.
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
