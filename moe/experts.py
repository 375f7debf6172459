"""Routed experts with stacked weights: forward, and a backward pass in two parts.

Input gradients come first, weight gradients separately, so that a schedule can send the former before it computes the
latter. Rows come sorted by expert; nothing is padded, an expert without rows costs nothing.

Shapes: n pairs of a row and an expert, H hidden size, F width of this rank's part of an expert, G = 2 F for SwiGLU
([gate | up]) else F, E experts of this rank.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from moe import blocks
from moe.blocks import SPARE_ROWS, activate, activate_backward, hidden_factor
from moe.weights import Pairs, WeightGrads, Weights, WeightWork
from moe.workspace import WORKSPACE

# ---------------------------------------------------------------------------------------------------------------------
# Grouped products
# ---------------------------------------------------------------------------------------------------------------------


def grouped_mm(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """One matrix product per group on a GPU; group i ends at row `ends[i]` (int32, on the device)."""
    function = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm
    return function(left, right, offs=ends)


def uses_grouped_mm(device: torch.device, dtype: torch.dtype, hidden_size: int, width: int) -> bool:
    """Whether all experts go through one grouped product, else one after the other in blocks of rows.

    torch's grouped product is a single kernel on CUDA for bf16 with rows of a multiple of 16 bytes; elsewhere it is a loop
    itself. On the host a loop over blocks that stay in the cache is faster than any one call over all rows: bf16, 32 experts of
    width 256 and 4096 tokens, top 4, one thread: grouped_mm 10.2 ms, one mm per expert 11.2 ms, bmm (equal counts only)
    9.3 ms for the first product alone; but it leaves the activations in main memory (see BLOCK_ROWS).
    """
    aligned = hidden_size * dtype.itemsize % 16 == 0 and width * dtype.itemsize % 16 == 0
    return device.type == "cuda" and dtype is torch.bfloat16 and aligned


def make_pairs(rows: torch.Tensor, counts: torch.Tensor, weights: Weights) -> Pairs:
    """Pairs from source rows [n], sorted by expert, and the number of pairs of each expert [E]."""
    on_gpu = uses_grouped_mm(weights.fc1.device, weights.fc1.dtype, weights.fc1.size(2), weights.fc2.size(2))
    return Pairs(rows, counts, None if on_gpu else counts.tolist())


# ---------------------------------------------------------------------------------------------------------------------
# Forward and backward
# ---------------------------------------------------------------------------------------------------------------------


def forward(weights: Weights, source: torch.Tensor, pairs: Pairs, hidden: torch.Tensor | None) -> torch.Tensor:
    """Each pair's expert output, not yet weighted, in the first n rows of a tensor [at least n, H] from the workspace.

    `source` [rows, H] holds the inputs. `hidden` [n + SPARE_ROWS, G], if given, receives what goes into the activation.
    """
    if pairs.host_counts is None:
        return _forward_grouped(weights, source, pairs, hidden)
    output = WORKSPACE.take((len(pairs.rows) + SPARE_ROWS, source.size(1)), source)
    with blocks.of(weights, source, pairs.host_counts) as of_experts:
        of_experts.forward(pairs.rows, hidden, output)
    return output


def input_gradients(
    weights: Weights,
    source: torch.Tensor,
    pairs: Pairs,
    hidden: torch.Tensor | None,
    output_grad: torch.Tensor,
    output_rows: torch.Tensor,
    pair_weights: torch.Tensor,
    grads: WeightGrads | None,
) -> tuple[torch.Tensor, torch.Tensor, WeightWork | None]:
    """Gradients of each pair's input [at least n, H] and weight [n, fp32 or wider], both from the workspace.

    `output_grad` [rows, H] is the gradient of the weighted sums, of which pair p belongs to row `output_rows[p]`.
    `hidden` is what `forward` stored; None computes it again. With `grads` the weight gradients are added at once, while
    everything is in the cache; without, the third result is the work that `weight_gradients` does later.
    """
    if pairs.host_counts is None:
        return _input_gradients_grouped(weights, source, pairs, hidden, output_grad, output_rows, pair_weights, grads)
    n = len(pairs.rows)
    input_grad = WORKSPACE.take((n + SPARE_ROWS, source.size(1)), source)
    weight_grad = WORKSPACE.take((n,), source, torch.promote_types(source.dtype, torch.float32))
    with blocks.of(weights, source, pairs.host_counts) as of_experts:
        rows = of_experts.rows_of_work(later=grads is None)
        hidden_grad, activated = (WORKSPACE.take((rows, columns), source) for columns in (weights.fc1.size(1), weights.fc2.size(2)))
        work = WeightWork(pairs, source, output_rows, output_grad, hidden_grad, activated, pair_weights, weights)
        of_experts.input_gradients(work, hidden, weight_grad, input_grad, grads)
    if grads is None:
        return input_grad, weight_grad, work
    work.free()
    return input_grad, weight_grad, None


def weight_gradients(work: WeightWork, grads: WeightGrads) -> None:
    """Add one chunk's part to the weight gradients, and free what the chunk held."""
    pairs, source = work.pairs, work.source
    if pairs.host_counts is None:
        _weight_gradients_grouped(work, grads)
        return
    with blocks.of(work.weights, source, pairs.host_counts) as of_experts:
        of_experts.weight_gradients(work, grads)
    work.free()


