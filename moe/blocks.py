"""One expert's rows on the host, in blocks that stay near the core: by torch's operations, or by the compiled kernels.

Shapes: n rows of a block, H hidden size, F width of this rank's part of an expert, G = 2 F for SwiGLU ([gate | up]) else F.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import TracebackType
from typing import NamedTuple

import torch

from moe import kernels
from moe.plan import Load
from moe.weights import WeightGrads, Weights, WeightWork
from moe.workspace import WORKSPACE

# Rows that go through an expert at once on the host, so that the activations between the two products stay near the core.
# Measured with one thread of a Xeon with AMX, bf16, hidden 512, forward and backward: 32 experts of width 256, 164 ms with
# blocks of 256 rows, 141 with 512, 128 with 1024 and 127 with 2048; 8 experts of width 1024: 224, 184, 171, 175.
BLOCK_ROWS = 1024
STEP_ROWS = 16  # in half precision a block's rows are computed in multiples of it
SPARE_ROWS = 64  # behind the rows of a buffer that blocks are written to: a block may be written longer than it is


class Block(NamedTuple):
    """Consecutive pairs of one expert."""

    expert: int
    start: int
    end: int


def cut(counts: list[int]) -> Iterator[Block]:
    """Consecutive blocks of about equal size, at most BLOCK_ROWS pairs each."""
    start = 0
    for expert, count in enumerate(counts):
        num_blocks = -(-count // BLOCK_ROWS)
        for i in range(num_blocks):
            yield Block(expert, start + count * i // num_blocks, start + count * (i + 1) // num_blocks)
        start += count


def padded(count: int, dtype: torch.dtype) -> int:
    """Rows to compute for a block of `count`: in half precision a little more, so that few different sizes occur.

    For each new size oneDNN compiles a kernel: 1.7 to 2.3 ms against 0.2 to 0.5 ms for the product itself (512 x 512 bf16), and
    counts change with every step, so that a layer would do little else. There are 64 sizes up to 1024 rows.
    """
    return -(-count // STEP_ROWS) * STEP_ROWS if dtype in (torch.bfloat16, torch.float16) else count


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
    if kernels.has(out):
        kernels.activate(activation, hidden, out)
        return out
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
    if kernels.has(out):
        return kernels.activate_backward(activation, hidden, grad, pair_weights, out, activated)
    column = pair_weights.to(grad.dtype).unsqueeze(1)
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
# Scratch memory, in numbers of the load's kind, for blocks of up to `rows`
# ---------------------------------------------------------------------------------------------------------------------


def forward_scratch(load: Load, rows: int, own_hidden: bool) -> int:
    """Of the forward pass; `own_hidden`: nobody else has room for what goes into the activation."""
    if load.tiled:
        return -(-kernels.forward_bytes(rows, load.hidden_size, load.width, load.hidden_columns) // load.element_size)
    return rows * (load.hidden_size + load.width + (load.hidden_columns if own_hidden else 0))


def input_scratch(load: Load, rows: int, recompute: bool) -> int:
    """Of the input gradients."""
    if load.tiled:
        return -(-kernels.backward_bytes(rows, load.hidden_size, load.width, load.hidden_columns, recompute, False) // load.element_size)
    return rows * (load.hidden_size + load.width + (load.hidden_size + load.hidden_columns if recompute else 0))


def weight_scratch(load: Load, rows: int) -> int:
    """Of the weight gradients."""
    if load.tiled:
        return -(-kernels.weights_bytes(rows, load.hidden_size, load.width, load.hidden_columns) // load.element_size)
    return 2 * rows * load.hidden_size


def both_scratch(load: Load, rows: int, recompute: bool) -> int:
    """Of both gradients, computed one after the other for each block."""
    if load.tiled:
        return -(-kernels.backward_bytes(rows, load.hidden_size, load.width, load.hidden_columns, recompute, True) // load.element_size)
    return rows * (2 * load.hidden_size + 2 * load.width + load.hidden_columns * (2 if recompute else 1))


# ---------------------------------------------------------------------------------------------------------------------
# The blocks of one call
# ---------------------------------------------------------------------------------------------------------------------


def are_tiled(device: str, dtype: torch.dtype, hidden_size: int, width: int) -> bool:
    """Whether the compiled kernels compute the blocks of such experts by tiles."""
    return device == "cpu" and kernels.has_tiles(torch.empty(0, dtype=dtype), hidden_size, width)


def of(weights: Weights, source: torch.Tensor, counts: list[int]) -> Blocks:
    """The blocks of pairs sorted by expert, `counts` of each, that read rows of `source` [.., H]; a context that holds their memory."""
    same = weights.fc1.dtype is source.dtype and weights.fc1.is_contiguous() and weights.fc2.is_contiguous()
    kind = CompiledBlocks if same and kernels.has_blocks(source, source.size(1), weights.fc2.size(2)) else TorchBlocks
    return kind(weights, source, counts)


class Blocks:
    """The three passes over the blocks, and what they have in common."""

    def __init__(self, weights: Weights, source: torch.Tensor, counts: list[int]) -> None:
        self.weights, self.source = weights, source
        self._blocks = list(cut(counts))
        self.longest = max((padded(block.end - block.start, source.dtype) for block in self._blocks), default=0)
        self._scratch: dict[str, torch.Tensor] = {}

    def __enter__(self) -> Blocks:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        WORKSPACE.give(*self._scratch.values())
        self._scratch.clear()

    def forward(self, rows: torch.Tensor, hidden: torch.Tensor | None, output: torch.Tensor) -> None:
        """Write `output`, and `hidden` if given; `rows` are those of `source` that the pairs read."""
        raise NotImplementedError

    def input_gradients(
        self, work: WeightWork, hidden: torch.Tensor | None, weight_grad: torch.Tensor, input_grad: torch.Tensor, grads: WeightGrads | None
    ) -> None:
        """Write `weight_grad` and `input_grad`; `hidden` is what `forward` wrote, None computes it again.

        Without `grads` `work` is written too; with them the weight gradients are added now, and `work` has room for one block.
        """
        raise NotImplementedError

    def weight_gradients(self, work: WeightWork, grads: WeightGrads) -> None:
        """Add to the weight gradients."""
        raise NotImplementedError

    def rows_of_work(self, later: bool) -> int:
        """Rows that `work` must have; `later`: the weight gradients are not computed at once."""
        return sum(block.end - block.start for block in self._blocks) + SPARE_ROWS if later else self.longest

    def _room(self, name: str, columns: int) -> torch.Tensor:
        """Scratch memory [longest block, columns]."""
        if name not in self._scratch:
            self._scratch[name] = WORKSPACE.take((self.longest, columns), self.source)
        return self._scratch[name]


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
    if bias is None:
        return torch.mm(x, weight.t(), out=out)
    return torch.addmm(bias, x, weight.t(), out=out)


def _bias_of(bias: torch.Tensor | None, expert: int) -> torch.Tensor | None:
    return None if bias is None else bias[expert]


class TorchBlocks(Blocks):
    """By torch's operations: on any host and in any precision."""

    def __init__(self, weights: Weights, source: torch.Tensor, counts: list[int]) -> None:
        super().__init__(weights, source, counts)
        self._fc1, self._fc2 = weights.fc1.unbind(0), weights.fc2.unbind(0)

    def _gather(self, name: str, source: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """These rows of `source`, then zeros."""
        scratch, length = self._room(name, source.size(1)), padded(len(rows), source.dtype)
        torch.index_select(source, 0, rows, out=scratch[: len(rows)])
        if length > len(rows):
            scratch[len(rows) : length].zero_()
        return scratch[:length]

    def _hidden(self, x: torch.Tensor, expert: int, out: torch.Tensor) -> torch.Tensor:
        return _linear(x, self._fc1[expert], _bias_of(self.weights.fc1_bias, expert), out[: len(x)])

    def forward(self, rows: torch.Tensor, hidden: torch.Tensor | None, output: torch.Tensor) -> None:
        """See Blocks."""
        for expert, start, end in self._blocks:
            # What a block writes beyond its end, the next one overwrites.
            x = self._gather("x", self.source, rows[start:end])
            h = self._hidden(x, expert, self._room("hidden", self.weights.fc1.size(1)) if hidden is None else hidden[start:])
            activated = activate(self.weights.activation, h, self._room("activated", self.weights.fc2.size(2))[: len(x)])
            _linear(activated, self._fc2[expert], _bias_of(self.weights.fc2_bias, expert), output[start : start + len(x)])

    def input_gradients(
        self, work: WeightWork, hidden: torch.Tensor | None, weight_grad: torch.Tensor, input_grad: torch.Tensor, grads: WeightGrads | None
    ) -> None:
        """See Blocks."""
        for expert, start, end in self._blocks:
            count, length = end - start, padded(end - start, self.source.dtype)
            first = start if grads is None else 0
            dh, a = work.hidden_grad[first : first + length], work.activated[first : first + length]
            if length > count:  # the products with zero rows must be zero, not NaN
                dh[count:].zero_()
                a[count:].zero_()
            if hidden is None or grads is not None:
                x = self._gather("x", self.source, work.pairs.rows[start:end])
            h = self._hidden(x, expert, self._room("hidden", dh.size(1)))[:count] if hidden is None else hidden[start:end]
            dy = self._gather("dy", work.output_grad, work.output_rows[start:end])
            grad = torch.mm(dy, self._fc2[expert], out=self._room("grad", a.size(1))[:length])
            pair_weights = work.pair_weights[start:end]
            weight_grad[start:end] = activate_backward(self.weights.activation, h, grad[:count], pair_weights, dh[:count], a[:count])
            if self.weights.fc2_bias is not None:
                # The weight also multiplies the bias.
                weight_grad[start:end] += torch.mv(dy[:count], self.weights.fc2_bias[expert])
            torch.mm(dh, self._fc1[expert], out=input_grad[start : start + length])
            if grads is not None:
                grads.add(expert, dh, x, dy, a)
                grads.add_biases(expert, dh[:count], dy[:count], pair_weights)

    def weight_gradients(self, work: WeightWork, grads: WeightGrads) -> None:
        """See Blocks."""
        for expert, start, end in self._blocks:
            x = self._gather("x", self.source, work.pairs.rows[start:end])
            dy = self._gather("dy", work.output_grad, work.output_rows[start:end])
            # Beyond the block's end stand rows of the next one; they meet zeros.
            dh, a = work.hidden_grad[start : start + len(x)], work.activated[start : start + len(x)]
            grads.add(expert, dh, x, dy, a)
            grads.add_biases(expert, dh[: end - start], dy[: end - start], work.pair_weights[start:end])


class CompiledBlocks(Blocks):
    """By the compiled kernels, all blocks in one call."""

    def __init__(self, weights: Weights, source: torch.Tensor, counts: list[int]) -> None:
        super().__init__(weights, source, counts)
        self._tiled = kernels.has_tiles(source, source.size(1), weights.fc2.size(2))
        self._tile = STEP_ROWS if self._tiled else 1
        self._matrices = weights.fc1, weights.fc1_bias, weights.fc2, weights.fc2_bias, weights.activation

    def rows_of_work(self, later: bool) -> int:
        """See Blocks: tiles that are multiplied at once stay in the kernels' memory, but for what biases need."""
        return super().rows_of_work(later) if later or not self._tiled or self.weights.fc1_bias is not None else 0

    def _memory(self, columns: int, num_bytes: Callable[..., int], *variant: bool) -> torch.Tensor:
        """Scratch memory [longest block, columns], or as many bytes as computation by tiles needs."""
        size, width, outer = self.source.size(1), self.weights.fc2.size(2), self.weights.fc1.size(1)
        if not self._tiled:
            return self._room("memory", columns)
        self._scratch["memory"] = WORKSPACE.take((num_bytes(self.longest, size, width, outer, *variant),), self.source, torch.uint8)
        return self._scratch["memory"]

    def forward(self, rows: torch.Tensor, hidden: torch.Tensor | None, output: torch.Tensor) -> None:
        """See Blocks."""
        columns = self.source.size(1) + self.weights.fc2.size(2) + (self.weights.fc1.size(1) if hidden is None else 0)
        memory = self._memory(columns, kernels.forward_bytes)
        kernels.forward_blocks(_numbers(self._blocks), self._tile, self.source, rows, *self._matrices, hidden, output, memory)

    def input_gradients(
        self, work: WeightWork, hidden: torch.Tensor | None, weight_grad: torch.Tensor, input_grad: torch.Tensor, grads: WeightGrads | None
    ) -> None:
        """See Blocks."""
        again, now = hidden is None, grads is not None
        columns = self.source.size(1) * (2 if again or now else 1) + self.weights.fc2.size(2) + (self.weights.fc1.size(1) if again else 0)
        memory = self._memory(columns, kernels.backward_bytes, again, now)
        inputs = self.source, work.pairs.rows, work.output_grad, work.output_rows, work.pair_weights, *self._matrices, hidden
        kept = (work.hidden_grad, work.activated) if len(work.hidden_grad) else (None, None)
        outputs = *kept, weight_grad, input_grad, *((None, None) if grads is None else (grads.fc1, grads.fc2)), memory
        if grads is None or grads.fc1_bias is None:
            kernels.backward_blocks(_numbers(self._blocks, grads), self._tile, *inputs, *outputs)
            return
        for block in self._blocks:
            kernels.backward_blocks(_numbers([block], grads), self._tile, *inputs, *outputs)
            self._add_biases(block, work, work.hidden_grad, grads)

    def weight_gradients(self, work: WeightWork, grads: WeightGrads) -> None:
        """See Blocks."""
        inputs = self.source, work.pairs.rows, work.output_grad, work.output_rows, work.hidden_grad, work.activated
        memory = self._memory(2 * self.source.size(1), kernels.weights_bytes)
        kernels.weights_blocks(_numbers(self._blocks, grads), self._tile, *inputs, grads.fc1, grads.fc2, memory)
        for block in self._blocks if grads.fc1_bias is not None else ():
            self._add_biases(block, work, work.hidden_grad[block.start :], grads)

    @staticmethod
    def _add_biases(block: Block, work: WeightWork, hidden_grad: torch.Tensor, grads: WeightGrads) -> None:
        expert, start, end = block
        output_grad = work.output_grad.index_select(0, work.output_rows[start:end])
        grads.add_biases(expert, hidden_grad[: end - start], output_grad, work.pair_weights[start:end])


def _numbers(of_blocks: list[Block], grads: WeightGrads | None = None) -> list[int]:
    """The blocks as the kernels take them; with `grads`, for contributions that are made now."""
    return [number for block in of_blocks for number in (*block, 0 if grads is None else int(grads.mark(block.expert)))]
