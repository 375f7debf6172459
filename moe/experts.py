"""Routed experts with stacked weights: forward, and a backward pass in two parts.

Input gradients come first, weight gradients separately, so that a schedule can send the former before it computes the
latter. Rows come sorted by expert; nothing is padded, an expert without rows costs nothing.

Shapes: n pairs of a row and an expert, H hidden size, F width of this rank's part of an expert, G = 2 F for SwiGLU
([gate | up]) else F, E experts of this rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from moe.workspace import WORKSPACE

# Rows that go through an expert at once on the host, so that the activations between the two products stay near the core.
# Measured with one thread of a Xeon with AMX, bf16, hidden 512, forward and backward: 32 experts of width 256, 164 ms with
# blocks of 256 rows, 141 with 512, 128 with 1024 and 127 with 2048; 8 experts of width 1024: 224, 184, 171, 175.
BLOCK_ROWS = 1024
SPARE_ROWS = 64  # behind the rows of a buffer that blocks are written to: a block may be written longer than it is


@dataclass(frozen=True)
class Weights:
    """One layer's stacked expert weights on this rank, and the activation between them (swiglu, gelu or gelu_tanh)."""

    fc1: torch.Tensor  # [E, G, H]
    fc2: torch.Tensor  # [E, H, F]
    fc1_bias: torch.Tensor | None  # [E, G]
    fc2_bias: torch.Tensor | None  # [E, H]
    activation: str


@dataclass(frozen=True)
class Pairs:
    """Pairs of a row and an expert, sorted by expert."""

    rows: torch.Tensor  # [n] int64: which row of the source a pair reads
    counts: torch.Tensor  # [E] int64 pairs per expert, on the device
    host_counts: list[int] | None  # the same on the host; None on a GPU, where the grouped product needs no host


@dataclass
class WeightWork:
    """What is left to do for one chunk once its input gradients are out: see `weight_gradients`."""

    pairs: Pairs
    source: torch.Tensor
    output_rows: torch.Tensor  # [n] row of `output_grad` that each pair reads
    output_grad: torch.Tensor
    hidden_grad: torch.Tensor  # [at least n, G]
    activated: torch.Tensor  # [at least n, F] times the pair's weight
    pair_weights: torch.Tensor  # [n]

    def free(self) -> None:
        """Hand back the memory; `weight_gradients` does so itself."""
        WORKSPACE.give(self.hidden_grad, self.activated)


