"""The elements of a blueprint (weights, tensors, collectives, operations, blocks of operations), and operations that
several parts of the model share (linear layers, norms, residual sums).

Sizes are those of the whole model; a `Split` names the ranks that a dimension is split over. Names of weights are those
of models/weights.py. Code that walks the operations raises an error for any name that it does not know.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

from configs import derived
from configs.derived import context_heads
from configs.schema import Config

TENSOR, EXPERT, EXPERT_TENSOR = "tensor", "expert", "expert_tensor"  # axes of ranks
# Axes of context parallelism: all context ranks; the ranks that exchange heads for sequence rows; and these ranks times
# the tensor ranks, over which the heads are split.
CONTEXT, CONTEXT_HEADS, HEADS = "context", "context_heads", "heads"
# Kinds of a tensor's rows. tokens: this context rank's tokens of a micro-batch. own_tokens: this tensor rank's share of
# these tokens under sequence parallelism. peer_tokens: the tokens of all its expert tensor peers. scalar: a single row.
# predicted, own_predicted: the tokens whose labels are predicted, and this tensor rank's share of them.
# exchanged_tokens: the tokens of all context ranks that exchange heads with this one.
TOKENS, OWN_TOKENS, PEER_TOKENS, SAMPLES, SCALAR = "tokens", "own_tokens", "peer_tokens", "samples", "scalar"
PREDICTED, OWN_PREDICTED = "predicted", "own_predicted"
EXCHANGED_TOKENS = "exchanged_tokens"
# Types of numbers: `training.precision`, always fp32, or one byte for true and false.
MODEL, FLOAT32, BOOLEAN = "model", "float32", "boolean"


@dataclass(frozen=True)
class Split:
    """A split of dimension `dim` of a weight over the ranks of a parallel `axis` (tensor, expert, ...)."""

    dim: int
    axis: str


@dataclass(frozen=True)
class Weight:
    """A weight of the model: name, full shape, kind, and how ranks split it.

    `kind`: matrix; output_matrix, which writes into the residual stream; norm; bias; router_bias, which is not trained
    by gradients. The routed experts of a layer are one weight here, whose `shape` starts with their number; in
    models/weights.py each expert has its own name.
    """

    name: str  # within its block: "self_attention.linear_qkv.weight"
    shape: tuple[int, ...]
    kind: str
    splits: tuple[Split, ...] = ()
    gated: bool = False  # rows are [gate | up], each half split by itself
    stored_rows: int | None = None  # rows with the vocabulary's padding, over all ranks
    uses: int = 1  # operations of one rank that use it: 2 if a tied embedding is the output layer too
    is_shared: bool = False  # two pipeline stages hold it
    is_copy: bool = False  # the weight that the last stage holds

    @property
    def is_expert(self) -> bool:
        """True if this weight is a stack of routed experts' tensors."""
        return any(split.axis == EXPERT for split in self.splits)


@dataclass(frozen=True)
class Tensor:
    """An activation tensor with `width` numbers per row, split over the ranks of `axis` (None: not split). `row_kind`:
    the kind of its rows, such as the tokens of a micro-batch."""

    name: str
    width: int
    row_kind: str = TOKENS
    axis: str | None = None
    dtype: str = MODEL


@dataclass(frozen=True)
class Collective:
    """A communication step of an operation; `kind` is all_reduce, all_gather, reduce_scatter, all_to_all or rounds.

    `whole`: the reduced tensor, the result of a gather, or the input of a scatter; for an all_to_all, each rank's
    share; for rounds, which send key and value rows between context ranks, a single row.
    """

    kind: str
    axis: str
    whole: Tensor
    is_backward: bool = False


@dataclass(frozen=True)
class ModelOperation:
    """One operation of the forward pass, with the tensors and collectives of its backward pass. `inputs`, `passes`,
    `saved` and `frees` are names of tensors.

    Operations of the kinds `recomputed` and `tiled` have a `body`, whose forward pass runs again in the backward pass:
    for all rows at once, or for one tile of tokens at a time.
    """

    kind: str
    name: str  # of its module: "self_attention.linear_qkv"
    inputs: tuple[str, ...] = ()  # each gets its own gradient
    outputs: tuple[Tensor, ...] = ()
    passes: tuple[str, ...] = ()  # inputs whose gradient is that of the output
    saved: tuple[str, ...] = ()  # kept for the backward pass
    frees: tuple[str, ...] = ()  # freed after this operation, unless saved
    weights: tuple[Weight, ...] = ()
    flops: float = 0.0  # of the forward pass per token, over all tensor ranks; a multiply-add is 2
    channels: int = 0  # numbers that are normalized or rotated together
    collectives: tuple[Collective, ...] = ()
    body: tuple[ModelOperation, ...] = ()

    @property
    def output(self) -> Tensor:
        """The output tensor of an operation with exactly one output."""
        (tensor,) = self.outputs
        return tensor


