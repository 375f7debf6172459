"""The spec of the MoE layer: the one place where model files meet it."""

from __future__ import annotations

import functools

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec

from moe.chunk_plan import Plan
from moe.experts.module import StackedExperts
from moe.layer import MixtrainMoELayer
from moe.placement.policy import Policy
from moe.router import Router


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
    """MoE in place of a feed-forward layer, over the process groups of a Topology.

    The shared expert is made of `linear`, the backend's parallel linear layers; `activation` is swiglu, gelu or
    gelu_tanh; `strided`: chunks take every so many-th token. `off_device`: the experts' weights lie off the device.
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
