"""Dense feed-forward layers: Megatron-core's MLP with a SwiGLU that is one function each way, and for long sequences
one tile of rows after the other."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.mlp import MLP
from torch.autograd.function import once_differentiable

from models.pointwise.swiglu import swiglu
from parallel.megatron.grad_buffers import GradientSum, adds_by_itself

Output = tuple[torch.Tensor, torch.Tensor | None]


class FeedForward(MLP):
    """Megatron-core's MLP; what Megatron does not do in one kernel of a SwiGLU's activation is done here in one.

    `tile`: rows that are computed at once, where a layer is computed again in the backward pass; None: all.
    """

    tile: int | None = None

    def forward(
        self, hidden_states: torch.Tensor, per_token_scale: torch.Tensor | None = None, **kwargs: Any
    ) -> Output:
        """`[s, b, h]` -> `[s, b, h]` without the bias, and the bias if there is one."""
        rows = hidden_states.size(0) * hidden_states.size(1)
        if self.tile is None or rows <= self.tile or per_token_scale is not None:
            return self._whole(hidden_states, per_token_scale, **kwargs)
        bias = self.linear_fc2.bias  # whoever adds the residual adds it
        parameters = [each for each in self.parameters() if each.requires_grad and each is not bias]
        flat = hidden_states.flatten(0, 1).unsqueeze(1)
        output: torch.Tensor = _Tiled.apply(flat, self, self.tile, *parameters)
        return output.view_as(hidden_states), bias

    def _whole(self, hidden_states: torch.Tensor, per_token_scale: torch.Tensor | None = None, **kwargs: Any) -> Output:
        settings = self.config
        if not settings.gated_linear_unit or settings.bias_activation_fusion or per_token_scale is not None:
            return super().forward(hidden_states, per_token_scale, **kwargs)
        preactivation, bias = self.linear_fc1(hidden_states)
        return self.linear_fc2(swiglu(preactivation if bias is None else preactivation + bias))


def tile_feed_forward(chunk: torch.nn.Module, tile: int) -> None:
    """Have a chunk's dense layers compute so many of this rank's rows at once. TransformerEngine's products, which add
    their gradients by themselves, stay whole."""
    for module in chunk.modules():
        if isinstance(module, FeedForward) and not any(adds_by_itself(part) for part in module.modules()):
            module.tile = tile


class _Tiled(torch.autograd.Function):
    """Rows `[t, 1, h]` through a layer tile by tile, each computed again for its gradients. Those of weights are added
    up in fp32, in their buffers where there are some."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, layer: FeedForward, tile: int, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows, *parameters)
        ctx.layer, ctx.tile = layer, tile
        output = torch.empty_like(rows)
        for part, of_part in zip(rows.detach().split(tile), output.split(tile)):
            of_part.copy_(layer._whole(part)[0])
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        rows, *parameters = ctx.saved_tensors
        rows_grad, sums = torch.empty_like(rows), [GradientSum(each) for each in parameters]
        for part, of_part, found in zip(*(each.split(ctx.tile) for each in (rows, grad, rows_grad))):
            found.copy_(_add_gradients(ctx.layer, part, of_part, sums, parameters))
        return rows_grad, None, None, *(each.for_autograd() for each in sums)


def _add_gradients(
    layer: FeedForward,
    rows: torch.Tensor,
    grad: torch.Tensor,
    sums: list[GradientSum],
    parameters: list[torch.Tensor],
) -> torch.Tensor:
    """Add a tile's gradients of the weights; that of its rows. Nothing of them is left beside the next tile's."""
    rows = rows.detach().requires_grad_()
    with torch.enable_grad():
        output, _ = layer._whole(rows)
    of_rows, *of_parameters = torch.autograd.grad(output, [rows, *parameters], grad)
    for each, of_parameter in zip(sums, of_parameters):
        each.add(of_parameter)
    return of_rows
