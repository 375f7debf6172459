"""This rank's routed experts as a module: stacked parameters, and their entries in Megatron-core's checkpoints."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from moe.experts.blocks import hidden_factor
from moe.experts.weights import Slab
from moe.placement_map import PlacementMap
from parallel.owned import own


class StackedLinear(torch.nn.Module):
    """The stacked weights [E, out, in] (and biases [E, out]) of one linear layer of this rank's experts."""

    def __init__(self, shape: tuple[int, int, int], with_bias: bool, dtype: torch.dtype, off_device: bool) -> None:
        super().__init__()
        self.weight: torch.nn.Parameter | None = None
        self.bias: torch.nn.Parameter | None = None
        self._off_device, self._kinds = off_device, {"weight": shape, **({"bias": shape[:2]} if with_bias else {})}
        for name, of_kind in () if off_device else self._kinds.items():
            make = torch.empty if name == "weight" else torch.zeros
            setattr(self, name, torch.nn.Parameter(make(of_kind, dtype=dtype)))

    def stand_in(self, dtype: torch.dtype, device: torch.device) -> None:
        """If the weights are offloaded, create placeholder parameters, whose elements share the memory of one NaN."""
        for name, shape in self._kinds.items() if self._off_device else ():
            setattr(self, name, torch.nn.Parameter(torch.full((), math.nan, dtype=dtype, device=device).expand(shape)))

    def forward(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return (weight, bias).

        This is `forward` because Megatron's DDP finishes the all-gather of a module's parameters before its forward.
        """
        assert self.weight is not None
        return self.weight, self.bias


class StackedExperts(MegatronModule):
    """A module with the parameters of this rank's routed experts, with which the layer's schedule computes.

    `off_device`: the weights are offloaded, and placeholder parameters exist after `stand_in`. Raises ValueError if the
    experts cannot be split over the expert tensor ranks.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        activation: str,
        pg_collection: ProcessGroupCollection,
        off_device: bool = False,
    ) -> None:
        super().__init__(config=config)
        self.off_device = off_device
        self.num_local_experts, self.activation = num_local_experts, activation
        self.ep_group, self.data_group = pg_collection.ep, pg_collection.expt_dp
        self.tensor_group = pg_collection.expt_tp
        assert config.num_moe_experts is not None
        self.map = PlacementMap(config.num_moe_experts, self.ep_group.size())
        self.primaries_may_move = False  # set by the layer
        tensor_size = self.tensor_group.size()
        width = config.moe_ffn_hidden_size
        if width % tensor_size:
            raise ValueError(
                f"moe_ffn_hidden_size ({width}) must be divisible by the expert tensor parallel size ({tensor_size}). "
                f"Use a multiple of {tensor_size}, or an expert tensor parallel size of 1."
            )
        if config.add_bias_linear and tensor_size > 1:
            raise ValueError(
                f"add_bias_linear must be False if experts are split over {tensor_size} expert tensor ranks. Set "
                "model.linear_bias=false, or use an expert tensor parallel size of 1."
            )
        width //= tensor_size
        outer, size = hidden_factor(activation) * width, config.hidden_size
        with_bias, dtype = config.add_bias_linear, config.params_dtype
        self.linear_fc1 = StackedLinear((num_local_experts, outer, size), with_bias, dtype, off_device)
        self.linear_fc2 = StackedLinear((num_local_experts, size, width), with_bias, dtype, off_device)
        if config.perform_initialization and not off_device:
            assert self.linear_fc1.weight is not None and self.linear_fc2.weight is not None
            for weight in self.linear_fc1.weight.detach():
                config.init_method(weight)
            for weight in self.linear_fc2.weight.detach():
                config.output_layer_init_method(weight)
        self._mark()

    def stand_in(self, device: torch.device) -> None:
        """If the experts are offloaded, create placeholder parameters outside Megatron-core's gradient buffers."""
        if not self.off_device:
            return
        for linear in (self.linear_fc1, self.linear_fc2):
            linear.stand_in(self.config.params_dtype, device)
        self._mark()
        for parameter in self.parameters():
            own(parameter, self.data_group, off_device=True)

    def by_kind(self) -> list[torch.nn.Parameter]:
        """Return the parameters in the order fc1 and fc2 matrices, then fc1 and fc2 biases if there are any."""
        fc1, fc2 = self.linear_fc1, self.linear_fc2
        return [each for each in (fc1.weight, fc2.weight, fc1.bias, fc2.bias) if each is not None]

    def _mark(self) -> None:
        config = self.config
        for name, parameter in self.named_parameters():
            parameter.holds_experts = True  # type: ignore[attr-defined]
            # Megatron reduces the gradient of such a parameter over the expert data parallel ranks ...
            parameter.allreduce = config.expert_model_parallel_size == 1  # type: ignore[attr-defined]
            # ... and counts it in the gradient norm on every tensor rank: even unsplit, ranks hold different experts.
            dim = 2 if name == "linear_fc2.weight" else 1
            stride = hidden_factor(self.activation) if name.startswith("linear_fc1") else 1
            set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=dim, stride=stride)

    def forward(self) -> Slab:
        """Return the parameters as a slab (the stacked weights of this rank's experts)."""
        (fc1, fc1_bias), (fc2, fc2_bias) = self.linear_fc1(), self.linear_fc2()
        return Slab(fc1, fc2, fc1_bias, fc2_bias, self.activation)

    def experts_here(self) -> list[int]:
        """Return the experts whose primaries are on this rank, in the order of their slots."""
        return self.map.experts_of(self.ep_group.rank())

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> Any:
        """Return Megatron's checkpoint entries: one per parameter, or per parameter and expert if primaries may move.

        The global tensor has all experts in its first dimension, after the dimensions of `sharded_offsets`.
        """
        gated = hidden_factor(self.activation) == 2
        axes = {"linear_fc1.weight": 1, "linear_fc2.weight": 2, "linear_fc1.bias": 1, "linear_fc2.bias": None}
        result = {}
        for name, parameter in self.named_parameters():
            # The name that Megatron's SequentialMLP gives to the same tensor.
            key, replica_id = f"{prefix}experts.{name}", (0, 0, self.data_group.rank())
            make = partial(
                _sharded,
                prepended=sharded_offsets,
                axis=axes[name],
                tensor_shard=(self.tensor_group.rank(), self.tensor_group.size()),
                is_gated=gated and name.startswith("linear_fc1"),
            )
            if self.primaries_may_move:
                result[f"{prefix}{name}"] = _sharded_experts(
                    key, parameter, replica_id, make, self.experts_here(), self.map.num_experts
                )
            else:
                shard = self.ep_group.rank(), self.ep_group.size()
                result[f"{prefix}{name}"] = make(key, parameter, expert_shard=shard, replica_id=replica_id)
        return result


