"""Work (FLOPs, bytes, collectives) of a block's forward and backward pass, counted over the blueprint's operations, and
the seconds that it takes on a given hardware."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from configs import derived
from configs.schema import Config
from models import blueprint
from models.blueprint.operation import (
    CONTEXT,
    CONTEXT_HEADS,
    EXPERT,
    EXPERT_TENSOR,
    TENSOR,
    ModelOperation,
    Tensor,
    unknown,
    walk,
)
from simulator.clock.axes import Group, collective, exchange
from simulator.clock.hardware import Hardware
from simulator.context.shared_rows import SharedRows
from simulator.flops import ATTENTION, OTHERS, PRODUCTS, has_fused_attention
from simulator.sizes import Sizes

# Device operations that the host launches in forward and backward pass, by kind; other kinds launch one each.
STARTED = {
    "add": (1, 0),
    "attention": (2, 3),
    "column_linear": (1, 2),
    "copy": (1, 0),
    "experts": (0, 0),
    "latent_attention": (4, 8),
    "linear": (1, 2),
    "norm": (2, 3),
    "router": (6, 6),
    "row_linear": (1, 2),
    "split": (0, 1),
    "token_loss": (8, 8),
}
# Separate scores, mask, softmax, dropout and weighted sum; number of times that the scores are read or written.
UNFUSED_STARTED, UNFUSED_PASSES = (5, 8), (4, 6)
ROUND_STARTED = (24, 40)  # per round of other ranks' keys and values: about three slices and their merges
LOGIT_PASSES = 3  # number of times that fp32 logits are read or written, in each pass
REASON_OF_AXIS = {TENSOR: "tensor", EXPERT_TENSOR: "tensor", CONTEXT: "context", CONTEXT_HEADS: "context"}


@dataclass(frozen=True)
class Recipe:
    """Properties of a training framework that a config does not contain; the defaults are Mixtrain's."""

    fused_attention: bool = True
    gradient_bytes: int = 4  # bytes per number of a reduced gradient
    overlaps_reductions: bool = True  # of gradients, if parallel.overlap_grad_reduce is true
    hides_tensor: bool = True  # tensor ranks' communication in the backward pass overlaps a matmul
    early_loss_grads: bool = True  # the loss computes its gradients in the forward pass


MIXTRAIN = Recipe()


@dataclass(frozen=True)
class Product:
    """A matmul as FLOPs and bytes. `edge`: sum of the inverses of its three sizes, which grows with unused tiles."""

    flops: float
    bytes: float
    edge: float


@dataclass(frozen=True)
class Sent:
    """A collective that a pass waits for.

    `num_bytes`: size of the complete tensor. `overlapped`: a matmul that runs at the same time, if any.
    """

    kind: str
    axis: str
    num_bytes: float
    overlapped: Product | None = None


@dataclass(frozen=True)
class PassWork:
    """Work of one rank in a block's forward or backward pass: FLOPs, bytes, launched operations and collectives.

    A block is the embedding, a layer or the head. `started`: operations that the host launches. `sent`: collectives.
    `rounds`: bytes of keys and values that are received while attention computes. `moe`: calls of routed experts.
    """

    products: tuple[Product, ...] = ()
    attention: float = 0.0  # floating-point operations of fused attention
    bytes: float = 0.0  # read and written by all operations except matmuls
    started: int = 0  # operations that the host launches
    sent: tuple[Sent, ...] = ()
    rounds: float = 0.0  # bytes of key and value rows that are received while attention computes
    moe: int = 0  # calls of routed experts; their work is not included

    def __add__(self, other: PassWork) -> PassWork:
        return PassWork(*(one + two for one, two in zip(vars(self).values(), vars(other).values(), strict=True)))


NO_WORK = PassWork()


@dataclass(frozen=True)
class BlockWork:
    """Work of a block (embedding, layer or head) in its forward pass, its backward pass and the recomputation.

    `again`: the recomputation. `shared_expert` is counted separately, forward and backward, because it overlaps the
    all-to-alls of the routed experts.
    """

    forward: PassWork
    backward: PassWork
    again: PassWork
    shared_expert: tuple[PassWork, PassWork]


