"""What a block of the model has to do in a pass, whatever the hardware: a fold over the blueprint's operations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from configs import derived
from configs.schema import Config
from models import blueprint
from models.blueprint.operation import CONTEXT, EXPERT, ModelOperation, Tensor, unknown, walk
from simulator.context.rows import SharedRows
from simulator.flops import ATTENTION, OTHERS, PRODUCTS, has_fused_attention
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
ROUND_STARTED = (24, 40)  # for a round of others' keys and values: about three slices, each with its merge
LOGIT_PASSES = 3  # in fp32, each way


@dataclass(frozen=True)
class Recipe:
    """What a trainer does that a config does not say; Mixtrain's is the default."""

    fused_attention: bool = True
    gradient_bytes: int = 4  # of a number that is reduced
    reduces_beside: bool = True  # gradients, if parallel.overlap_grad_reduce asks for it
    hides_tensor: bool = True  # exchanges of tensor ranks in the backward pass go on beside a product
    early_loss_grads: bool = True  # the loss makes its gradients in the forward pass


MIXTRAIN = Recipe()


@dataclass(frozen=True)
class Product:
    """A matrix product: floating-point operations, bytes that are read and written, and the sum of one over each of
    its three sizes, which says how much of its tiles is edge."""

    flops: float
    bytes: float
    edge: float


@dataclass(frozen=True)
class Sent:
    """A collective on whose end the pass waits: kind, axis, the bytes of all ranks together, and the product that is
    computed meanwhile."""

    kind: str
    axis: str
    num_bytes: float
    beside: Product | None = None


@dataclass(frozen=True)
class PassWork:
    """What one rank does in one pass of a block. `moe`: a call of routed experts, which are counted by themselves."""

    products: tuple[Product, ...] = ()
    attention: float = 0.0  # operations of fused attention
    bytes: float = 0.0  # that all but products read and write
    started: int = 0  # operations that the host starts
    sent: tuple[Sent, ...] = ()
    rounds: float = 0.0  # bytes of key and value rows that come while attention computes
    moe: int = 0

    def __add__(self, other: PassWork) -> PassWork:
        return PassWork(
            self.products + other.products,
            self.attention + other.attention,
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
        self, config: Config, device: str, shared: SharedRows, attended_share: float | None, recipe: Recipe = MIXTRAIN
    ) -> None:
        self.config, self.shared, self.recipe = config, shared, recipe
        self.sizes, self.tensor = Sizes(config), config.parallel.tensor
        self.fused = has_fused_attention(config, device) and recipe.fused_attention
        share = derived.attended_share(config) if attended_share is None else attended_share
        self.square = share * (0.5 if config.model.family == "gpt" else 1.0) if self.fused else 1.0

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
            return self._attention(flops / self.tensor, moved, (started, sent, rounds))
        weights = sum(self._weight_bytes(weight) for weight in operation.weights)
        if kind in PRODUCTS:
            flops /= self.tensor if kind != "pooler" and (kind != "linear" or self.config.parallel.sequence) else 1
            if kind == "token_loss":
                logits = flops / 2 / max(self.config.model.hidden_size, 1)  # this rank's, some times through memory
                passes = (4.0 * logits * LOGIT_PASSES,) * 2
            else:
                passes = 0.0, 0.0
            product = Product(flops, float(moved + weights), self._edge(operation, flops))
            if kind == "token_loss" and self.recipe.early_loss_grads:
                every = PassWork((product,) * 3, 0.0, sum(passes), sum(started), sent[0] + sent[1])
                return every, PassWork(started=1)
            if kind == "column_linear" and self.recipe.hides_tensor:
                # Without sequence parallelism the sum goes on beside the weights' gradients, with it the gather beside
                # the input's and the sum beside the weights'.
                sent = sent[0], tuple(replace(each, beside=product) for each in sent[1])
            return (
                PassWork((product,), 0.0, passes[0], started[0], sent[0]),
                PassWork((product, product), 0.0, passes[1], started[1], sent[1]),
            )
        back = 0 if started[1] == 0 else 2 * moved if kind == "norm" else moved or self._split_bytes(operation)
        return PassWork(bytes=moved, started=started[0], sent=sent[0]), PassWork(
            bytes=back, started=started[1], sent=sent[1]
        )

    def _attention(self, flops: float, moved: float, rest: Any) -> tuple[PassWork, PassWork]:
        started, sent, rounds = rest
        flops *= self.square * self.shared.squares
        if self.shared.rounds > 1:
            started = tuple(number + self.shared.rounds * of_round for number, of_round in zip(started, ROUND_STARTED))
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
        """What a product with a weight has of edges: of rows, inputs and outputs."""
        matrices = [blueprint.local_shape(w, self.sizes.ranks) for w in operation.weights if len(w.shape) == 2]
        if not matrices or not flops:
            return 0.0
        outputs, inputs = matrices[0]
        rows = flops / (2.0 * outputs * inputs)
        return 1 / max(rows, 1.0) + 1 / outputs + 1 / inputs

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
