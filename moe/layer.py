"""The MoE layer and its spec: Megatron-core's router and shared expert, with our dispatch, experts and schedule."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from memory.host_link import HostLink
from moe import route
from moe.alltoall.flat import AllToAll
from moe.alltoall.hierarchical import ranks_per_node, shared_exchange
from moe.chunk_plan import NOTHING_KEPT, STRATEGIES, Plan, pass_degrees
from moe.experts.compute import ExpertCompute
from moe.experts.module import StackedExperts
from moe.experts.streamed import StreamedExperts
from moe.experts.weights import Slab, Weights
from moe.placement.live import LayerPlacement
from moe.placement.policy import Policy
from moe.placement.quotas import ReplicaLimits
from moe.placement.replicas import CallReplicas
from moe.placement_map import PlacementMap
from moe.route import Choice, Destinations
from moe.router import Router
from moe.schedule import execute
from moe.schedule.execute import PassTimer
from moe.schedule.on_one_rank import LocalCall
from moe.schedule.over_ranks import SharedExpert, SpreadCall
from moe.schedule.pass_sizes import exchange_sizes


@dataclass(frozen=True)
class Setting:
    """The settings of one call of the routed experts that are not in its chunk plan, e.g. the shared expert."""

    exchange: AllToAll | None = None  # over the ranks that share the experts; None: this rank has all experts
    shared_expert: SharedExpert | None = None
    assignments_per_token: int | None = None  # the number of experts of every token if none is dropped
    most_per_token: int | None = None  # the most experts of a token otherwise
    placement: LayerPlacement | None = None  # sends assignments to replicas; None: all are computed by primaries
    comes_again: bool = False  # a call that keeps no activations will be repeated, with a backward pass
    strided: bool = False  # each chunk takes every K-th token
    experts: ExpertCompute = field(default_factory=ExpertCompute)
    timer: PassTimer = field(default_factory=PassTimer)


def routed_experts(
    x_TH: torch.Tensor,
    probs_TE: torch.Tensor,
    routing_map_TE: torch.Tensor,
    primaries: Slab,
    plan: Plan,
    setting: Setting,
) -> torch.Tensor:
    """Return the weighted sum of the chosen experts' outputs [T, H], plus the shared expert's output.

    The call chooses the rank that computes each assignment, then dispatches, computes and combines in chunks. The
    result is differentiable in x, probs and weights.

    `x_TH` [T, H] is the layer's input. `probs_TE` and `routing_map_TE` (bool), both [T, E], are over the experts of all
    ranks. `primaries`: the weights of the experts that this rank owns.
    """
    order_T, stride = None, max(plan.degree, plan.backward_degree)
    if setting.strided and stride > 1 and len(x_TH):
        order_T = route.strided_order(len(x_TH), stride, x_TH.device)
    choice = route.choose(routing_map_TE, setting.assignments_per_token, setting.most_per_token, order_T)
    probs_P = probs_TE.reshape(-1).index_select(0, choice.flat)
    keep = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x_TH, probs_P, *primaries.given))
    exchange, shared_expert = setting.exchange, setting.shared_expert
    # The schedule runs the shared expert while it waits for other ranks, in both passes.
    inside = shared_expert if keep and exchange is not None else None
    call: LocalCall | SpreadCall
    with setting.timer.measure("forward" if keep else "evaluation", x_TH.device):
        if exchange is None:
            call = LocalCall(choice, plan, setting.experts, Weights((primaries,)), x_TH, both=keep)
        else:
            call = _spread(choice, routing_map_TE, primaries, plan, setting, keep)
        output_TH = execute.run(call, setting.timer, x_TH, probs_P, primaries)
    return output_TH if shared_expert is None or inside is not None else output_TH + shared_expert(x_TH)


def _spread(
    choice: Choice, routing_map_TE: torch.Tensor, primaries: Slab, plan: Plan, setting: Setting, keep: bool
) -> SpreadCall:
    """Prepare a call over several ranks: decide which rank computes each assignment, and exchange the sizes."""
    degrees, placement, exchange = pass_degrees(plan, both=keep), setting.placement, setting.exchange
    assert exchange is not None
    row_per_assignment = primaries.block_rows is not None
    assert not row_per_assignment or len(degrees) == 1, "both passes must have the same blocks"
    replicas: CallReplicas | None = None
    if placement is None or not placement.active:
        primaries_map = PlacementMap(routing_map_TE.size(1), exchange.size) if placement is None else placement.map
        destinations = Destinations.of_primaries(choice, primaries_map)
    else:
        cut = route.boundaries(choice.num_tokens, degrees[0])
        comes_again = setting.comes_again and not keep
        in_turn_TE = routing_map_TE if choice.order_T is None else routing_map_TE.index_select(0, choice.order_T)
        destinations, replicas = placement.plan_call(choice, in_turn_TE, primaries, keep, comes_again, cut)
    order = route.dispatch_order(choice, destinations, degrees, row_per_assignment)
    num_slots = destinations.num_slots * (exchange.size if row_per_assignment else 1)
    del destinations  # frees its memory while experts compute
    sizes = exchange_sizes(order, degrees, num_slots, exchange)
    if placement is not None:
        placement.ran(sizes[0])
    strategy = STRATEGIES[plan.memory_strategy] if keep else NOTHING_KEPT
    inside = setting.shared_expert if keep else None
    return SpreadCall(choice, order, sizes, plan, strategy, exchange, setting.experts, inside, replicas)


class MixtrainMoELayer(MoELayer):
    """An MoE layer: routed experts (stacked, dropless, dispatched in chunks), plus an optional shared expert.

    It replaces Megatron's layer, with the same router, losses and checkpoint names. `plan` and `exchange` determine how
    a call runs. They may change between steps, in the same way on all ranks.
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
        self.token_dispatcher = None  # Megatron's constructor builds one, which is not used here
        self.expert_tensor_group = pg_collection.expt_tp
        self.exchange = shared_exchange(self.ep_group, all_to_all) if self.ep_group.size() > 1 else None
        self.placement: LayerPlacement | None = None
        self._strided = strided
        self._block_rows = None if placement is None else placement.block_rows
        if placement is not None and placement.planner is not None:
            assert self.exchange is not None and config.num_moe_experts is not None
            limits = ReplicaLimits(placement.extra_slots, ranks_per_node(self.ep_group) or self.ep_group.size())
            decided = placement.planner, placement.costs, limits, placement.block_rows, placement.max_load
            self.placement = LayerPlacement(self.ep_group, config.num_moe_experts, *decided)
            self.placement.active = not placement.chooses
            assert isinstance(self.experts, StackedExperts)
            self.experts.primaries_may_move = True
        self._most_per_token = config.moe_router_topk
        self._assignments_per_token = self._most_per_token if config.moe_expert_capacity_factor is None else None

    def forward(
        self, hidden_states: torch.Tensor, intermediate_tensors: object = None, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, None]:
        """Return (output [s, b, H], None for the bias) for this rank's tokens, hidden_states [s, b, H].

        As in Megatron's layer, training with tensor parallelism but without sequence parallelism raises ValueError.
        """
        if self.training and self.attn_tp_group.size() > 1 and not self.config.sequence_parallel:
            raise ValueError(
                "parallel.sequence is false, but an MoE layer with tensor parallelism trains only with sequence "
                "parallelism. Set parallel.sequence=true."
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

    def use_plan(self, plan: Plan, all_to_all: str | None = None) -> None:
        """Compute further calls with this plan and, if given, with this kind of token exchange, on all ranks of the
        expert parallel group between the same two steps."""
        self.plan = plan
        if all_to_all is not None:
            self.exchange = shared_exchange(self.ep_group, all_to_all)

    def copy_through(self, link: HostLink) -> None:
        """From now on, copy offloaded activations between device and host through this link."""
        self.expert_compute.link = link

    def stream_weights(self, streamed: StreamedExperts) -> None:
        """Read the experts' weights from device slots that a copy stream fills, because they are offloaded."""
        self.expert_compute.streamed = streamed

    def set_primaries(self, placement: PlacementMap) -> None:
        """Replace the map from experts to the ranks that own them, on all ranks between the same two steps."""
        assert self.placement is not None
        self.experts.map = self.placement.map = placement
        self.local_expert_indices = self.experts.experts_here()  # their weights' names contain these

    def _split_experts(self, x: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor) -> torch.Tensor:
        # Each expert tensor rank has a shard of every expert's width. It computes for the tokens of all expert tensor
        # ranks, which have equal numbers of tokens, and the partial sums are reduced afterwards.
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
        primaries = self.experts() if streamed is None else streamed.open()
        primaries = replace(primaries, block_rows=self._block_rows)
        return routed_experts(x, probs, routing_map, primaries, self.plan, setting)


def hand_rows_to_routers(chunks: Sequence[torch.nn.Module]) -> None:
    """Register hooks that give each router its token rows (RouterRows) before each call of its transformer layer.

    The rows are the attribute `routed` of the argument `packed_seq_params`; without it the router uses all rows. Hooks
    set the right rows also in a recomputation and with several micro-batches in flight.
    """
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(getattr(module, "mlp", None), MixtrainMoELayer):
                module.register_forward_pre_hook(_set_rows, with_kwargs=True)


def _set_rows(layer: Any, args: Any, kwargs: dict[str, Any]) -> None:
    # Megatron's layer calls its router without the rows.
    layer.mlp.router.token_rows = getattr(kwargs.get("packed_seq_params"), "routed", None)


def layers_of(chunks: Sequence[torch.nn.Module]) -> dict[int, MixtrainMoELayer]:
    """Return this rank's MoE layers as a dict; a key is the layer's number in the whole model, from 0."""
    modules = [module for chunk in chunks for module in chunk.modules() if isinstance(module, MixtrainMoELayer)]
    return {module.layer_number - 1: module for module in modules if module.layer_number is not None}


def moe_spec(
    groups: ProcessGroupCollection,
    linear: MLPSubmodules,
    activation: str,
    plan: Plan,
    all_to_all: str = "flat",
    placement: Policy | None = None,
    group_score_top_k: int | None = None,
    strided: bool = False,
    off_device: bool = False,
) -> ModuleSpec:
    """Return the Megatron spec of an MoE layer that replaces a feed-forward layer.

    `groups`: the process groups of a Topology. `linear`: the backend's parallel linear layers, for the shared expert.
    `activation`: swiglu, gelu or gelu_tanh. `strided`: each chunk takes every K-th token. `off_device`: the experts'
    weights are offloaded.
    """
    return ModuleSpec(
        module=MixtrainMoELayer,
        params={
            "pg_collection": groups,
            "plan": plan,
            "all_to_all": all_to_all,
            "placement": placement,
            "strided": strided,
        },
        submodules=MoESubmodules(
            experts=ModuleSpec(module=StackedExperts, params={"activation": activation, "off_device": off_device}),
            shared_experts=ModuleSpec(module=SharedExpertMLP, submodules=linear),
            router=functools.partial(Router, group_score_top_k=group_score_top_k),
        ),
        metainfo={"fuse_pre_mlp_layernorm": False},
    )
