"""What a block of the model has to do in a pass, whatever the hardware: a fold over the blueprint's operations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from configs import derived
from configs.schema import Config
from models import blueprint
from models.blueprint.operation import CONTEXT, EXPERT, ModelOperation, Tensor, unknown, walk
from simulator.context.rows import SharedRows
from simulator.flops import ATTENTION, OTHERS, PRODUCTS, computes_slices, has_fused_attention
from simulator.sizes import Sizes

# Operations that the host starts, forward and backward, by kind of operation; others one each way.
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
# Scores, mask, softmax, dropout and weighted sum, each for itself; passes over the scores.
UNFUSED_STARTED, UNFUSED_PASSES = (5, 8), (4, 6)


@dataclass(frozen=True)
class Trainer:
    """What a training does that its config does not say; Mixtrain's is the default."""

    fused_attention: bool = True
    gradient_bytes: int = 4  # of a number that is reduced
    reduces_beside: bool = True  # gradients, if parallel.overlap_grad_reduce asks for it


MIXTRAIN = Trainer()


@dataclass(frozen=True)
class Sent:
    """A collective on whose end the pass waits: kind, axis, and the bytes of all ranks together."""

    kind: str
    axis: str
    num_bytes: float


@dataclass(frozen=True)
class PassWork:
    """Of one rank in one pass of a block. `moe`: a call of routed experts, which are counted by themselves."""

    products: float = 0.0  # floating-point operations
    attention: float = 0.0  # of fused attention
    product_bytes: float = 0.0  # that products read and write
    bytes: float = 0.0  # that other operations read and write
    started: int = 0  # operations that the host starts
    sent: tuple[Sent, ...] = ()
    rounds: float = 0.0  # bytes of key and value rows that come while attention computes
    moe: int = 0

    def __add__(self, other: PassWork) -> PassWork:
        return PassWork(
            self.products + other.products,
            self.attention + other.attention,
            self.product_bytes + other.product_bytes,
            self.bytes + other.bytes,
            self.started + other.started,
            self.sent + other.sent,
            self.rounds + other.rounds,
            self.moe + other.moe,
        )


NO_WORK = PassWork()


@dataclass(frozen=True)
class BlockWork:
    """Both passes of a block; what the backward pass computes again; what the shared expert does, beside the routed
    ones' dispatch."""

    forward: PassWork
    backward: PassWork
    again: PassWork
    shared_expert: tuple[PassWork, PassWork]


class Fold:
    """Goes through blocks of a config. Raises ValueError for a kind of operation that it does not know."""

    def __init__(
        self, config: Config, device: str, shared: SharedRows, attended_share: float | None, trainer: Trainer = MIXTRAIN
    ) -> None:
        self.config, self.shared, self.trainer = config, shared, trainer
        self.sizes, self.tensor = Sizes(config), config.parallel.tensor
        self.fused = has_fused_attention(config, device) and trainer.fused_attention
        share = derived.attended_share(config) if attended_share is None else attended_share
        causal = config.model.family == "gpt" and device == "cuda"
        sliced = computes_slices(config, device)
        self.square = share * (0.5 if causal or sliced and config.model.family == "gpt" else 1.0) if self.fused else 1.0

    def block(self, block: blueprint.Block) -> BlockWork:
        """What a block does."""
        return self._of(block.operations, block.slides)

    def _of(self, operations: Sequence[ModelOperation], slides: bool) -> BlockWork:
        forward = backward = again = NO_WORK
        shared = [NO_WORK, NO_WORK]
        known: dict[str, Tensor] = {}
        for operation, forwards in walk(operations):
            known.update((tensor.name, tensor) for tensor in operation.outputs)
            ahead, back = self._operation(operation, known, slides)
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
        rounds = tuple(self._rounds(operation, is_backward, slides) for is_backward in (False, True))
        if kind == "experts":
            return PassWork(sent=sent[0], moe=1), PassWork(sent=sent[1], moe=1)
        started = STARTED.get(kind, (1, 1))
        moved = sum(self.sizes.bytes(tensor) for tensor in operation.outputs)
        moved += sum(self.sizes.bytes(known[name]) for name in (*operation.inputs, *operation.passes) if name in known)
        if kind == "split":
            moved = 0
        flops = operation.flops * self.sizes.tokens
        if kind in ATTENTION:
            return self._attention(operation, flops / self.tensor, moved, (started, sent, rounds))
        weights = sum(self._weight_bytes(weight) for weight in operation.weights)
        if kind in PRODUCTS:
            flops /= self.tensor if kind != "pooler" and (kind != "linear" or self.config.parallel.sequence) else 1
            if kind == "token_loss":
                logits = flops / 2 / max(self.config.model.hidden_size, 1)  # this rank's, some times through memory
                return (
                    PassWork(flops, 0.0, moved + weights, 4 * logits * 3, started[0], sent[0]),
                    PassWork(2 * flops, 0.0, 2 * (moved + weights), 4 * logits * 3, started[1], sent[1]),
                )
            return (
                PassWork(flops, 0.0, moved + weights, 0.0, started[0], sent[0]),
                PassWork(2 * flops, 0.0, 2 * (moved + weights), 0.0, started[1], sent[1]),
            )
        back = 0 if started[1] == 0 else 2 * moved if kind == "norm" else moved or self._split_bytes(operation)
        return PassWork(bytes=moved, started=started[0], sent=sent[0]), PassWork(
            bytes=back, started=started[1], sent=sent[1]
        )

    def _attention(self, operation: ModelOperation, flops: float, moved: float, rest: tuple) -> tuple[PassWork, PassWork]:  # type: ignore[type-arg]
        started, sent, rounds = rest
        flops *= self.square * self.shared.squares
        if self.fused:
            return (
                PassWork(0.0, flops, moved, 0.0, started[0], sent[0], rounds[0]),
                PassWork(0.0, 2.5 * flops, 3 * moved, 0.0, started[1], sent[1], rounds[1]),
            )
        model = self.config.model
        scores = self.sizes.tokens * model.sequence_length * model.num_attention_heads / self.tensor
        times = [passes * scores * self.sizes.element for passes in UNFUSED_PASSES]
        return (
            PassWork(flops, 0.0, moved, times[0], UNFUSED_STARTED[0], sent[0], rounds[0]),
            PassWork(2 * flops, 0.0, 2 * moved, times[1], UNFUSED_STARTED[1], sent[1], rounds[1]),
        )

    def _split_bytes(self, operation: ModelOperation) -> float:
        """What the backward pass of a split puts together."""
        return 2 * sum(self.sizes.bytes(tensor) for tensor in operation.outputs)

    def _weight_bytes(self, weight: blueprint.Weight) -> float:
        number = 1
        for size in blueprint.local_shape(weight, self.sizes.ranks):
            number *= size
        return number * self.sizes.element

    def _sent(self, operation: ModelOperation, is_backward: bool) -> Iterator[Sent]:
        for each in operation.collectives:
            if each.is_backward != is_backward or each.kind == "rounds" or each.axis == EXPERT:
                continue
            if self.sizes.ranks[each.axis] > 1:
                yield Sent(each.kind, each.axis, self.sizes.bytes(each.whole))

    def _rounds(self, operation: ModelOperation, is_backward: bool, slides: bool) -> float:
        return sum(
            self.shared.mean_received(slides) * self.sizes.bytes(each.whole)
            for each in operation.collectives
            if each.kind == "rounds" and each.axis == CONTEXT and each.is_backward == is_backward
        )
