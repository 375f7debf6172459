"""The memory of a computation with a backward pass, operation by operation, without computing anything.

It does what autograd does: an operation keeps tensors for its backward pass; going back, each operation makes the
gradients of its inputs, then lets go of its output's gradient and of what it kept. A tensor is its bytes and how many
hold it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


class TapeTensor:
    """Bytes that are in use until everybody who holds them has let go. A view (of `base`) is a part of another
    tensor's."""

    __slots__ = ("bytes", "holders", "base")

    def __init__(self, num_bytes: int, base: TapeTensor | None = None) -> None:
        self.bytes, self.holders, self.base = num_bytes, 1, base


@dataclass(frozen=True)
class OperationBytes:
    """Bytes that an operation takes beside the tensors that it names."""

    kept: int = 0  # of its own, for the backward pass
    during: int = 0  # what the forward pass takes on top and gives back
    # The most that the backward pass takes on top of what is there when it starts, where that is more than the results.
    work: int | None = None
    weight: int = 0  # its weights' gradients
    weight_waits: bool = False  # until the end: another operation has the same weights
    made: int = 0  # its weights' gradients, where the forward pass makes them


@dataclass
class _Operation:
    outputs: Sequence[TapeTensor]
    inputs: Sequence[TapeTensor]  # get gradients of their own
    passes: Sequence[TapeTensor]  # get that of the output, the same memory
    kept: list[TapeTensor]
    takes: OperationBytes = OperationBytes()
    made: Sequence[tuple[TapeTensor, TapeTensor]] = ()  # inputs with gradients that the forward pass has made
    weight: TapeTensor | None = None  # its weights' gradients, which the forward pass has made
    is_layer: bool = False
    away: int = 0  # bytes of its input on the host


@dataclass(frozen=True)
class MemoryProfile:
    """A forward pass and its backward pass: bytes above what was there before it."""

    forward: int  # most during the forward pass
    kept: int  # between the passes
    backward: int  # most during the backward pass, with what was kept


@dataclass
class Tape:
    """Records operations as they are applied; `backward` undoes them. `now` and `peak` are bytes; `leaving` is on
    its way to the host."""

    keeps: bool = True  # false: there will be no backward pass
    now: int = 0
    peak: int = 0
    _operations: list[_Operation] = field(default_factory=list)
    leaving: TapeTensor | None = None

    def new(self, num_bytes: int) -> TapeTensor:
        """A tensor that the caller holds."""
        self.now += num_bytes
        self.peak = max(self.peak, self.now)
        return TapeTensor(num_bytes)

    def hold(self, tensor: TapeTensor) -> TapeTensor:
        """One more holder."""
        (tensor.base or tensor).holders += 1
        return tensor

    def drop(self, *tensors: TapeTensor) -> None:
        """One holder less."""
        for tensor in tensors:
            root = tensor.base or tensor
            root.holders -= 1
            if root.holders == 0:
                self.now -= root.bytes

    def use(self, num_bytes: int) -> None:
        """Take memory and give it back at once."""
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
        """One operation with `output` bytes, which the caller holds.

        `inputs` get gradients of their own in the backward pass, `passes` that of the output itself. `keeps` are held
        for it. Gradients of `makes` are made now.
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
        """The last operation was a layer that keeps its input alone; `leaves`: on the host, from the next layer's end
        until the layer above goes back."""
        self._settle()
        layer = self._operations[-1]
        layer.is_layer = True
        if leaves:
            layer.kept.remove(tensor)
            layer.away, self.leaving = tensor.bytes, tensor

    def _settle(self) -> None:
        if self.leaving is not None:
            self.drop(self.leaving)
        self.leaving = None

    def _come_back(self, layer: _Operation) -> None:
        """It has its input, and that of the layer below is on its way."""
        if layer.away and self.leaving is not None:  # it has not left
            layer.kept.append(self.leaving)
            layer.away, self.leaving = 0, None
        self._settle()
        below = next((each for each in reversed(self._operations) if each.is_layer), layer)
        for each in (layer, below):
            if each.away:
                each.kept.append(self.new(each.away))
                each.away = 0

    def split(self, tensor: TapeTensor, *parts: int) -> list[TapeTensor]:
        """Views of parts of a tensor; nobody needs to drop them. Going back, the parts' gradients are copied into
        one."""
        root = tensor.base or tensor
        views = [TapeTensor(part, root) for part in parts]
        self._operations.append(_Operation(views, [tensor], [], []))
        return views

    def backward(self, output: TapeTensor) -> None:
        """Go all the way back from `output`, whose gradient has as many bytes."""
        gradients: dict[TapeTensor, TapeTensor] = {output: self.new(output.bytes)}
        waiting: list[TapeTensor] = []
        while self._operations:
            operation = self._operations.pop()
            if operation.is_layer:
                self._come_back(operation)
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
            for tensor, part in below:
                other = gradients.get(tensor)
                if other is not None:
                    gradients[tensor] = self.new(part.bytes)
                    self.drop(other, part)
                else:
                    gradients[tensor] = part
            if operation.takes.weight_waits:
                waiting.append(weight)
            else:
                self.drop(weight)
        self.drop(*gradients.values(), *waiting)


Function = Callable[..., TapeTensor]


def recomputed(tape: Tape, function: Function, *inputs: TapeTensor) -> TapeTensor:
    """`function(tape, *inputs)` under activation checkpointing: its inputs are kept, and its forward pass runs again in
    the backward."""
    first = Tape(keeps=False)
    output = function(first, *(first.new(tensor.bytes) for tensor in inputs))
    there = sum(tensor.bytes for tensor in inputs)
    second = profile(function, *inputs)
    work = max(second.forward, second.backward)
    takes = OperationBytes(during=max(0, first.peak - there - output.bytes), work=work)
    return tape.apply(output.bytes, inputs, keeps=inputs, takes=takes)


def profile(function: Function, *inputs: TapeTensor) -> MemoryProfile:
    """What `function(tape, *inputs)` takes, beside its inputs and the gradient of its output."""
    tape = Tape()
    output = function(tape, *(tape.new(tensor.bytes) for tensor in inputs))
    there = sum(tensor.bytes for tensor in inputs)
    forward, kept = tape.peak - there, tape.now - there
    tape.peak = 0
    tape.backward(output)
    return MemoryProfile(forward, kept, max(kept, tape.peak - there - output.bytes))
