"""Attention over latents: keys and values are made of compressed ones, a round's rows at a time, and made again in the
backward pass. So ranks exchange compressed rows, and nobody keeps expanded ones.

Shapes: s sequence, n query heads, l channels of a latent, p rotary ones, d others of a key, v of a value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from models.attention.sliced import (
    AddedUp,
    HomeGradients,
    Merged,
    SlicePlan,
    add_gradients,
    keys_of_rounds,
)
from parallel.megatron.grad_buffers import GradientSum


@dataclass(frozen=True)
class LatentShape:
    """Channels: of a latent, and of a key without its rotary ones."""

    latent: int
    plain: int


def attend_latents(
    query: torch.Tensor, latents: torch.Tensor, weight: torch.Tensor, shape: LatentShape, plan: SlicePlan, scale: float
) -> torch.Tensor:
    """query `[s, 1, n, d + p]`, latents and turned rotary keys `[s, 1, 1, l + p]`, weight `[n * (d + v), l]` -> `[s, 1,
    n, v]`."""
    if plan.heads is None:
        return _SlicedLatents.apply(query, latents, weight, slice(None), shape, plan, scale)  # type: ignore[no-any-return]
    rows = len(weight) // plan.heads.size
    own = slice(plan.heads.rank * rows, (plan.heads.rank + 1) * rows)
    query, latents, _ = plan.heads.to_heads(query, latents, latents[..., :0])
    return plan.heads.to_rows(_SlicedLatents.apply(query, latents, weight, own, shape, plan, scale))


def _expanded(
    rows: torch.Tensor, weight: torch.Tensor, num_heads: int, shape: LatentShape
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys `[m, 1, n, d + p]` and values `[m, 1, n, v]` of rows `[m, 1, 1, l + p]`."""
    latent, rotary = rows.split([shape.latent, rows.size(-1) - shape.latent], dim=-1)
    both = torch.nn.functional.linear(latent.squeeze(2), weight).unflatten(-1, (num_heads, -1))
    key, value = both.split([shape.plain, both.size(-1) - shape.plain], dim=-1)
    return torch.cat([key, rotary.expand(-1, -1, num_heads, -1)], dim=-1), value


class _SlicedLatents(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        latents: torch.Tensor,
        weight: torch.Tensor,
        own: slice,
        shape: LatentShape,
        plan: SlicePlan,
        scale: float,
    ) -> torch.Tensor:
        heads, part_weight = query.size(2), weight[own]
        width = len(part_weight) // heads - shape.plain
        ctx.parts = plan.parts(query, width)
        merged, ctx.seeds = Merged(plan.queries, query, width), []
        ends, empty = not any(ctx.needs_input_grad), latents[..., :0]
        for i, (rows, _) in keys_of_rounds(plan, plan.order, latents, empty, ends):
            keys = _expanded(rows, part_weight, heads, shape) if ctx.parts[i] else (rows, rows)
            ctx.seeds.append(merged.add_all(ctx.parts[i], (query, *keys), scale))
        output, sums = merged.output.to(query.dtype), merged.sums
        ctx.save_for_backward(query, latents, weight, output, sums)
        ctx.own, ctx.shape, ctx.plan, ctx.scale = own, shape, plan, scale
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        query, latents, weight, output, sums = ctx.saved_tensors
        plan: SlicePlan = ctx.plan
        of_query, of_weight = AddedUp(query, plan.queries, in_order=not plan.is_spread), GradientSum(weight)
        home, part_weight = HomeGradients(), weight[ctx.own].detach().requires_grad_()
        no_values = latents[..., :0]
        for i, (rows, empty) in keys_of_rounds(plan, plan.backward_order, latents, no_values, ends=True):
            each = plan.rounds[i]
            rows = rows.detach().requires_grad_()
            with torch.enable_grad():
                keys = _expanded(rows, part_weight, query.size(2), ctx.shape)
            inputs = query, *(key.detach() for key in keys)
            found = [AddedUp(key, each.keys) for key in inputs[1:]]
            sides = of_query, *found
            add_gradients(ctx.parts[i], ctx.seeds[i], grad, inputs, (output, sums), ctx.scale, sides)
            of_keys = [side.grad.to(query.dtype) for side in found]
            rows_grad, weight_grad = torch.autograd.grad(keys, [rows, part_weight], of_keys)
            of_weight.add(weight_grad, ctx.own)
            if each.exchange is None and plan.is_spread:
                rows_grad, empty = rows_grad.float(), empty.float()
            home.send(each, rows_grad, empty, query.dtype)
        of_latents, _ = home.collect()
        return of_query.grad.to(query.dtype), of_latents.to(latents.dtype), of_weight.for_autograd(), *[None] * 4
