"""The spec of the MoE layer: the one place where model files meet it."""

from __future__ import annotations

from typing import Any

from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec


class ExpertRowLinear(RowParallelLinear):
    """RowParallelLinear whose result may be changed in place, as Megatron-core's MLP does to add an expert's bias.

    With one tensor rank the reduction returns its input as it is, which autograd forbids to change; it is skipped instead.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.explicit_expert_comm = self.explicit_expert_comm or self.tp_group.size() == 1


def moe_spec(linear: MLPSubmodules) -> ModuleSpec:
    """MoE in place of a feed-forward layer; `linear` names the backend's parallel linear layers."""
    row = ExpertRowLinear if linear.linear_fc2 is RowParallelLinear else linear.linear_fc2
    experts = MLPSubmodules(linear_fc1=linear.linear_fc1, linear_fc2=row)
    return ModuleSpec(
        module=MoELayer,
        submodules=MoESubmodules(
            experts=ModuleSpec(module=SequentialMLP, submodules=experts),
            shared_experts=ModuleSpec(module=SharedExpertMLP, submodules=linear),
        ),
        metainfo={"fuse_pre_mlp_layernorm": False},
    )