@dataclass(frozen=True)
class Block:
    """The embedding, a transformer layer or the head, as operations from the tensor `INPUT` to the last operation's
    output. `prefix`: the common beginning of its weights' names. `slides`: True for a layer with sliding-window
    attention."""

    prefix: str
    operations: tuple[ModelOperation, ...]
    weights: tuple[Weight, ...]  # in the order of Megatron-core's modules, which is that of the gradient buffers
    slides: bool = False  # a layer whose attention has the sliding window


INPUT = "state"  # the input tensor of a block


def axis_sizes(config: Config) -> dict[str, int]:
    """Return the number of ranks of each axis that weights and tensors can be split over."""
    return {
        TENSOR: config.parallel.tensor,
        EXPERT: config.parallel.expert,
        EXPERT_TENSOR: derived.expert_tensor_size(config),
        CONTEXT: config.parallel.context,
        CONTEXT_HEADS: context_heads(config),
        HEADS: config.parallel.tensor * context_heads(config),
    }


def local_shape(weight: Weight, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return the shape of the slice of a weight that one rank stores, including padding. `sizes`: number of ranks per
    axis. Raises ValueError for an unknown axis."""
    shape = list(weight.shape)
    if weight.stored_rows is not None:
        shape[0] = weight.stored_rows
    for split in weight.splits:
        if split.axis not in sizes:
            unknown("local_shape", f"axis of {weight.name}", split.axis)
        shape[split.dim] //= sizes[split.axis]
    return tuple(shape)


def local_runs(total: int, local: int, rank: int, gated: bool) -> list[tuple[int, int, int]]:
    """Return the index runs that a rank holds of a dimension of length `total`, as (first local index, first index of
    the whole, length). Every rank stores `local` indices; those outside the runs pad the vocabulary."""
    if gated:
        half = local // 2
        return [(0, rank * half, half), (half, total // 2 + rank * half, half)]
    start = min(rank * local, total)
    return [(0, start, min(local, total - start))]


def walk(operations: Sequence[ModelOperation], forwards: int = 1) -> Iterator[tuple[ModelOperation, int]]:
    """Yield every operation with the number of its forward passes per micro-batch. The bodies of `recomputed` and
    `tiled` operations are yielded in their place."""
    for operation in operations:
        if operation.kind in ("recomputed", "tiled"):
            yield from walk(operation.body, forwards + 1)
        else:
            yield operation, forwards


def block(prefix: str, operations: Sequence[ModelOperation], module_order: Sequence[str]) -> Block:
    """Return a block of operations. Its weights are sorted by module, in the order of the module names in
    `module_order`."""

    def module_index(weight: Weight) -> int:
        for number, module in enumerate(module_order):
            if weight.name.startswith(f"{module}."):
                return number
        unknown("module order", "name of a weight", weight.name)

    weights = [
        weight
        for operation, _ in walk(operations)
        for weight in operation.weights
        if not (weight.is_copy and weight.uses > 1)
    ]
    return Block(prefix, tuple(operations), tuple(sorted(weights, key=module_index)))


def unknown(who: str, what: str, name: str) -> NoReturn:
    """Raise ValueError: `who` (the calling code) does not know the `what` (such as a kind of operation) called
    `name`."""
    raise ValueError(f"{who} does not know {name!r}, the {what}. Add it to {who}.")


def transformer_name(config: Config) -> str:
    """Return Megatron-core's name for the stack of layers: encoder or decoder."""
    return "encoder" if config.model.family == "bert" else "decoder"


def own_row_kind(config: Config) -> str:
    """Return the kind of rows between linear layers: this rank's own tokens with sequence parallelism, else all
    tokens."""
    return OWN_TOKENS if config.parallel.sequence else TOKENS


def hidden(config: Config, name: str) -> Tensor:
    """Return the description of a hidden-state tensor with this name."""
    return Tensor(name, config.model.hidden_size, own_row_kind(config))


def column_linear(
    config: Config, name: str, x: str, output: str, sizes: tuple[int, int], *, bias: bool = False, gated: bool = False
) -> ModelOperation:
    """Return the operation of a linear layer with `sizes` (inputs, outputs) and outputs split over the tensor ranks.
    With sequence parallelism, it gathers its input first."""
    width, features = sizes
    whole = Tensor(x, width)
    collectives: tuple[Collective, ...] = (Collective("all_reduce", TENSOR, whole, is_backward=True),)
    if config.parallel.sequence:
        collectives = (
            Collective("all_gather", TENSOR, whole),
            Collective("all_gather", TENSOR, whole, is_backward=True),  # the input again, for the weights' gradients
            Collective("reduce_scatter", TENSOR, whole, is_backward=True),
        )
    splits = (Split(0, TENSOR),)
    weights = [Weight(f"{name}.weight", (features, width), "matrix", splits, gated)]
    weights += [Weight(f"{name}.bias", (features,), "bias", splits, gated)] if bias else []
    linear = ModelOperation("column_linear", name, (x,), (Tensor(output, features, TOKENS, TENSOR),), saved=(x,))
    return replace(linear, weights=tuple(weights), flops=2.0 * width * features, collectives=collectives)


def row_linear(
    config: Config, name: str, x: str, output: str, width: int, *, bias: bool = False, frees: Sequence[str] = ()
) -> list[ModelOperation]:
    """Return the operations of a linear layer from `width` inputs, split over the tensor ranks, to the hidden size. The
    outputs of the ranks are summed."""
    size = config.model.hidden_size
    weights = [Weight(f"{name}.weight", (size, width), "output_matrix", (Split(1, TENSOR),))]
    weights += [Weight(f"{name}.bias", (size,), "bias")] if bias else []  # a residual sum adds it, or a copy
    whole = Tensor(output, size)
    linear = ModelOperation(
        "row_linear", name, (x,), (whole,), saved=(x,), weights=tuple(weights), flops=2.0 * width * size
    )
    if not config.parallel.sequence:
        return [replace(linear, frees=tuple(frees), collectives=(Collective("all_reduce", TENSOR, whole),))]
    partial = Tensor(f"{output}.whole", size)
    return [replace(linear, outputs=(partial,)), scatter(name, partial, hidden(config, output), (partial.name, *frees))]


def scatter(name: str, whole: Tensor, own: Tensor, frees: tuple[str, ...] = (), axis: str = TENSOR) -> ModelOperation:
    """Return the reduce-scatter of `whole` over the ranks of an axis, after which each rank has its own tokens
    (`own`)."""
    collectives = (Collective("reduce_scatter", axis, whole), Collective("all_gather", axis, whole, is_backward=True))
    return ModelOperation("scatter", name, (whole.name,), (own,), frees=frees, collectives=collectives)


def norm(
    config: Config, name: str, x: str, output: Tensor, width: int, *, channels: int = 0, frees: tuple[str, ...] = ()
) -> ModelOperation:
    """Return the operation of the model's norm (LayerNorm or RMSNorm), with `width` weights, over rows of `channels`
    numbers (0: `width`)."""
    weights = [Weight(f"{name}.weight", (width,), "norm")]
    weights += [Weight(f"{name}.bias", (width,), "bias")] if config.model.normalization == "layernorm" else []
    return ModelOperation(
        "norm", name, (x,), (output,), saved=(x,), frees=frees, weights=tuple(weights), channels=channels or width
    )


def dropout(config: Config, x: str, output: Tensor, frees: tuple[str, ...]) -> list[ModelOperation]:
    """Return a list with the dropout operation from `x` to `output`; empty if the model has no dropout."""
    if config.model.hidden_dropout == 0:
        return []
    return [ModelOperation("dropout", "dropout", (x,), (output,), frees=frees)]


def residual_sum(
    config: Config, x: str, residual: str, output: str, *, biased: bool, frees: tuple[str, ...] = ()
) -> list[ModelOperation]:
    """Return the operations that add a bias to `x` (if `biased`), apply dropout, and add `residual`."""
    operations, last = list[ModelOperation](), x
    if config.model.linear_bias and biased:
        operations.append(changed_copy("bias_add", x, hidden(config, f"{x}.biased")))
        last = f"{x}.biased"
    dropped = dropout(config, last, hidden(config, f"{x}.dropped"), frees=(last,) if last != x else ())
    if dropped:
        operations, last = operations + dropped, f"{x}.dropped"
    own = (last,) if last != x else ()
    return [
        *operations,
        ModelOperation("add", output, outputs=(hidden(config, output),), passes=(last, residual), frees=(*own, *frees)),
    ]


def changed_copy(name: str, x: str, output: Tensor, frees: tuple[str, ...] = ()) -> ModelOperation:
    """Return the operation that copies `x` to `output`, in a different layout or with something added. The gradient of
    `x` equals the gradient of `output`."""
    return ModelOperation("copy", name, outputs=(output,), passes=(x,), frees=frees)


def recomputed(name: str, inputs: tuple[str, ...], body: Sequence[ModelOperation]) -> ModelOperation:
    """Return an operation that runs `body` under activation checkpointing."""
    return ModelOperation("recomputed", name, inputs, body[-1].outputs, saved=inputs, body=tuple(body))


def tiled(name: str, x: str, body: Sequence[ModelOperation]) -> ModelOperation:
    """Return an operation that runs `body` for one tile of tokens at a time, and again in the backward pass."""
    return ModelOperation("tiled", name, (x,), body[-1].outputs, saved=(x,), body=tuple(body))
