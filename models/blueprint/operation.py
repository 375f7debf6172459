"""What a blueprint is made of: weights, tensors, collectives, operations, and the blocks that they stand in.

Sizes are logical, of the whole model; a `Split` says over which ranks a dimension is spread. Names of weights are those
of models/weights.py. A fold goes through the operations and fails by name on what it does not know.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from configs import derived
from configs.derived import context_heads
from configs.schema import Config

TENSOR, EXPERT, EXPERT_TENSOR = "tensor", "expert", "expert_tensor"  # axes of ranks
# Ranks that share sequences: all of them, those of one place, which exchange heads for rows, and these with the tensor
# ranks, over all of which the heads lie.
CONTEXT, CONTEXT_HEADS, HEADS = "context", "context_heads", "heads"
# Rows of a tensor: the tokens of a micro-batch (of context ranks, this one's share), this rank's own of them, those of
# all its expert tensor peers, those of all context ranks of its place, samples, one; the tokens that predict something,
# this rank's own of them.
TOKENS, OWN_TOKENS, PEER_TOKENS, SAMPLES, SCALAR = "tokens", "own_tokens", "peer_tokens", "samples", "scalar"
PREDICTED, OWN_PREDICTED = "predicted", "own_predicted"
PLACE_TOKENS = "place_tokens"
# Kinds of numbers: `training.precision`, always fp32, or a byte for true and false.
MODEL, FLOAT32, BOOLEAN = "model", "float32", "boolean"


@dataclass(frozen=True)
class Split:
    """A dimension that is spread over the ranks of an axis."""

    dim: int
    axis: str


@dataclass(frozen=True)
class Weight:
    """A named tensor of the model that is saved with it.

    `kind`: matrix; output_matrix, which writes into the residual stream; norm; bias; router_bias, which is not trained
    by gradients. Of routed experts `shape` begins with their number, and the name stands for all of them: each has a
    name of its own.
    """

    name: str  # within its block: "self_attention.linear_qkv.weight"
    shape: tuple[int, ...]
    kind: str
    splits: tuple[Split, ...] = ()
    gated: bool = False  # rows are [gate | up], each half split by itself
    stored_rows: int | None = None  # with the vocabulary's padding, over all ranks
    uses: int = 1  # operations of one rank that use it: 2 where a tied embedding is the output layer too
    is_shared: bool = False  # two pipeline stages hold it
    is_copy: bool = False  # the last stage's of the two

    @property
    def is_expert(self) -> bool:
        """Whether it is a stack of routed experts' tensors."""
        return any(split.axis == EXPERT for split in self.splits)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """With padding, over all ranks."""
        return self.shape if self.stored_rows is None else (self.stored_rows, *self.shape[1:])


@dataclass(frozen=True)
class Tensor:
    """Activations: `width` numbers for each row, spread over the ranks of `axis`.

    Rows are the tokens of a micro-batch, this rank's own of them (fewer under sequence parallelism), its samples, or
    one.
    """

    name: str
    width: int
    rows: str = TOKENS
    axis: str | None = None
    dtype: str = MODEL


@dataclass(frozen=True)
class Collective:
    """What an operation has to exchange: `kind` is all_reduce, all_gather, reduce_scatter, all_to_all or rounds.

    `whole` is what is reduced, what has been gathered, or what is scattered; of an all_to_all, what each rank has of
    it; of rounds, one of the rows that are sent.
    """

    kind: str
    axis: str
    whole: Tensor
    is_backward: bool = False


@dataclass(frozen=True)
class ModelOperation:
    """One step of the forward pass and what follows from it for the backward pass. `inputs`, `passes`, `saved` and
    `frees` name tensors.

    Kinds `recomputed` and `tiled` stand around a `body`, whose forward pass runs again in the backward pass: of all
    rows, or of so many of a rank's after the others.
    """

    kind: str
    name: str  # of its module: "self_attention.linear_qkv"
    inputs: tuple[str, ...] = ()  # get gradients of their own
    outputs: tuple[Tensor, ...] = ()
    passes: tuple[str, ...] = ()  # inputs whose gradient is that of the output
    saved: tuple[str, ...] = ()  # kept for the backward pass
    frees: tuple[str, ...] = ()  # nobody needs them any more, but for what is saved
    weights: tuple[Weight, ...] = ()
    flops: float = 0.0  # of the forward pass per token: a multiply-add is 2, and all tensor ranks together do it once
    channels: int = 0  # numbers that are normalized, or rotated, together
    collectives: tuple[Collective, ...] = ()
    body: tuple[ModelOperation, ...] = ()

    @property
    def output(self) -> Tensor:
        """The only one."""
        (tensor,) = self.outputs
        return tensor


@dataclass(frozen=True)
class Block:
    """The embedding, a layer or the head: takes `INPUT`, gives the last operation's output. `prefix` begins its
    weights' names."""

    prefix: str
    operations: tuple[ModelOperation, ...]
    weights: tuple[Weight, ...]  # in the order of Megatron-core's modules, which is that of the gradient buffers
    slides: bool = False  # a layer whose attention has the sliding window


INPUT = "state"  # the tensor that a block starts from


def axis_sizes(config: Config) -> dict[str, int]:
    """Ranks of each axis that weights and tensors are spread over."""
    return {
        TENSOR: config.parallel.tensor,
        EXPERT: config.parallel.expert,
        EXPERT_TENSOR: derived.expert_tensor_size(config),
        CONTEXT: config.parallel.context,
        CONTEXT_HEADS: context_heads(config),
        HEADS: config.parallel.tensor * context_heads(config),
    }


def local_shape(weight: Weight, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """What one rank holds of a weight, padding included; `sizes` are the numbers of ranks by axis. Raises ValueError
    for another axis."""
    shape = list(weight.stored_shape)
    for split in weight.splits:
        if split.axis not in sizes:
            unknown("local_shape", f"axis of {weight.name}", split.axis)
        shape[split.dim] //= sizes[split.axis]
    return tuple(shape)


def local_runs(total: int, local: int, rank: int, gated: bool) -> list[tuple[int, int, int]]:
    """(first index here, first index of the whole, length) of each run of indices that a rank holds of a dimension of
    `total`, of which every rank stores `local`. Indices here that no run covers pad the vocabulary."""
    if gated:
        half = local // 2
        return [(0, rank * half, half), (half, total // 2 + rank * half, half)]
    start = min(rank * local, total)
    return [(0, start, min(local, total - start))]


def walk(operations: Sequence[ModelOperation], forwards: int = 1) -> Iterator[tuple[ModelOperation, int]]:
    """Every operation with how many times its forward pass runs in a step; `recomputed` and `tiled` ones give way
    to what they contain."""
    for operation in operations:
        if operation.kind in ("recomputed", "tiled"):
            yield from walk(operation.body, forwards + 1)
        else:
            yield operation, forwards


def block(prefix: str, operations: Sequence[ModelOperation], module_order: Sequence[str]) -> Block:
    """A block with its weights sorted by the modules that they begin with."""

    def place(weight: Weight) -> int:
        for number, module in enumerate(module_order):
            if weight.name.startswith(f"{module}."):
                return number
        unknown("module order", "weight", weight.name)

    weights = [
        weight
        for operation, _ in walk(operations)
        for weight in operation.weights
        if not (weight.is_copy and weight.uses > 1)
    ]
    return Block(prefix, tuple(operations), tuple(sorted(weights, key=place)))


def unknown(who: str, what: str, name: str) -> NoReturn:
    """What every fold says of something that it does not know."""
    raise ValueError(f"{who} does not know the {what} {name!r}")
