"""Megatron-core 0.16.1's top-k router with three private methods fixed. Its replay hook selects the experts."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe import router
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.transformer_config import TransformerConfig

from parallel.megatron import require_version

require_version()

# (scores [T, E], top_k, num_groups, group_top_k, Megatron's function) -> (chosen scores [T, k], their experts [T, k])
Choose = Callable[[torch.Tensor, int, int | None, int | None, Callable[..., Any]], tuple[torch.Tensor, torch.Tensor]]

# (layer from 0, scores [T, E], routing map [T, E]) -> the loss of these tokens, without its coefficient.
Balance = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, eq=False)
class RouterRows:
    """The tokens of this rank's routers, if context parallelism shards a micro-batch's tokens in any order."""

    ids: torch.Tensor  # int64 [T] on the device, in the order of the hidden states: sample * length + position
    num_samples: int  # of the micro-batch, over all ranks
    length: int  # tokens of a sample

    @functools.cached_property
    def members(self) -> torch.Tensor:
        """Mask of the tokens of each sample, fp32 `[num_samples, T]` of 0 and 1."""
        numbers = torch.arange(self.num_samples, device=self.ids.device)
        return ((self.ids // self.length)[None] == numbers[:, None]).float()

    @functools.cached_property
    def global_order(self) -> torch.Tensor:
        """The index that each token would have in a single process, int64 `[T]`: by position, then by sample."""
        samples = self.ids // self.length
        return (self.ids - samples * self.length) * self.num_samples + samples


class TopKRouter(router.TopKRouter):
    """Megatron-core's router, but `choose` selects the experts, and no token is dropped."""

    token_rows: RouterRows | None = None  # of the next call, if context parallelism shards by tokens
    global_balance: Balance | None = None  # computes the `global_aux_loss`, once it is set

    # Without this, each rank's first step takes a second longer: Megatron compiles this function even without a bias.
    _apply_expert_bias = inspect.unwrap(router.TopKRouter._apply_expert_bias)

    def __init__(
        self, choose: Choose, config: TransformerConfig, pg_collection: ProcessGroupCollection | None = None
    ) -> None:
        # Without this, Megatron drops tokens before it counts them, so that biases depend on the kept ones; and it
        # drops by this rank's tokens alone, and arbitrarily among equal scores.
        config = copy.copy(config)
        config.moe_expert_capacity_factor = None
        super().__init__(config, pg_collection)
        # Without this, torch.topk chooses, which is far slower on a CPU than a kernel for few choices. Megatron has no
        # hook for it, but first asks a replayer of recorded choices, if there is one.
        if not config.moe_enable_routing_replay:
            self.router_replay: Any = SimpleNamespace(get_replay_topk=choose)
        # Without this, every step copies (for a rejected step) and clears two tensors per layer that nothing reads.
        self.global_tokens_per_expert = self.ga_steps = None
        if self.enable_expert_bias:
            # Without this, counts are fp32 numbers, which are exact only up to 2^24.
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
        token_rows, coefficient = self.token_rows, self.get_aux_loss_coeff("seq_aux_loss")
        if token_rows is None or coefficient == 0:
            return super()._apply_seq_aux_loss(
                probs, scores_for_aux_loss, routing_map, seq_length, bsz, with_padding_mask
            )
        # Without this, rows are interpreted as [s, b], so that the tokens of all samples would form one sequence.
        with torch.no_grad():
            counts_BE = token_rows.members @ routing_map.float()
            if self.tp_cp_group.size() > 1:
                dist.all_reduce(counts_BE, group=self.tp_cp_group)
        scores_BE = token_rows.members @ scores_for_aux_loss
        scale = routing_map.size(1) / (self.topk * token_rows.length**2 * token_rows.num_samples)
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
        # Without this, the loss of a micro-batch depends on the number of earlier ones, and waits for all ranks.
        coefficient = self.get_aux_loss_coeff("global_aux_loss")
        if coefficient == 0 or self.global_balance is None:
            return probs
        loss = self.global_balance(self.layer_number - 1, scores_for_aux_loss, routing_map)
        # The tokens of a micro-batch are divided evenly among the tensor and context ranks, whose gradients are summed.
        return MoEAuxLossAutoScaler.apply(probs, loss * (coefficient / self.tp_cp_group.size()))