class Fold:
    """Sums the FLOPs, bytes and collectives of a block's operations. Raises ValueError for an unknown operation."""

    def __init__(
        self, config: Config, device: str, shared: SharedRows, attended_share: float | None, recipe: Recipe = MIXTRAIN
    ) -> None:
        self.config, self.shared, self.recipe = config, shared, recipe
        self.sizes, self.tensor = Sizes(config), config.parallel.tensor
        self.fused = has_fused_attention(config, device) and recipe.fused_attention
        share = derived.attended_share(config) if attended_share is None else attended_share
        self.square = share * (0.5 if config.model.family == "gpt" else 1.0) if self.fused else 1.0

    def block(self, block: blueprint.Block) -> BlockWork:
        """Return the FLOPs, bytes and collectives of a block's forward pass, backward pass and recomputation."""
        forward = backward = again = NO_WORK
        shared = [NO_WORK, NO_WORK]
        known: dict[str, Tensor] = {}
        for operation, forwards in walk(block.operations):
            known.update((tensor.name, tensor) for tensor in operation.outputs)
            ahead, back = self._operation(operation, known, block.slides)
            if operation.name.startswith("mlp.shared_experts"):
                shared = [shared[0] + ahead, shared[1] + back]
                continue
            forward, backward = forward + ahead, backward + back
            for _ in range(forwards - 1):
                again += ahead
        return BlockWork(forward, backward, again, (shared[0], shared[1]))

    def _operation(
        self, operation: ModelOperation, known: dict[str, Tensor], slides: bool
    ) -> tuple[PassWork, PassWork]:
        kind = operation.kind
        if kind not in PRODUCTS and kind not in OTHERS:
            unknown("the clock", f"kind of operation of {operation.name}", kind)
        sent = tuple(self._sent(operation, False)), tuple(self._sent(operation, True))
        rounds = [0.0, 0.0]  # bytes of forward and backward pass
        for each in operation.collectives:
            if each.kind == "rounds" and each.axis == CONTEXT:
                rounds[each.is_backward] += self.shared.mean_received(slides) * self.sizes.bytes(each.whole)
        if kind == "experts":
            return PassWork(sent=sent[0], moe=1), PassWork(sent=sent[1], moe=1)
        started = STARTED.get(kind, (1, 1))
        moved = sum(self.sizes.bytes(tensor) for tensor in operation.outputs)
        moved += sum(self.sizes.bytes(known[name]) for name in (*operation.inputs, *operation.passes) if name in known)
        if kind == "split":
            moved = 0
        flops = operation.flops * self.sizes.tokens
        if kind in ATTENTION:
            return self._attention(flops / self.tensor, moved, (started, sent, rounds))
        shapes = (blueprint.local_shape(weight, self.sizes.ranks) for weight in operation.weights)
        weights = sum(math.prod(shape) * self.sizes.element for shape in shapes)
        if kind in PRODUCTS:
            flops /= self.tensor if kind != "pooler" and (kind != "linear" or self.config.parallel.sequence) else 1
            if kind == "token_loss":
                logits = flops / 2 / max(self.config.model.hidden_size, 1)  # of this rank
                passes = (4.0 * logits * LOGIT_PASSES,) * 2
            else:
                passes = 0.0, 0.0
            product = Product(flops, float(moved + weights), self._edge(operation, flops))
            if kind == "token_loss" and self.recipe.early_loss_grads:
                every = PassWork((product,) * 3, 0.0, sum(passes), sum(started), sent[0] + sent[1])
                return every, PassWork(started=1)
            if kind == "column_linear" and self.recipe.hides_tensor:
                # Without sequence parallelism the sum overlaps the weights' gradients; with it the gather overlaps the
                # input's gradients and the sum the weights'.
                sent = sent[0], tuple(replace(each, overlapped=product) for each in sent[1])
            return (
                PassWork((product,), 0.0, passes[0], started[0], sent[0]),
                PassWork((product, product), 0.0, passes[1], started[1], sent[1]),
            )
        # the backward pass of a split concatenates: it reads and writes all outputs
        outputs = 2 * sum(self.sizes.bytes(tensor) for tensor in operation.outputs)
        back = 0 if started[1] == 0 else 2 * moved if kind == "norm" else moved or outputs
        return PassWork(bytes=moved, started=started[0], sent=sent[0]), PassWork(
            bytes=back, started=started[1], sent=sent[1]
        )

    def _attention(self, flops: float, moved: float, rest: Any) -> tuple[PassWork, PassWork]:
        started, sent, rounds = rest
        flops *= self.square * self.shared.squares
        if self.shared.rounds > 1:
            started = tuple(n + self.shared.rounds * per_round for n, per_round in zip(started, ROUND_STARTED))
        if self.fused:
            return (
                PassWork((), flops, moved, started[0], sent[0], rounds[0]),
                PassWork((), 2.5 * flops, 3 * moved, started[1], sent[1], rounds[1]),
            )
        model = self.config.model
        scores = self.sizes.tokens * model.sequence_length * model.num_attention_heads / self.tensor
        times = [passes * scores * self.sizes.element for passes in UNFUSED_PASSES]
        head = derived.head_dim(self.config)
        product = Product(flops, moved + scores * self.sizes.element, 2 / model.sequence_length + 1 / head)
        return (
            PassWork((product,), 0.0, times[0], UNFUSED_STARTED[0], sent[0], rounds[0]),
            PassWork((product, product), 0.0, times[1], UNFUSED_STARTED[1], sent[1], rounds[1]),
        )

    def _edge(self, operation: ModelOperation, flops: float) -> float:
        """Return the sum of the inverse sizes (rows, outputs, inputs) of an operation's matmul; 0 if it has none."""
        matrices = [blueprint.local_shape(w, self.sizes.ranks) for w in operation.weights if len(w.shape) == 2]
        if not matrices or not flops:
            return 0.0
        outputs, inputs = matrices[0]
        token_rows = flops / (2.0 * outputs * inputs)
        return 1 / max(token_rows, 1.0) + 1 / outputs + 1 / inputs

    def _sent(self, operation: ModelOperation, is_backward: bool) -> Iterator[Sent]:
        for each in operation.collectives:
            if each.is_backward != is_backward or each.kind == "rounds" or each.axis == EXPERT:
                continue
            if self.sizes.ranks[each.axis] > 1:
                yield Sent(each.kind, each.axis, self.sizes.bytes(each.whole))