def _sharded_experts(
    key: str, tensor: torch.Tensor, replica_id: tuple[int, ...], make: Any, experts: list[int], num_experts: int
) -> ShardedTensorFactory:
    # Each expert slot is a ShardedTensor of its own, at its expert's index in the global tensor.
    def build(
        key: str, tensor: torch.Tensor, replica_id: tuple[int, ...], flattened_range: slice | None
    ) -> list[list[ShardedTensor]]:
        assert flattened_range is None
        boxes = []
        for i, expert in enumerate(experts):
            box = make(key, tensor[i : i + 1], expert_shard=(expert, num_experts), replica_id=replica_id)
            if isinstance(box, ShardedTensor):
                boxes.append([box])
            else:
                boxes.append(box.build_fn(box.key, box.data, box.replica_id, box.flattened_range))
        return boxes

    def merge(boxes: list[list[torch.Tensor]]) -> torch.Tensor:
        return torch.cat([torch.cat(of_expert, dim=1) if len(of_expert) > 1 else of_expert[0] for of_expert in boxes])

    return ShardedTensorFactory(key, tensor, build, merge, replica_id)


def _sharded(
    key: str,
    tensor: torch.Tensor,
    *,
    prepended: tuple[Any, ...],
    expert_shard: tuple[int, int],
    axis: int | None,
    tensor_shard: tuple[int, int],
    replica_id: tuple[int, ...],
    is_gated: bool = False,
) -> ShardedTensor | ShardedTensorFactory:
    first, (rank, size) = len(prepended), tensor_shard
    if not is_gated or size == 1:
        split = [(first + axis, rank, size)] if axis is not None and size > 1 else []
        offsets = *prepended, (first, *expert_shard), *split
        return ShardedTensor.from_rank_offsets(key, tensor, *offsets, replica_id=replica_id, prepend_axis_num=first)

    # A tensor rank holds a shard of the gate and one of the up projection, which are separate in the global tensor.
    def build(
        key: str, tensor: torch.Tensor, replica_id: tuple[int, ...], flattened_range: slice | None
    ) -> list[ShardedTensor]:
        assert flattened_range is None
        box = partial(_sharded, prepended=prepended, expert_shard=expert_shard, axis=axis, replica_id=replica_id)
        halves = tensor.chunk(2, dim=1)
        return [box(key, half, tensor_shard=(rank + size * i, 2 * size)) for i, half in enumerate(halves)]

    return ShardedTensorFactory(key, tensor, build, lambda halves: torch.cat(halves, dim=1), replica_id)
