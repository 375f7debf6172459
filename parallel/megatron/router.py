"""Megatron-core 0.16.1's top-k router with three of its private methods mended and one of its back doors used."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe import router
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.transformer_config import TransformerConfig

from parallel.megatron import require_version
from parallel.megatron.router_rows import RouterRows

require_version()

# (scores [T, E], top_k, num_groups, group_top_k, Megatron's own way) -> (scores of the chosen [T, k], their numbers [T,
# k]).
Choose = Callable[[torch.Tensor, int, int | None, int | None, Callable[..., Any]], tuple[torch.Tensor, torch.Tensor]]

# (number of the layer from 0, scores [T, E], routing map [T, E]) -> the loss of these tokens, free of its coefficient.
Balance = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]


class TopKRouter(router.TopKRouter):
    """Megatron-core's router, whose experts `choose` picks and which drops nothing; everything else is Megatron's."""

    rows: RouterRows | None = None  # of the next call, where rows are dealt over ranks
    global_balance: Balance | None = None  # the `global_aux_loss`, once somebody has set it

    # Without this each rank's first step takes a second more: Megatron compiles this sum of a map, with a bias or
    # without one.
    _apply_expert_bias = inspect.unwrap(router.TopKRouter._apply_expert_bias)

    def __init__(
        self, choose: Choose, config: TransformerConfig, pg_collection: ProcessGroupCollection | None = None
    ) -> None:
        # Without this Megatron drops before it counts, so that biases follow what was kept; and it drops by the tokens
        # of this rank, and any of those that are equal.
        config = copy.copy(config)
        config.moe_expert_capacity_factor = None
        super().__init__(config, pg_collection)
        # Without this the choice is torch.topk, which a CPU takes far longer for than a kernel that knows how few are
        # wanted. Megatron has no hook for it, but asks a replayer of recorded choices first, where there is one.
        if not config.moe_enable_routing_replay:
            self.router_replay: Any = _InPlaceOfReplay(choose)
        # Without this every step copies (for a refusal) and clears two tensors a layer that nothing reads.
        self.global_tokens_per_expert = self.ga_steps = None
        if self.enable_expert_bias:
            # Without this counts are fp32 numbers, exact up to 2^24 alone.
            counts = torch.zeros_like(self.expert_bias, dtype=torch.int64)
            self.register_buffer("local_tokens_per_expert", counts, persistent=False)

    def _apply_seq_aux_loss(
        self,
        probs: torch.Tensor,
        scores_for_aux_loss: torch.Tensor,
        routing_map: torch.Tensor,
        seq_length: int,
        bsz: int,
        with_padding_mask: bool = False,
    ) -> torch.Tensor:
        rows, coefficient = self.rows, self.get_aux_loss_coeff("seq_aux_loss")
        if rows is None or coefficient == 0:
            return super()._apply_seq_aux_loss(
                probs, scores_for_aux_loss, routing_map, seq_length, bsz, with_padding_mask
            )
        # Without this rows are taken for [s, b]: those of all samples would make one sequence.
        with torch.no_grad():
            counts_BE = rows.members @ routing_map.float()
            if self.tp_cp_group.size() > 1:
                dist.all_reduce(counts_BE, group=self.tp_cp_group)
        scores_BE = rows.members @ scores_for_aux_loss
        scale = routing_map.size(1) / (self.topk * rows.length**2 * rows.num_samples)
        loss = torch.sum(scores_BE * counts_BE) * (coefficient * scale)
        return self.attach_and_log_load_balancing_loss(
            probs, coefficient, loss, "seq_load_balancing_loss", self.tp_cp_group, valid_token_count=len(routing_map)
        )

    def _apply_global_aux_loss(
        self,
        probs: torch.Tensor,
        scores_for_aux_loss: torch.Tensor,
        routing_map: torch.Tensor,
        with_padding_mask: bool = False,
    ) -> torch.Tensor:
        # Without this the loss of a micro-batch depends on how many came before it, and waits for all ranks.
        coefficient = self.get_aux_loss_coeff("global_aux_loss")
        if coefficient == 0 or self.global_balance is None:
            return probs
        loss = self.global_balance(self.layer_number - 1, scores_for_aux_loss, routing_map)
        # The tokens of a micro-batch lie evenly on the tensor and context ranks, whose gradients are summed.
        return MoEAuxLossAutoScaler.apply(probs, loss * (coefficient / self.tp_cp_group.size()))


class _InPlaceOfReplay:
    def __init__(self, choose: Choose) -> None:
        self._choose = choose

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        top_k: int,
        num_groups: int | None,
        group_top_k: int | None,
        otherwise: Callable[..., Any],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What Megatron calls."""
        return self._choose(scores, top_k, num_groups, group_top_k, otherwise)