class Reasons(dict[str, float]):
    """Seconds by reason, such as "products" (matmuls) or "bubble" (idle stages). A missing reason counts as 0."""

    def __missing__(self, name: str) -> float:
        return 0.0

    def add(self, of: Mapping[str, float], times: float = 1.0) -> None:
        """Add seconds by reason, multiplied by `times`."""
        for name, seconds in of.items():
            self[name] += times * seconds


@dataclass(frozen=True)
class BlockSeconds:
    """Seconds of a block's forward and backward pass by reason."""

    forward: Mapping[str, float]
    backward: Mapping[str, float]


class PassClock:
    """Predicts the seconds of forward and backward passes on a given hardware."""

    def __init__(self, config: Config, hardware: Hardware, groups: Mapping[str, Group]) -> None:
        self.hardware, self.groups = hardware, groups
        self.products = hardware["products.fp32" if config.training.precision == "fp32" else "products.half"]
        self.tile = hardware["products.tile"]
        self.attention = self.products if config.training.precision == "fp32" else hardware["attention.half"]

    def block(self, work: BlockWork, calls: tuple[Reasons, Reasons] | None = None) -> BlockSeconds:
        """Return the seconds of a block. `calls`: seconds of its routed experts, forward and backward."""
        forward_call, backward_call = calls or (Reasons(), Reasons())
        forward, again = self.of(work.forward, forward_call), self.of(work.again, forward_call)
        backward = self.of(work.backward, backward_call)
        backward["recomputed"] += sum(again.values())
        return BlockSeconds(forward, backward)

    def product(self, of: Product) -> float:
        """Return the seconds of a matmul: of its FLOPs or of its bytes, whichever take longer."""
        computing = of.flops / self.products * (1 + self.tile * of.edge)
        return max(computing, of.bytes / self.hardware["device.rate"])

    def of(self, work: PassWork, call: Reasons | None = None) -> Reasons:
        """Return the seconds of a pass by reason. `call`: seconds of its routed experts.

        The host launches operations while the device computes. The share `launch.exposed` (a hardware figure) of the
        shorter of both times is not hidden.
        """
        rate, per_operation = self.hardware["device.rate"], self.hardware["device.operation"]
        result = Reasons()
        products = sum(self.product(each) for each in work.products)
        result["products"] = products + work.attention / self.attention
        result["memory"] = work.bytes / rate + work.started * per_operation
        attention = work.attention / self.attention or result["products"]
        for sent in work.sent:
            group = self.groups[sent.axis]
            if sent.kind == "all_to_all":
                start, each = exchange(self.hardware, group)
                seconds = start + each * sent.num_bytes * (group.size - 1) / group.size
            else:
                seconds = collective(self.hardware, sent.kind, group, sent.num_bytes)
            if sent.overlapped is not None:
                seconds = max(0.0, seconds - self.product(sent.overlapped))
            result[f"{REASON_OF_AXIS[sent.axis]}:{group.link}"] += seconds
        if work.rounds:
            group = self.groups[CONTEXT]
            start, each = exchange(self.hardware, group)
            result[f"context:{group.link}"] += max(0.0, start + each * work.rounds - attention)
        if work.moe and call is not None:
            result.add(call)
        launching = work.started * self.hardware["launch.operation"]
        device = sum(result.values())
        exposed = min(1.0, self.hardware["launch.exposed"])
        result["launches"] += max(0.0, launching - device) + exposed * min(device, launching)
        return result
