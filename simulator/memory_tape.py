"""Memory of a computation with a backward pass, counted operation by operation without computing.

The tape imitates autograd: an operation keeps tensors for its backward pass. In the backward pass each operation
creates the gradients of its inputs, then frees its output's gradient and the kept tensors. A tensor is a number of
bytes with a reference count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


class TapeTensor:
    """A tensor as a number of bytes with `holders` references. A view shares the bytes of its `base`."""

    __slots__ = ("bytes", "holders", "base")

    def __init__(self, num_bytes: int, base: TapeTensor | None = None) -> None:
        self.bytes, self.holders, self.base = num_bytes, 1, base


@dataclass(frozen=True)
class OperationBytes:
    """Bytes that an operation needs in addition to its inputs and outputs.

    `kept`: until the backward pass. `during`: temporary in the forward pass. `work`: peak of the backward pass.
    `weight`, `made`: gradients of weights that the backward or the forward pass computes.
    """

    kept: int = 0  # of its own, for the backward pass
    during: int = 0  # temporary, in the forward pass
    # Peak of the backward pass above its start, where that is more than its results.
    work: int | None = None
    weight: int = 0  # gradients of its weights
    weight_waits: bool = False  # these stay until the end: another operation has the same weights
    made: int = 0  # gradients of its weights, where the forward pass makes them


@dataclass
class _Operation:
    outputs: Sequence[TapeTensor]
    inputs: Sequence[TapeTensor]  # get gradients of their own
    passes: Sequence[TapeTensor]  # get the output's gradient itself
    kept: list[TapeTensor]
    takes: OperationBytes = OperationBytes()
    made: Sequence[tuple[TapeTensor, TapeTensor]] = ()  # inputs and gradients that the forward pass has made
    weight: TapeTensor | None = None  # gradients of its weights, which the forward pass has made
    is_layer: bool = False
    away: int = 0  # bytes of its input on the host


@dataclass(frozen=True)
class MemoryProfile:
    """Bytes of a forward and a backward pass in addition to the bytes allocated before."""

    forward: int  # peak of the forward pass
    kept: int  # between the passes
    backward: int  # peak of the backward pass, including `kept`


@dataclass
class Tape:
    """Records operations as they are applied; `backward` runs their backward passes.

    `now` and `peak` are bytes; `leaving` is the tensor that is being copied to the host.
    """

    keeps: bool = True  # false: there will be no backward pass
    now: int = 0
    peak: int = 0
    _operations: list[_Operation] = field(default_factory=list)
    leaving: TapeTensor | None = None

    def new(self, num_bytes: int) -> TapeTensor:
        """Allocate a tensor with one reference, which the caller must drop."""
        self.now += num_bytes
        self.peak = max(self.peak, self.now)
        return TapeTensor(num_bytes)

    def hold(self, tensor: TapeTensor) -> TapeTensor:
        """Add a reference to a tensor."""
        (tensor.base or tensor).holders += 1
        return tensor

    def drop(self, *tensors: TapeTensor) -> None:
        """Drop a reference to each tensor; a tensor without references is freed."""
        for tensor in tensors:
            root = tensor.base or tensor
            root.holders -= 1
            if root.holders == 0:
                self.now -= root.bytes

    def use(self, num_bytes: int) -> None:
        """Count memory that is allocated and freed again immediately."""
        self.peak = max(self.peak, self.now + num_bytes)

    def apply(
        self,
        output: int,
        inputs: Sequence[TapeTensor] = (),
        *,
        passes: Sequence[TapeTensor] = (),
        keeps: Sequence[TapeTensor] = (),
        keeps_output: bool = False,
        makes: Sequence[TapeTensor] = (),
        takes: OperationBytes = OperationBytes(),
    ) -> TapeTensor:
        """Apply an operation and return its output of `output` bytes, which the caller must drop.

        In the backward pass the `inputs` get gradients of their own, and `passes` share the output's gradient; `keeps`
        stay allocated until then. The forward pass already computes the gradients of `makes`. `takes`: all other bytes.
        """
        kept = [self.hold(tensor) for tensor in keeps] if self.keeps else []
        if takes.kept and self.keeps:
            kept.append(self.new(takes.kept))
        result = self.new(output)
        if keeps_output and self.keeps:
            kept.append(self.hold(result))
        made = [(tensor, self.new(tensor.bytes)) for tensor in makes] if self.keeps else []
        weight = self.new(takes.made) if takes.made and self.keeps else None
        self.use(takes.during)
        self._operations.append(_Operation([result], inputs, passes, kept, takes, made, weight))
        return result

    def end_layer(self, tensor: TapeTensor, leaves: bool) -> None:
        """Mark the last operation as a layer that keeps only its input.

        `leaves`: whether the input is on the host from the next layer's end until the backward pass of the layer above.
        """
        self._drop_leaving()
        layer = self._operations[-1]
        layer.is_layer = True
        if leaves:
            layer.kept.remove(tensor)
            layer.away, self.leaving = tensor.bytes, tensor

    def _drop_leaving(self) -> None:
        if self.leaving is not None:
            self.drop(self.leaving)
        self.leaving = None

    def _copy_back(self, layer: _Operation) -> None:
        """Count a layer's input as copied back to the device, and the input of the layer below as being fetched."""
        if layer.away and self.leaving is not None:  # it is still on the device
            layer.kept.append(self.leaving)
            layer.away, self.leaving = 0, None
        self._drop_leaving()
        below = next((each for each in reversed(self._operations) if each.is_layer), layer)
        for each in (layer, below):
            if each.away:
                each.kept.append(self.new(each.away))
                each.away = 0

    def split(self, tensor: TapeTensor, *sizes: int) -> list[TapeTensor]:
        """Return views of a tensor, which need no drop. The backward pass copies their gradients into one tensor."""
        root = tensor.base or tensor
        views = [TapeTensor(size, root) for size in sizes]
        self._operations.append(_Operation(views, [tensor], [], []))
        return views

    def backward(self, output: TapeTensor) -> None:
        """Run all backward passes, starting with a gradient of `output` of the same size."""
        gradients: dict[TapeTensor, TapeTensor] = {output: self.new(output.bytes)}
        waiting: list[TapeTensor] = []
        while self._operations:
            operation = self._operations.pop()
            if operation.is_layer:
                self._copy_back(operation)
            above = [gradients.pop(each) for each in operation.outputs]
            below = [(tensor, self.hold(above[0])) for tensor in operation.passes]
            below += operation.made
            if operation.takes.work is not None:
                self.use(operation.takes.work)
                self.drop(*above, *operation.kept)
            below += [(tensor, self.new(tensor.bytes)) for tensor in operation.inputs]
            weight = operation.weight or self.new(operation.takes.weight)
            if operation.takes.work is None:
                self.drop(*above, *operation.kept)
            for tensor, gradient in below:
                other = gradients.get(tensor)
                if other is not None:
                    gradients[tensor] = self.new(gradient.bytes)
                    self.drop(other, gradient)
                else:
                    gradients[tensor] = gradient
            if operation.takes.weight_waits:
                waiting.append(weight)
            else:
                self.drop(weight)
        self.drop(*gradients.values(), *waiting)


Function = Callable[..., TapeTensor]


def recomputed(tape: Tape, function: Function, *inputs: TapeTensor) -> TapeTensor:
    """Apply `function(tape, *inputs)` under activation checkpointing: keep the inputs, and recompute it in backward."""
    first = Tape(keeps=False)
    output = function(first, *(first.new(tensor.bytes) for tensor in inputs))
    there = sum(tensor.bytes for tensor in inputs)
    second = profile(function, *inputs)
    work = max(second.forward, second.backward)
    takes = OperationBytes(during=max(0, first.peak - there - output.bytes), work=work)
    return tape.apply(output.bytes, inputs, keeps=inputs, takes=takes)


def profile(function: Function, *inputs: TapeTensor) -> MemoryProfile:
    """Return the memory of `function(tape, *inputs)`, without its inputs and the gradient of its output."""
    tape = Tape()
    output = function(tape, *(tape.new(tensor.bytes) for tensor in inputs))
    there = sum(tensor.bytes for tensor in inputs)
    forward, kept = tape.peak - there, tape.now - there
    tape.peak = 0
    tape.backward(output)
    return MemoryProfile(forward, kept, max(kept, tape.peak - there - output.bytes))
