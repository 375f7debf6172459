"""Megatron-core 0.16.1's top-k router with two of its private methods mended and one of its back doors used."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe import router
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.transformer_config import TransformerConfig

from parallel.megatron import require_version

require_version()

# (scores [T, E], top_k, num_groups, group_top_k, Megatron's own way) -> (scores of the chosen [T, k], their numbers [T,
# k]).
Choose = Callable[[torch.Tensor, int, int | None, int | None, Callable[..., Any]], tuple[torch.Tensor, torch.Tensor]]

# (number of the layer from 0, scores [T, E], routing map [T, E]) -> the loss of these tokens, free of its coefficient.
Balance = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]


class TopKRouter(router.TopKRouter):
    """Megatron-core's router, whose experts `choose` picks and which drops nothing; everything else is Megatron's."""

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
