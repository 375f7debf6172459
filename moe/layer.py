"""The MoE layer: Megatron-core's router and shared expert around our dispatch, experts and schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from moe import route
from moe.alltoall import factory
from moe.alltoall.flat import AllToAll
from moe.alltoall.hierarchical import ranks_per_node
from moe.chunk_plan import NOTHING_KEPT, STRATEGIES, Plan, pass_degrees
from moe.experts.compute import ExpertCompute
from moe.experts.module import StackedExperts
from moe.experts.weights import Slab, Weights
from moe.placement.copies import CallCopies
from moe.placement.live import LayerPlacement
from moe.placement.policy import Policy
from moe.placement.quotas import CopyLimits
from moe.placement_map import PlacementMap
from moe.route import Choice, Places
from moe.schedule import execute
from moe.schedule.on_one_rank import LocalCall
from moe.schedule.over_ranks import SharedExpert, SpreadCall
from moe.schedule.pass_sizes import exchange_sizes
from moe.schedule.pass_timer import PassTimer


@dataclass(frozen=True)
class Setting:
    """What a call of the routed experts stands in: where, and what its router promises."""

    exchange: AllToAll | None = None  # over the ranks that share the experts; None: this rank has them all
    shared_expert: SharedExpert | None = None
    assignments_per_token: int | None = None  # the number of experts of every token where none is dropped,
    most_per_token: int | None = None  # else the most
    placement: LayerPlacement | None = None  # moves assignments to copies of their experts; None: all go home
    comes_again: bool = False  # a call that keeps nothing will come again with a backward pass
    strided: bool = False  # chunks take every so many-th token
    experts: ExpertCompute = field(default_factory=ExpertCompute)
    timer: PassTimer = field(default_factory=PassTimer)


def routed_experts(
    x_TH: torch.Tensor,
    probs_TE: torch.Tensor,
    routing_map_TE: torch.Tensor,
    home: Slab,
    plan: Plan,
    setting: Setting,
) -> torch.Tensor:
    """The weighted sum of the chosen experts' outputs [T, H], plus the shared expert's, differentiable in x, probs and
    weights: route, place, plan, then dispatch - experts - combine in chunks.

    x [T, H]; probs [T, E] and routing map [T, E] (bool) over the experts of all ranks; `home` are the weights of those
    at home here.
    """
    turns_T, stride = None, max(plan.degree, plan.backward_degree)
    if setting.strided and stride > 1 and len(x_TH):
        turns_T = route.turns(len(x_TH), stride, x_TH.device)
    choice = route.choose(routing_map_TE, setting.assignments_per_token, setting.most_per_token, turns_T)
    probs_P = probs_TE.reshape(-1).index_select(0, choice.flat)
    keep = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x_TH, probs_P, *home.given))
    exchange, shared_expert = setting.exchange, setting.shared_expert
    # Without other ranks there is no wait to fill, and without a backward pass of ours the shared expert may have its
    # own.
    inside = shared_expert if keep and exchange is not None else None
    call: LocalCall | SpreadCall
    with setting.timer.measure("forward" if keep else "evaluation", x_TH.device):
        if exchange is None:
            strategy = STRATEGIES[plan.memory_strategy] if keep else NOTHING_KEPT
            call = LocalCall(choice, plan, strategy, setting.experts, Weights((home,)), x_TH, both=keep)
        else:
            call = _spread(choice, routing_map_TE, home, plan, setting, exchange, keep)
        output_TH = execute.run(call, setting.timer, x_TH, probs_P, home)
    return output_TH if shared_expert is None or inside is not None else output_TH + shared_expert(x_TH)


def _spread(
    choice: Choice,
    routing_map_TE: torch.Tensor,
    home: Slab,
    plan: Plan,
    setting: Setting,
    exchange: AllToAll,
    keep: bool,
) -> SpreadCall:
    """A call over several ranks, once it is known who computes what."""
    degrees, apart, placement = pass_degrees(plan, both=keep), home.block_rows is not None, setting.placement
    assert not apart or len(degrees) == 1, "blocks are those of both passes"
    copies: CallCopies | None = None
    if placement is None or not placement.active:
        homes = PlacementMap(routing_map_TE.size(1), exchange.size) if placement is None else placement.map
        places = Places.at_home(choice, homes)
    else:
        cut = route.boundaries(choice.num_tokens, degrees[0])
        comes_again = setting.comes_again and not keep
        in_turn_TE = routing_map_TE if choice.turns_T is None else routing_map_TE.index_select(0, choice.turns_T)
        places, copies = placement.place(choice, in_turn_TE, home, keep, comes_again, cut)
    order = route.dispatch_order(choice, places, degrees, apart)
    num_slots = places.num_slots * (exchange.size if apart else 1)
    del places  # its memory is free while experts compute
    sizes = exchange_sizes(order, degrees, num_slots, exchange)
    if placement is not None:
        placement.ran(sizes[0])
    strategy = STRATEGIES[plan.memory_strategy] if keep else NOTHING_KEPT
    inside = setting.shared_expert if keep else None
    return SpreadCall(choice, order, sizes, plan, strategy, exchange, setting.experts, inside, copies)


class MixtrainMoELayer(MoELayer):
    """Routed experts (stacked, dropless, dispatched in chunks) plus an optional shared expert.

    In Megatron's place: same router, losses and checkpoint names. `plan` and `exchange` say how each call runs; they
    may be changed between steps, on all ranks alike.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MoESubmodules | None = None,
        layer_number: int | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        plan: Plan | None = None,
        all_to_all: str = "flat",
        placement: Policy | None = None,
        strided: bool = False,
    ) -> None:
        assert pg_collection is not None, "moe_spec puts it into the layer's spec"
        super().__init__(config, submodules, layer_number, pg_collection)
        self.plan, self.timer, self.expert_compute = plan or Plan(), PassTimer(), ExpertCompute()
        self.token_dispatcher = None  # Megatron's is built by its constructor and does nothing here
        self.expert_tensor_group = pg_collection.expt_tp
        self.exchange: AllToAll | None = factory.shared(self.ep_group, all_to_all) if self.ep_group.size() > 1 else None
        self.placement: LayerPlacement | None = None
        self._strided = strided
        self._block_rows = None if placement is None else placement.block_rows
        if placement is not None and placement.planner is not None:
            assert self.exchange is not None and config.num_moe_experts is not None
            limits = CopyLimits(placement.extra_slots, ranks_per_node(self.ep_group) or self.ep_group.size())
            self.placement = LayerPlacement(
                self.ep_group,
                config.num_moe_experts,
                placement.planner,
                placement.costs,
                limits,
                placement.block_rows,
                placement.max_load,
            )
            self.placement.active = not placement.chooses
            assert isinstance(self.experts, StackedExperts)
            self.experts.homes_may_move = True
        dropless = config.moe_expert_capacity_factor is None
        self._most_per_token = config.moe_router_topk
        self._assignments_per_token = config.moe_router_topk if dropless else None

    def forward(
        self, hidden_states: torch.Tensor, intermediate_tensors: object = None, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, None]:
        """hidden_states [s, b, H] (this rank's tokens) -> (output [s, b, H], no bias). Raises ValueError as Megatron's
        layer does."""
        if self.training and self.attn_tp_group.size() > 1 and not self.config.sequence_parallel:
            raise ValueError(
                "an MoE layer with tensor parallelism trains only with sequence parallelism. Set "
                "parallel.sequence=true."
            )
        probs, routing_map, hidden_states = self.router(hidden_states, padding_mask, pass_input=True)
        x = hidden_states.reshape(-1, hidden_states.size(-1))
        shared_expert = self.shared_experts
        if self.expert_tensor_group.size() > 1:
            output = self._split_experts(x, probs, routing_map)
            output = output if shared_expert is None else output + shared_expert(x)
        else:
            output = self._routed(x, probs, routing_map, shared_expert)
        return output.view_as(hidden_states), None

    def set_homes(self, placement: PlacementMap) -> None:
        """What the homes own lies at other places, on all ranks alike: between two steps."""
        assert self.placement is not None
        self.experts.map = self.placement.map = placement
        self.local_expert_indices = self.experts.experts_here()  # by which their weights are named

    def _split_experts(self, x: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor) -> torch.Tensor:
        # Each expert tensor rank holds a part of every expert's width: it computes for the tokens of all these ranks,
        # and the parts are summed on the way back. All of them have the same number of tokens.
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
        streamed = self.expert_compute.streamed
        setting = Setting(
            self.exchange,
            shared_expert,
            self._assignments_per_token,
            self._most_per_token,
            self.placement,
            comes_again=self.training,
            strided=self._strided,
            experts=self.expert_compute,
            timer=self.timer,
        )
        home = self.experts() if streamed is None else streamed.open()
        home = replace(home, block_rows=self._block_rows)
        return routed_experts(x, probs, routing_map, home, self.plan, setting)


def hand_rows_to_routers(chunks: Sequence[torch.nn.Module]) -> None:
    """From now on each transformer layer with experts tells its router which rows it gets, each time that it runs: also
    when it is computed again, and whatever other micro-batches are under way.

    They come as `routed` (RouterRows) of what stands in the place of `packed_seq_params`; without it they are all.
    """
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(getattr(module, "mlp", None), MixtrainMoELayer):
                module.register_forward_pre_hook(_hand_rows, with_kwargs=True)


def _hand_rows(layer: Any, args: Any, kwargs: dict[str, Any]) -> None:
    layer.mlp.router.rows = getattr(kwargs.get("packed_seq_params"), "routed", None)


def layers_of(chunks: Sequence[torch.nn.Module]) -> dict[int, MixtrainMoELayer]:
    """The MoE layers of this rank's model chunks by their number in the whole model, from 0."""
    modules = [module for chunk in chunks for module in chunk.modules() if isinstance(module, MixtrainMoELayer)]
    return {module.layer_number - 1: module for module in modules if module.layer_number is not None}
