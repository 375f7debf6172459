"""The MoE layer: Megatron-core's router and shared expert around our dispatch, experts and schedule."""

from __future__ import annotations

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region, reduce_scatter_to_sequence_parallel_region
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.transformer_config import TransformerConfig

from moe import exchanges
from moe.clock import Clock
from moe.dispatch import AllToAll
from moe.plan import Plan
from moe.schedule import SharedExpert, routed_experts


class MixtrainMoELayer(MoELayer):
    """Routed experts (stacked, dropless, dispatched in chunks) plus an optional shared expert.

    In Megatron's place: same router, losses and checkpoint names. `plan` and `exchange` say how each call runs; they may be
    changed between steps, on all ranks alike.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MoESubmodules | None = None,
        layer_number: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        plan: Plan | None = None,
        all_to_all: str = "flat",
    ) -> None:
        pg_collection = pg_collection or get_default_pg_collection()
        super().__init__(config, submodules, layer_number, pg_collection)
        self.plan, self.clock = plan or Plan(), Clock()
        self.token_dispatcher = None  # Megatron's is built by its constructor and does nothing here
        self.expert_tensor_group = pg_collection.expt_tp
        self.exchange: AllToAll | None = exchanges.shared(self.ep_group, all_to_all) if self.ep_group.size() > 1 else None
        dropless = config.moe_expert_capacity_factor is None
        self._pairs_per_token = config.moe_router_topk if dropless else None

    def forward(
        self, hidden_states: torch.Tensor, intermediate_tensors: object = None, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, None]:
        """hidden_states [s, b, H] (this rank's tokens) -> (output [s, b, H], no bias). Raises ValueError as Megatron's layer does."""
        if self.training and self.attn_tp_group.size() > 1 and not self.config.sequence_parallel:
            raise ValueError("an MoE layer with tensor parallelism trains only with sequence parallelism. Set parallel.sequence=true.")
        probs, routing_map, hidden_states = self.router(hidden_states, padding_mask, pass_input=True)
        x = hidden_states.reshape(-1, hidden_states.size(-1))
        shared_expert = self.shared_experts
        if self.expert_tensor_group.size() > 1:
            output = self._split_experts(x, probs, routing_map)
            output = output if shared_expert is None else output + shared_expert(x)
        else:
            output = self._routed(x, probs, routing_map, shared_expert)
        return output.view_as(hidden_states), None

    def _split_experts(self, x: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor) -> torch.Tensor:
        # Each expert tensor rank holds a part of every expert's width: it computes for the tokens of all these ranks, and
        # the parts are summed on the way back. All of them have the same number of tokens.
        group = self.expert_tensor_group
        x = gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=True, group=group)
        probs = gather_from_sequence_parallel_region(probs, tensor_parallel_output_grad=True, group=group)
        everywhere = routing_map.new_empty(group.size() * len(routing_map), routing_map.size(1))
        torch.distributed.all_gather_into_tensor(everywhere, routing_map.contiguous(), group=group)
        output = self._routed(x, probs, everywhere)
        return reduce_scatter_to_sequence_parallel_region(output, group=group)

    def _routed(
        self, x: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor, shared_expert: SharedExpert | None = None
    ) -> torch.Tensor:
        return routed_experts(
            x,
            probs,
            routing_map,
            self.experts(),
            self.plan,
            self.exchange,
            shared_expert,
            pairs_per_token=self._pairs_per_token,
            clock=self.clock,
        )
