"""Dense feed-forward layers: Megatron-core's MLP with SwiGLU as one function, and tile by tile for long sequences."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.mlp import MLP
from torch.autograd.function import once_differentiable

from models.pointwise.swiglu import swiglu
from parallel.megatron.grad_buffers import GradientSum, adds_by_itself

Output = tuple[torch.Tensor, torch.Tensor | None]


class FeedForward(MLP):
    """Megatron-core's MLP with a fused SwiGLU for the cases in which Megatron-core does not fuse it. `tile`: number of
    rows that are computed at once if the layer is recomputed in the backward pass; None: all rows."""

    tile: int | None = None

    def forward(
        self, hidden_states: torch.Tensor, per_token_scale: torch.Tensor | None = None, **kwargs: Any
    ) -> Output:
        """Return the output `[s, b, h]` without its bias, and the bias or None. `hidden_states`: `[s, b, h]`."""
        num_rows = hidden_states.size(0) * hidden_states.size(1)
        if self.tile is None or num_rows <= self.tile or per_token_scale is not None:
            return self._whole(hidden_states, per_token_scale, **kwargs)
        bias = self.linear_fc2.bias  # added with the residual
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
    """Make a chunk's dense feed-forward layers compute `tile` rows at a time. Layers that add weight gradients to the
    gradient buffers themselves (TransformerEngine's) are not tiled."""
    for module in chunk.modules():
        if isinstance(module, FeedForward) and not any(adds_by_itself(inner) for inner in module.modules()):
            module.tile = tile  # Megatron builds the layer from its spec, and passes no tile


class _Tiled(torch.autograd.Function):
    """Autograd function that computes rows `[t, 1, h]` of a feed-forward layer tile by tile, and recomputes each tile
    in the backward pass. Weight gradients are summed in fp32, in their gradient buffers if there are any."""

    @staticmethod
    def forward(
        ctx: Any, token_rows: torch.Tensor, layer: FeedForward, tile: int, *parameters: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(token_rows, *parameters)
        ctx.layer, ctx.tile = layer, tile
        output = torch.empty_like(token_rows)
        for tile_rows, tile_output in zip(token_rows.detach().split(tile), output.split(tile)):
            tile_output.copy_(layer._whole(tile_rows)[0])
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        token_rows, *parameters = ctx.saved_tensors
        rows_grad, sums = torch.empty_like(token_rows), [GradientSum(each) for each in parameters]
        for tile_rows, tile_grad, tile_rows_grad in zip(
            *(each.split(ctx.tile) for each in (token_rows, grad, rows_grad))
        ):
            tile_rows_grad.copy_(_add_gradients(ctx.layer, tile_rows, tile_grad, sums, parameters))
        return rows_grad, None, None, *(each.for_autograd() for each in sums)


def _add_gradients(
    layer: FeedForward,
    token_rows: torch.Tensor,
    grad: torch.Tensor,
    sums: list[GradientSum],
    parameters: list[torch.Tensor],
) -> torch.Tensor:
    """Add one tile's weight gradients to `sums`, and return the gradient of the tile's rows. All intermediate tensors
    are freed before the next tile."""
    token_rows = token_rows.detach().requires_grad_()
    with torch.enable_grad():
        output, _ = layer._whole(token_rows)
    of_rows, *of_parameters = torch.autograd.grad(output, [token_rows, *parameters], grad)
    for each, of_parameter in zip(sums, of_parameters):
        each.add(of_parameter)
    return of_rows
