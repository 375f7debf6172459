"""Megatron-core's own MoE layer, which ours is compared with: its portable experts, and our weights in it."""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

LINEAR = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)


def megatron_layer(config: TransformerConfig, layer_number: int = 1) -> MoELayer:
    """The layer with SequentialMLP experts, shared ones if the config has them."""
    submodules = MoESubmodules(
        experts=ModuleSpec(module=SequentialMLP, submodules=LINEAR),
        shared_experts=ModuleSpec(module=SharedExpertMLP, submodules=LINEAR),
    )
    layer = MoELayer(config, submodules, layer_number)
    layer.set_layer_number(layer_number)
    return layer


@torch.no_grad()
def fill_experts(layer: MoELayer, fc1: torch.Tensor, fc2: torch.Tensor) -> None:
    """Give the layer's local experts our stacked weights [E, G, H] and [E, H, F]."""
    for i, expert in enumerate(layer.experts.local_experts):
        expert.linear_fc1.weight.copy_(fc1[i])
        expert.linear_fc2.weight.copy_(fc2[i])


def expert_gradients(layer: MoELayer) -> list[torch.Tensor]:
    """The gradients of both weights of the local experts, stacked as ours are."""
    experts = layer.experts.local_experts
    return [
        torch.stack([getattr(expert, name).weight.grad for expert in experts]) for name in ("linear_fc1", "linear_fc2")
    ]
