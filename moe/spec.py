"""The spec of the MoE layer: the one place where model files meet it."""

from __future__ import annotations

from typing import Any

from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec


class ExpertRowLinear(RowParallelLinear):
    """RowParallelLinear for experts with bias, which Megatron-core 0.16.1 gets wrong twice."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.tp_group.size() == 1:
            # The reduction would return its input as it is, and autograd forbids MLP to add the bias to that in place.
            self.explicit_expert_comm = True
        if self.bias is not None:
            # The mark would sum the gradients of different experts over the attention's tensor ranks. An expert with
            # bias is not split (models/transformer_config.py), so its rank has seen all of its tokens.
            self.bias.sequence_parallel = False


def moe_spec(linear: MLPSubmodules) -> ModuleSpec:
    """MoE in place of a feed-forward layer; shared experts are made of `linear`, the backend's parallel linear layers.

    Routed experts run one after the other on small pieces, where a plain matrix product has the least overhead on any backend.
    """
    experts = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=ExpertRowLinear)
    return ModuleSpec(
        module=MoELayer,
        submodules=MoESubmodules(
            experts=ModuleSpec(module=SequentialMLP, submodules=experts),
            shared_experts=ModuleSpec(module=SharedExpertMLP, submodules=linear),
        ),
        metainfo={"fuse_pre_mlp_layernorm": False},
    )
