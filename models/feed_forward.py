"""Dense feed-forward layers: Megatron-core's MLP with a SwiGLU that is one function each way."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.mlp import MLP

from models.pointwise.swiglu import swiglu


class FeedForward(MLP):
    """Megatron-core's MLP; what Megatron does not do in one kernel of a SwiGLU's activation is done here in one."""

    def forward(
        self, hidden_states: torch.Tensor, per_token_scale: torch.Tensor | None = None, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`[s, b, h]` -> `[s, b, h]` without the bias, and the bias if there is one."""
        settings = self.config
        if not settings.gated_linear_unit or settings.bias_activation_fusion or per_token_scale is not None:
            return super().forward(hidden_states, per_token_scale, **kwargs)
        preactivation, bias = self.linear_fc1(hidden_states)
        return self.linear_fc2(swiglu(preactivation if bias is None else preactivation + bias))
