"""Megatron-core's own MoE layer, with which ours is compared: its kinds of experts, and our weights in it."""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe import grouped_gemm_util
from megatron.core.transformer.moe.experts import GroupedMLP, SequentialMLP, TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

LINEAR = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
# One expert after the other; TransformerEngine's grouped linear layers; all in one call of the package grouped_gemm;
# the same experts with torch's grouped product in that package's place.
SEQUENTIAL, BY_TRANSFORMER_ENGINE = "SequentialMLP", "TEGroupedMLP"
BY_GROUPED_GEMM, BY_TORCH = "GroupedMLP", "GroupedMLP on torch's grouped_mm"


def kinds_of_experts() -> list[str]:
    """Return the kinds of experts that run here: the portable ones, and the best of the grouped ones. Those of bf16
    alone come last."""
    from parallel.megatron.startup import transformer_engine_fault

    if transformer_engine_fault() is None:
        return [SEQUENTIAL, BY_TRANSFORMER_ENGINE]
    return [SEQUENTIAL, BY_TORCH if find_spec("grouped_gemm") is None else BY_GROUPED_GEMM]


def megatron_layer(config: TransformerConfig, layer_number: int = 1, kind: str = SEQUENTIAL) -> MoELayer:
    """Build the layer with experts of this kind, shared ones if the config has them."""
    submodules = MoESubmodules(
        experts=_experts(kind), shared_experts=ModuleSpec(module=SharedExpertMLP, submodules=LINEAR)
    )
    layer = MoELayer(config, submodules, layer_number)
    layer.set_layer_number(layer_number)
    return layer


def _experts(kind: str) -> ModuleSpec:
    if kind == SEQUENTIAL:
        return ModuleSpec(module=SequentialMLP, submodules=LINEAR)
    if kind == BY_TRANSFORMER_ENGINE:
        from megatron.core.extensions import transformer_engine as te

        linear = MLPSubmodules(linear_fc1=te.TEColumnParallelGroupedLinear, linear_fc2=te.TERowParallelGroupedLinear)
        return ModuleSpec(module=TEGroupedMLP, submodules=linear)
    if kind == BY_TORCH:
        grouped_gemm_util.grouped_gemm = grouped_gemm_util.ops = SimpleNamespace(gmm=_grouped_product)
    return ModuleSpec(module=GroupedMLP)


def _grouped_product(
    token_rows: torch.Tensor, matrices: torch.Tensor, counts: torch.Tensor, trans_b: bool = False
) -> torch.Tensor:
    """Compute grouped products like grouped_gemm.ops.gmm: rows [n, K], matrices [E, K, M] (or [E, M, K]), counts [E]
    on the host."""
    from moe.experts.compute import grouped_mm

    ends = counts.cumsum(0).to(device=token_rows.device, dtype=torch.int32)
    return grouped_mm(token_rows, matrices.transpose(1, 2) if trans_b else matrices, ends)


@torch.no_grad()
def fill_experts(layer: MoELayer, fc1: torch.Tensor, fc2: torch.Tensor) -> None:
    """Give the layer's local experts our stacked weights [E, G, H] and [E, H, F]."""
    experts = layer.experts
    if isinstance(experts, GroupedMLP):  # which keeps them transposed
        experts.weight1.view(len(fc1), fc1.size(2), fc1.size(1)).copy_(fc1.transpose(1, 2))
        experts.weight2.view(len(fc2), fc2.size(2), fc2.size(1)).copy_(fc2.transpose(1, 2))
        return
    for i in range(len(fc1)):
        if isinstance(experts, TEGroupedMLP):
            theirs = getattr(experts.linear_fc1, f"weight{i}"), getattr(experts.linear_fc2, f"weight{i}")
        else:
            theirs = experts.local_experts[i].linear_fc1.weight, experts.local_experts[i].linear_fc2.weight
        for own, weight in zip(theirs, (fc1[i], fc2[i])):
            own.copy_(weight)


def expert_gradients(layer: MoELayer) -> list[torch.Tensor]:
    """Return the gradients of both weights of the local experts, stacked as ours are; of SequentialMLP."""
    experts = layer.experts.local_experts
    return [
        torch.stack([getattr(expert, name).weight.grad for expert in experts]) for name in ("linear_fc1", "linear_fc2")
    ]