class WeightGrads:
    """Gradients of one layer's weights; the first contribution to an expert is written, later ones are added."""

    def __init__(self, weights: Weights) -> None:
        self.fc1, self.fc2 = WORKSPACE.lend(weights.fc1), WORKSPACE.lend(weights.fc2)
        self.fc1_bias = None if weights.fc1_bias is None else torch.zeros_like(weights.fc1_bias)
        self.fc2_bias = None if weights.fc2_bias is None else torch.zeros_like(weights.fc2_bias)
        self._written = [False] * len(self.fc1)
        self._views = (self.fc1.unbind(0), self.fc2.unbind(0))

    def add(self, expert: int, hidden_grad: torch.Tensor, x: torch.Tensor, output_grad: torch.Tensor, activated: torch.Tensor) -> None:
        """Add `hidden_grad^T x` and `output_grad^T activated` to an expert's gradients."""
        for gradient, left, right in ((self._views[0][expert], hidden_grad, x), (self._views[1][expert], output_grad, activated)):
            if self._written[expert]:
                gradient.addmm_(left.t(), right)
            else:
                torch.mm(left.t(), right, out=gradient)
        self._written[expert] = True

    def add_grouped(
        self, hidden_grad: torch.Tensor, x: torch.Tensor, output_grad: torch.Tensor, activated: torch.Tensor, ends: Any
    ) -> None:
        """The same for all experts at once, rows grouped by `ends`."""
        products = grouped_mm(hidden_grad.t(), x, ends), grouped_mm(output_grad.t(), activated, ends)
        if self._written[0]:
            self.fc1 += products[0]
            self.fc2 += products[1]
        else:
            self.fc1, self.fc2 = products
        self._written = [True] * len(self._written)

    def finish(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """All gradients (fc1, fc2 and their biases); those of experts without rows are zero."""
        for expert, written in enumerate(self._written):
            if not written:
                self.fc1[expert].zero_()
                self.fc2[expert].zero_()
        return self.fc1, self.fc2, self.fc1_bias, self.fc2_bias


# ---------------------------------------------------------------------------------------------------------------------
# Activation functions, written into memory that is there already
# ---------------------------------------------------------------------------------------------------------------------


def hidden_factor(activation: str) -> int:
    """G / F: 2 where the first matrix makes a gate and a value, else 1."""
    return 2 if activation == "swiglu" else 1


def _approximate(activation: str) -> str:
    return "tanh" if activation == "gelu_tanh" else "none"


def activate(activation: str, hidden: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """`out` [n, F] = the activation of `hidden` [n, G]."""
    if activation == "swiglu":
        gate, up = hidden.chunk(2, dim=1)
        return torch.ops.aten.silu.out(gate, out=out).mul_(up)
    return torch.ops.aten.gelu.out(hidden, approximate=_approximate(activation), out=out)


def activate_backward(
    activation: str, hidden: torch.Tensor, grad: torch.Tensor, pair_weights: torch.Tensor, out: torch.Tensor, activated: torch.Tensor
) -> torch.Tensor:
    """Undo `activate` and the pair's weight after it.

    `grad` [n, F] is the gradient after the weight; it is overwritten. Fills `out` [n, G] with the gradient of `hidden` and
    `activated` [n, F] with the activation times the weight. Returns the weights' gradient [n], in fp32 or wider.
    """
    column = pair_weights.unsqueeze(1)
    wide = torch.promote_types(grad.dtype, torch.float32)
    if activation == "swiglu":
        gate, up = hidden.chunk(2, dim=1)
        gate_grad, up_grad = out.chunk(2, dim=1)
        torch.ops.aten.silu.out(gate, out=up_grad)
        torch.mul(up_grad, up, out=activated)
        weight_grad = torch.mul(grad, activated, out=gate_grad).sum(dim=1, dtype=wide)
        grad.mul_(column)
        up_grad.mul_(grad)
        torch.ops.aten.silu_backward.grad_input(grad.mul_(up), gate, grad_input=gate_grad)
    else:
        torch.ops.aten.gelu.out(hidden, approximate=_approximate(activation), out=activated)
        weight_grad = torch.mul(grad, activated, out=out).sum(dim=1, dtype=wide)
        torch.ops.aten.gelu_backward.grad_input(grad.mul_(column), hidden, approximate=_approximate(activation), grad_input=out)
    activated.mul_(column)
    return weight_grad


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


def _blocks(counts: list[int]) -> Iterator[tuple[int, int, int]]:
    """(expert, first pair, end) of consecutive blocks of about equal size, at most BLOCK_ROWS pairs each."""
    start = 0
    for expert, count in enumerate(counts):
        num_blocks = -(-count // BLOCK_ROWS)
        for i in range(num_blocks):
            yield expert, start + count * i // num_blocks, start + count * (i + 1) // num_blocks
        start += count


def _length(count: int, dtype: torch.dtype) -> int:
    """Rows to compute for a block of `count`: in half precision a little more, so that few different sizes occur.

    For each new size oneDNN compiles a kernel: 1.7 to 2.3 ms against 0.2 to 0.5 ms for the product itself (512 x 512 bf16), and
    counts change with every step, so that a layer would do little else. There are 36 sizes up to 1024 rows. Steps of 64 above 512
    rows made 28, and a layer with 512 pairs per expert perhaps 1.5% slower (within noise).
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return count
    step = 16 if count <= 128 else 32
    return -(-count // step) * step


def _longest_block(counts: list[int], dtype: torch.dtype) -> int:
    return max((_length(end - start, dtype) for _, start, end in _blocks(counts)), default=0)


def _gather(source: torch.Tensor, rows: torch.Tensor, scratch: torch.Tensor, length: int) -> torch.Tensor:
    """The first `length` rows of `scratch`: these rows of `source`, then zeros."""
    torch.index_select(source, 0, rows, out=scratch[: len(rows)])
    if length > len(rows):
        scratch[len(rows) : length].zero_()
    return scratch[:length]


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
    if bias is None:
        return torch.mm(x, weight.t(), out=out)
    return torch.addmm(bias, x, weight.t(), out=out)


def _bias_of(bias: torch.Tensor | None, expert: int) -> torch.Tensor | None:
    return None if bias is None else bias[expert]


# ---------------------------------------------------------------------------------------------------------------------
# Forward and backward
# ---------------------------------------------------------------------------------------------------------------------


def forward(weights: Weights, source: torch.Tensor, pairs: Pairs, hidden: torch.Tensor | None) -> torch.Tensor:
    """Each pair's expert output, not yet weighted, in the first n rows of a tensor [at least n, H] from the workspace.

    `source` [rows, H] holds the inputs. `hidden` [n + SPARE_ROWS, G], if given, receives what goes into the activation.
    """
    if pairs.host_counts is None:
        return _forward_grouped(weights, source, pairs, hidden)
    n, width, size = len(pairs.rows), weights.fc2.size(2), source.size(1)
    fc1, fc2 = weights.fc1.unbind(0), weights.fc2.unbind(0)
    block = _longest_block(pairs.host_counts, source.dtype)
    output = WORKSPACE.take((n + SPARE_ROWS, size), source)
    x, activated = WORKSPACE.take((block, size), source), WORKSPACE.take((block, width), source)
    scratch = None if hidden is not None else WORKSPACE.take((block, weights.fc1.size(1)), source)
    for expert, start, end in _blocks(pairs.host_counts):
        # What a block writes beyond its end, the next one overwrites.
        length = _length(end - start, source.dtype)
        h = hidden[start : start + length] if hidden is not None else scratch[:length]  # type: ignore[index]
        _linear(_gather(source, pairs.rows[start:end], x, length), fc1[expert], _bias_of(weights.fc1_bias, expert), h)
        activate(weights.activation, h, activated[:length])
        _linear(activated[:length], fc2[expert], _bias_of(weights.fc2_bias, expert), output[start : start + length])
    WORKSPACE.give(x, activated, scratch)
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
    n, width, size, outer = len(pairs.rows), weights.fc2.size(2), source.size(1), weights.fc1.size(1)
    fc1, fc2 = weights.fc1.unbind(0), weights.fc2.unbind(0)
    block = _longest_block(pairs.host_counts, source.dtype)
    later = grads is None
    input_grad = WORKSPACE.take((n + SPARE_ROWS, size), source)
    weight_grad = WORKSPACE.take((n,), source, torch.promote_types(source.dtype, torch.float32))
    rows = n + SPARE_ROWS if later else block
    hidden_grad, activated = WORKSPACE.take((rows, outer), source), WORKSPACE.take((rows, width), source)
    x, dy, grad = WORKSPACE.take((block, size), source), WORKSPACE.take((block, size), source), WORKSPACE.take((block, width), source)
    scratch = WORKSPACE.take((block, outer), source) if hidden is None else None
    for expert, start, end in _blocks(pairs.host_counts):
        count, length = end - start, _length(end - start, source.dtype)
        first = start if later else 0
        dh, a = hidden_grad[first : first + length], activated[first : first + length]
        if length > count:  # the products with zero rows must be zero, not NaN
            dh[count:].zero_()
            a[count:].zero_()
        if hidden is None or grads is not None:
            _gather(source, pairs.rows[start:end], x, length)
        if hidden is None:
            h = _linear(x[:length], fc1[expert], _bias_of(weights.fc1_bias, expert), scratch[:length])[:count]  # type: ignore[index]
        else:
            h = hidden[start:end]
        _gather(output_grad, output_rows[start:end], dy, length)
        torch.mm(dy[:length], fc2[expert], out=grad[:length])
        weight_grad[start:end] = activate_backward(weights.activation, h, grad[:count], pair_weights[start:end], dh[:count], a[:count])
        if weights.fc2_bias is not None:
            # The weight also multiplies the bias.
            weight_grad[start:end] += torch.mv(dy[:count], weights.fc2_bias[expert])
        torch.mm(dh, fc1[expert], out=input_grad[start : start + length])
        if grads is not None:
            grads.add(expert, dh, x[:length], dy[:length], a)
            _add_biases(grads, expert, dh[:count], dy[:count], pair_weights[start:end])
    WORKSPACE.give(x, dy, grad, scratch)
    if later:
        return input_grad, weight_grad, WeightWork(pairs, source, output_rows, output_grad, hidden_grad, activated, pair_weights)
    WORKSPACE.give(hidden_grad, activated)
    return input_grad, weight_grad, None


def weight_gradients(work: WeightWork, grads: WeightGrads) -> None:
    """Add one chunk's part to the weight gradients, and free what the chunk held."""
    pairs, source = work.pairs, work.source
    if pairs.host_counts is None:
        _weight_gradients_grouped(work, grads)
        return
    block = _longest_block(pairs.host_counts, source.dtype)
    x, dy = WORKSPACE.take((block, source.size(1)), source), WORKSPACE.take((block, source.size(1)), source)
    for expert, start, end in _blocks(pairs.host_counts):
        length = _length(end - start, source.dtype)
        _gather(source, pairs.rows[start:end], x, length)
        _gather(work.output_grad, work.output_rows[start:end], dy, length)
        # Beyond the block's end stand rows of the next one; they meet zeros.
        hidden_grad, activated = work.hidden_grad[start : start + length], work.activated[start : start + length]
        grads.add(expert, hidden_grad, x[:length], dy[:length], activated)
        _add_biases(grads, expert, hidden_grad[: end - start], dy[: end - start], work.pair_weights[start:end])
    WORKSPACE.give(x, dy)
    work.free()


def _add_biases(grads: WeightGrads, expert: int, hidden_grad: torch.Tensor, output_grad: torch.Tensor, pair_weights: torch.Tensor) -> None:
    if grads.fc1_bias is not None and grads.fc2_bias is not None:
        grads.fc1_bias[expert] += hidden_grad.sum(dim=0)
        grads.fc2_bias[expert] += torch.mv(output_grad.t(), pair_weights)


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
    work = WeightWork(pairs, source, output_rows, output_grad, hidden_grad, activated, pair_weights)
    if grads is not None:
        weight_gradients(work, grads)
        return input_grad, weight_grad, None
    return input_grad, weight_grad, work


def _weight_gradients_grouped(work: WeightWork, grads: WeightGrads) -> None:
    pairs = work.pairs
    x = work.source.index_select(0, pairs.rows)
    dy = work.output_grad.index_select(0, work.output_rows)
    grads.add_grouped(work.hidden_grad, x, dy, work.activated, _ends(pairs))
    if grads.fc1_bias is not None and grads.fc2_bias is not None:
        experts = _experts_of(pairs)
        grads.fc1_bias.index_add_(0, experts, work.hidden_grad)
        grads.fc2_bias.index_add_(0, experts, dy * work.pair_weights.unsqueeze(1))


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