def _ends(pairs: Pairs) -> torch.Tensor:
    return pairs.counts.cumsum(0).int()


def _experts_of(pairs: Pairs) -> torch.Tensor:
    return torch.repeat_interleave(torch.arange(len(pairs.counts), device=pairs.rows.device), pairs.counts, output_size=len(pairs.rows))


def _hidden_grouped(weights: Weights, source: torch.Tensor, pairs: Pairs) -> tuple[torch.Tensor, torch.Tensor]:
    x = source.index_select(0, pairs.rows)
    hidden = grouped_mm(x, weights.fc1.transpose(1, 2), _ends(pairs))
    return x, hidden if weights.fc1_bias is None else hidden.add_(weights.fc1_bias.index_select(0, _experts_of(pairs)))


def _forward_grouped(weights: Weights, source: torch.Tensor, pairs: Pairs, hidden: torch.Tensor | None) -> torch.Tensor:
    if len(pairs.rows) == 0:
        return source.new_empty(0, source.size(1))
    _, h = _hidden_grouped(weights, source, pairs)
    if hidden is not None:
        hidden[: len(h)].copy_(h)
    activated = activate(weights.activation, h, h.new_empty(len(h), weights.fc2.size(2)))
    output = grouped_mm(activated, weights.fc2.transpose(1, 2), _ends(pairs))
    return output if weights.fc2_bias is None else output.add_(weights.fc2_bias.index_select(0, _experts_of(pairs)))


def _input_gradients_grouped(
    weights: Weights,
    source: torch.Tensor,
    pairs: Pairs,
    hidden: torch.Tensor | None,
    output_grad: torch.Tensor,
    output_rows: torch.Tensor,
    pair_weights: torch.Tensor,
    grads: WeightGrads | None,
) -> tuple[torch.Tensor, torch.Tensor, WeightWork | None]:
    if len(pairs.rows) == 0:
        return source.new_empty(0, source.size(1)), source.new_empty(0, dtype=torch.float32), None
    hidden = _hidden_grouped(weights, source, pairs)[1] if hidden is None else hidden[: len(pairs.rows)]
    dy = output_grad.index_select(0, output_rows)
    grad = grouped_mm(dy, weights.fc2, _ends(pairs))
    hidden_grad, activated = torch.empty_like(hidden), torch.empty_like(grad)
    weight_grad = activate_backward(weights.activation, hidden, grad, pair_weights, hidden_grad, activated)
    if weights.fc2_bias is not None:
        weight_grad += (dy * weights.fc2_bias.index_select(0, _experts_of(pairs))).sum(dim=1, dtype=weight_grad.dtype)
    input_grad = grouped_mm(hidden_grad, weights.fc1, _ends(pairs))
    work = WeightWork(pairs, source, output_rows, output_grad, hidden_grad, activated, pair_weights, weights)
    if grads is not None:
        weight_gradients(work, grads)
        return input_grad, weight_grad, None
    return input_grad, weight_grad, work


def _weight_gradients_grouped(work: WeightWork, grads: WeightGrads) -> None:
    pairs = work.pairs
    x = work.source.index_select(0, pairs.rows)
    dy = work.output_grad.index_select(0, work.output_rows)
    ends = _ends(pairs)
    grads.add_all(grouped_mm(work.hidden_grad.t(), x, ends), grouped_mm(dy.t(), work.activated, ends))
    if grads.fc1_bias is not None and grads.fc2_bias is not None:
        experts = _experts_of(pairs)
        grads.fc1_bias.index_add_(0, experts, work.hidden_grad)
        grads.fc2_bias.index_add_(0, experts, dy * work.pair_weights.to(dy.dtype).unsqueeze(1))


# ---------------------------------------------------------------------------------------------------------------------
# The parameters
# ---------------------------------------------------------------------------------------------------------------------


