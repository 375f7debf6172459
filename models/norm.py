"""LayerNorm and RMSNorm in plain torch, for model specs.

Megatron-core's WrappedTorchNorm refuses sequence parallelism, because a norm's gradient there is a sum over the tensor
parallel ranks. All that this takes is the mark `sequence_parallel` on the parameter: finalize_model_grads then adds them up.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig


class LayerNorm(torch.nn.LayerNorm):
    """Layer normalization (Ba et al. 2016) over the last dimension, `[..., hidden_size] -> [..., hidden_size]`."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        mark_sequence_parallel(self, config)


class RMSNorm(torch.nn.RMSNorm):
    """Root mean square normalization (Zhang and Sennrich 2019) over the last dimension."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        mark_sequence_parallel(self, config)


def norm_class(config: TransformerConfig) -> type[torch.nn.Module]:
    """The norm that the model asks for."""
    return {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}[config.normalization]


def mark_sequence_parallel(module: torch.nn.Module, config: TransformerConfig) -> None:
    """Have the gradients of `module`'s parameters summed over tensor parallel ranks where each sees its own tokens."""
    for parameter in module.parameters(recurse=False):
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
