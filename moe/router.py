"""Megatron-core's top-k router with less work on the host.

Under bf16 the router computes in fp32 (`moe_router_dtype`). Megatron-core converts the whole input to fp32 in the
forward pass and again in the backward pass, which takes longer than the matmul. Here the forward pass converts nothing
on a GPU or with the compiled kernels (the product of two bf16 numbers is exact in fp32), and otherwise one block of
rows at a time. The backward pass converts only the logits' gradient, to a sum of two bf16 numbers, which keeps 16 of
the 24 bits of fp32.

Shapes: T tokens, H hidden size, E experts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig

from configs import derived
from memory.pool import WORKSPACE
from moe import capacity, kernels
from parallel.megatron.router import TopKRouter

LOGIT_ROWS = 256  # 0.5 MiB of fp32 at hidden 512: stays in the second-level cache


class Router(TopKRouter):
    """Megatron-core's TopKRouter with faster logits and top-k, and an expert capacity over all ranks of a micro-batch.

    Losses, expert bias, expert groups and checkpoints are Megatron's. Losses and bias use the choice before any
    assignment is dropped.
    """

    _passed: torch.Tensor | None = None  # set only inside `forward`
    # called with layer, logits [..., E] and score function in training passes
    watch: Callable[[int, torch.Tensor, str], None] | None = None

    def __init__(
        self,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection | None = None,
        group_score_top_k: int | None = None,
    ) -> None:
        super().__init__(functools.partial(_choose, group_score_top_k), config, pg_collection)
        self._capacity_factor, self._drop_policy = config.moe_expert_capacity_factor, config.moe_token_drop_policy
        # The ranks that share a micro-batch's tokens. Without sequence parallelism each tensor rank holds all tokens.
        holders = self.tp_cp_group if config.sequence_parallel else self.cp_group
        self._holders = holders if holders.size() > 1 else None

    def forward(
        self, input: torch.Tensor, padding_mask: torch.Tensor | None = None, pass_input: bool = False
    ) -> tuple[torch.Tensor, ...]:
        """Return the probabilities and routing map [T, E] of tokens [..., H], without assignments beyond the capacity.

        With `pass_input` also return the tokens, for use as the experts' input. The experts' gradient then flows back
        through the router, which adds its own gradient in place; autograd would write the sum to a third tensor.
        """
        self._passed = input if pass_input else None
        try:
            probs, routing_map = super().forward(input, padding_mask)
            return (probs, routing_map) if self._passed is None else (probs, routing_map, self._passed)
        finally:
            self._passed = None

    def routing(self, logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Choose experts by the logits as Megatron does, call `watch`, and drop assignments over the capacity.

        Returns probabilities and routing map, both [T, E].
        """
        # Without gradients it is an evaluation, or the first of two passes under recompute.
        if self.watch is not None and torch.is_grad_enabled():
            with torch.no_grad():
                self.watch(self.layer_number - 1, logits, self.score_function)
        probs, chosen = super().routing(logits, *args, **kwargs)
        if self._capacity_factor is None:
            return probs, chosen
        tokens = len(chosen) * (1 if self._holders is None else self._holders.size())
        most = derived.expert_capacity(tokens, chosen.size(1), self.topk, self._capacity_factor)
        positions_T = None if self.token_rows is None else self.token_rows.global_order
        kept = capacity.keep(probs, chosen, most, self._drop_policy, self._holders, positions_T)
        return probs * kept, kept

    def gating(self, input: torch.Tensor) -> torch.Tensor:
        """Return the logits [..., E] of the tokens [..., H], in the router's precision."""
        same = input.dtype is self.weight.dtype and self.config.moe_router_dtype == "fp32"
        if self.bias is not None or not same or input.dtype not in (torch.float32, torch.bfloat16):
            return super().gating(input)
        logits, passed = _Gate.apply(input, self.weight)
        if input is self._passed:  # not a copy with jitter
            self._passed = passed
        return logits


def limit_to_groups(scores: torch.Tensor, num_groups: int, group_top_k: int, group_score_top_k: int) -> torch.Tensor:
    """Return scores [T, E] with -inf outside each token's `group_top_k` best groups of experts.

    A group's score is the sum of its `group_score_top_k` best scores (DeepSeek-V2, arXiv:2405.04434, section 2.2.2; V3,
    arXiv:2412.19437, section 2.1.2).
    """
    by_group = scores.view(len(scores), num_groups, -1)
    best = by_group.topk(group_score_top_k, dim=2).values.sum(dim=2).topk(group_top_k, dim=1).indices
    excluded = torch.ones_like(by_group[..., 0], dtype=torch.bool).scatter_(1, best, False)
    return by_group.masked_fill(excluded[..., None], float("-inf")).view_as(scores)


def _choose(
    group_score_top_k: int | None,
    scores: torch.Tensor,
    top_k: int,
    num_groups: int | None,
    group_top_k: int | None,
    otherwise: Callable[..., Any],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each token's `top_k` greatest scores and their experts, both [T, top_k], from scores [T, E].

    `otherwise` is Megatron's function; it makes the choices that the functions here do not support.
    """
    if group_score_top_k is not None and num_groups is not None and group_top_k is not None:
        # Megatron-core sums the top_k // group_top_k best scores of a group.
        indices = limit_to_groups(scores, num_groups, group_top_k, group_score_top_k).topk(top_k, dim=1).indices
        return scores.gather(1, indices), indices
    if group_top_k or not kernels.takes_top_k(scores, top_k):
        values, indices = otherwise(scores, top_k, num_groups=num_groups, group_topk=group_top_k)
        return values, indices
    indices = kernels.top_k(scores, top_k)
    return scores.gather(1, indices), indices


def _logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    if x.dtype is torch.float32:
        return torch.mm(x, weight.t())
    if x.device.type == "cuda":
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    if kernels.has_tiles(x, x.size(1), kernels.ALIGNMENT):
        return kernels.gate(x, weight)
    gate, logits = weight.float().t(), x.new_empty(len(x), len(weight), dtype=torch.float32)
    scratch = WORKSPACE.take((min(len(x), LOGIT_ROWS), x.size(1)), x, torch.float32)
    for block, out in zip(x.split(LOGIT_ROWS), logits.split(LOGIT_ROWS), strict=True):
        torch.mm(scratch[: len(block)].copy_(block), gate, out=out)
    WORKSPACE.give(scratch)
    return logits


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(hidden, weight)
        ctx.set_materialize_grads(False)
        logits = _logits(hidden.reshape(-1, hidden.size(-1)), weight)
        return logits.view(*hidden.shape[:-1], len(weight)), hidden.view_as(hidden)

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, logits_grad: torch.Tensor | None, passed_grad: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        hidden, weight = ctx.saved_tensors
        if logits_grad is None:
            return passed_grad, None
        x, grad, gate = hidden.reshape(-1, hidden.size(-1)), logits_grad.reshape(-1, len(weight)), weight
        if x.dtype is not torch.float32:
            high = grad.to(x.dtype)
            grad, gate = torch.cat([high, (grad - high).to(x.dtype)], dim=1), torch.cat([weight, weight])
        weight_grad = torch.mm(grad.t(), x).view(-1, *weight.shape).sum(dim=0)
        # The experts' gradient was computed only for this sum, so it may be overwritten.
        passed = None if passed_grad is None else passed_grad.reshape(-1, x.size(1))
        x_grad = torch.mm(grad, gate) if passed is None else torch.addmm(passed, grad, gate, out=passed)
        return x_grad.view_as(hidden), weight_grad