class StackedLinear(torch.nn.Module):
    """The weights [E, out, in] (and biases [E, out]) of one linear layer of each expert."""

    def __init__(self, shape: tuple[int, int, int], with_bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(shape, dtype=dtype))
        self.bias = torch.nn.Parameter(torch.zeros(shape[:2], dtype=dtype)) if with_bias else None

    def forward(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The parameters. A call, because Megatron's DDP finishes gathering a module's parameters before its forward."""
        return self.weight, self.bias


class StackedExperts(MegatronModule):
    """This rank's routed experts. Holds the parameters; the layer's schedule computes with them.

    Raises ValueError for an expert that cannot be split over the expert tensor ranks.
    """

    def __init__(self, num_local_experts: int, config: TransformerConfig, activation: str, pg_collection: ProcessGroupCollection) -> None:
        super().__init__(config=config)
        self.num_local_experts, self.activation = num_local_experts, activation
        self.ep_group, self.tensor_group, self.data_group = pg_collection.ep, pg_collection.expt_tp, pg_collection.expt_dp
        parts = self.tensor_group.size()
        width = config.moe_ffn_hidden_size
        if width % parts:
            raise ValueError(f"moe_ffn_hidden_size ({width}) must be divisible by the expert tensor parallel size ({parts})")
        if config.add_bias_linear and parts > 1:
            raise ValueError(f"experts with biases cannot be split over {parts} expert tensor ranks. Use expert tensor parallel size 1.")
        width //= parts
        outer, size = hidden_factor(activation) * width, config.hidden_size
        with_bias, dtype = config.add_bias_linear, config.params_dtype
        self.linear_fc1 = StackedLinear((num_local_experts, outer, size), with_bias, dtype)
        self.linear_fc2 = StackedLinear((num_local_experts, size, width), with_bias, dtype)
        if config.perform_initialization:
            for weight in self.linear_fc1.weight.detach():
                config.init_method(weight)
            for weight in self.linear_fc2.weight.detach():
                config.output_layer_init_method(weight)
        for name, parameter in self.named_parameters():
            # Megatron reduces the gradient of such a parameter over the expert data parallel ranks ...
            parameter.allreduce = config.expert_model_parallel_size == 1  # type: ignore[attr-defined]
            # ... and counts it in the gradient norm on every tensor rank: even unsplit, each holds other experts.
            dim = 2 if name == "linear_fc2.weight" else 1
            stride = hidden_factor(activation) if name.startswith("linear_fc1") else 1
            set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=dim, stride=stride)

    def forward(self) -> Weights:
        """The parameters as the functions of this file take them."""
        (fc1, fc1_bias), (fc2, fc2_bias) = self.linear_fc1(), self.linear_fc2()
        return Weights(fc1, fc2, fc1_bias, fc2_bias, self.activation)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None) -> Any:
        """One entry per parameter; its global tensor has all experts in its first dimension (after the sharded ones)."""
        gated = hidden_factor(self.activation) == 2
        axes = {"linear_fc1.weight": 1, "linear_fc2.weight": 2, "linear_fc1.bias": 1, "linear_fc2.bias": None}
        result = {}
        for name, parameter in self.named_parameters():
            make = _sharded_halves if gated and name.startswith("linear_fc1") else _sharded
            result[f"{prefix}{name}"] = make(
                # The name that Megatron's SequentialMLP gives to the same tensor.
                f"{prefix}experts.{name}",
                parameter,
                sharded_offsets,
                (self.ep_group.rank(), self.ep_group.size()),
                axes[name],
                (self.tensor_group.rank(), self.tensor_group.size()),
                (0, 0, self.data_group.rank()),
            )
        return result


def _offsets(prepended: tuple[Any, ...], expert_part: tuple[int, int], axis: int | None, tensor_part: tuple[int, int]) -> list[Any]:
    first = len(prepended)
    split = [(first + axis, *tensor_part)] if axis is not None and tensor_part[1] > 1 else []
    return [*prepended, (first, *expert_part), *split]


def _sharded(
    key: str,
    tensor: torch.Tensor,
    prepended: tuple[Any, ...],
    expert_part: tuple[int, int],
    axis: int | None,
    tensor_part: tuple[int, int],
    replica_id: tuple[int, ...],
) -> ShardedTensor:
    offsets = _offsets(prepended, expert_part, axis, tensor_part)
    return ShardedTensor.from_rank_offsets(key, tensor, *offsets, replica_id=replica_id, prepend_axis_num=len(prepended))


def _sharded_halves(
    key: str,
    tensor: torch.Tensor,
    prepended: tuple[Any, ...],
    expert_part: tuple[int, int],
    axis: int | None,
    tensor_part: tuple[int, int],
    replica_id: tuple[int, ...],
) -> ShardedTensor | ShardedTensorFactory:
    # A tensor rank holds a part of the gate and a part of the up projection, which lie apart in the global tensor.
    rank, size = tensor_part
    if size == 1:
        return _sharded(key, tensor, prepended, expert_part, axis, tensor_part, replica_id)

    def build(key: str, tensor: torch.Tensor, replica_id: tuple[int, ...], flattened_range: slice | None) -> list[ShardedTensor]:
        assert flattened_range is None
        return [
            _sharded(key, half, prepended, expert_part, axis, (rank + size * i, 2 * size), replica_id)
            for i, half in enumerate(tensor.chunk(2, dim=1))
        ]

    return ShardedTensorFactory(key, tensor, build, lambda halves: torch.cat(halves, dim=1), replica_id)
