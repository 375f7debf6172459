"""Operations that several parts of the model are made of: linear layers, norms, residual sums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from configs.schema import Config
from models.blueprint.operation import OWN_TOKENS, TENSOR, TOKENS, Collective, ModelOperation, Split, Tensor, Weight


def transformer_name(config: Config) -> str:
    """What Megatron-core calls the layers together."""
    return "encoder" if config.model.family == "bert" else "decoder"


def own_rows(config: Config) -> str:
    """The rows of tensors between the linear layers: under sequence parallelism each tensor rank has its share."""
    return OWN_TOKENS if config.parallel.sequence else TOKENS


def hidden(config: Config, name: str) -> Tensor:
    """A hidden state."""
    return Tensor(name, config.model.hidden_size, own_rows(config))


def column_linear(
    config: Config,
    name: str,
    x: str,
    output: str,
    sizes: tuple[int, int],
    *,
    bias: bool = False,
    gated: bool = False,
    weights: tuple[Weight, ...] | None = None,
    frees: tuple[str, ...] = (),
) -> ModelOperation:
    """A linear layer of `sizes` (inputs, outputs) whose outputs are split; under sequence parallelism it gathers its
    input first."""
    width, features = sizes
    whole = Tensor(x, width)
    collectives: tuple[Collective, ...] = (Collective("all_reduce", TENSOR, whole, is_backward=True),)
    if config.parallel.sequence:
        collectives = (
            Collective("all_gather", TENSOR, whole),
            Collective("all_gather", TENSOR, whole, is_backward=True),  # the input again, for the weights' gradients
            Collective("reduce_scatter", TENSOR, whole, is_backward=True),
        )
    rows = (Split(0, TENSOR),)
    own = [Weight(f"{name}.weight", (features, width), "matrix", rows, gated)]
    own += [Weight(f"{name}.bias", (features,), "bias", rows, gated)] if bias else []
    return ModelOperation(
        "column_linear",
        name,
        (x,),
        (Tensor(output, features, TOKENS, TENSOR),),
        saved=(x,),
        frees=frees,
        weights=tuple(own) if weights is None else weights,
        flops=2.0 * width * features,
        collectives=collectives,
    )


def row_linear(
    config: Config, name: str, x: str, output: str, width: int, *, bias: bool = False, frees: Sequence[str] = ()
) -> list[ModelOperation]:
    """A linear layer back to the hidden size whose `width` inputs are split: the ranks' products are summed."""
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
    return [
        replace(linear, outputs=(partial,)),
        scatter(name, partial, hidden(config, output), (partial.name, *frees)),
    ]


def scatter(name: str, whole: Tensor, own: Tensor, frees: tuple[str, ...] = (), axis: str = TENSOR) -> ModelOperation:
    """Sum `whole` over the ranks; each keeps its own tokens."""
    collectives = (Collective("reduce_scatter", axis, whole), Collective("all_gather", axis, whole, is_backward=True))
    return ModelOperation("scatter", name, (whole.name,), (own,), frees=frees, collectives=collectives)


def norm(
    config: Config,
    name: str,
    x: str,
    output: Tensor,
    width: int,
    *,
    channels: int | None = None,
    frees: tuple[str, ...] = (),
) -> ModelOperation:
    """The model's norm, with `width` weights, over rows of `channels` numbers (`width` where it is not said)."""
    weights = [Weight(f"{name}.weight", (width,), "norm")]
    weights += [Weight(f"{name}.bias", (width,), "bias")] if config.model.normalization == "layernorm" else []
    return ModelOperation(
        "norm", name, (x,), (output,), saved=(x,), frees=frees, weights=tuple(weights), channels=channels or width
    )


def dropout(config: Config, x: str, output: Tensor, frees: tuple[str, ...]) -> list[ModelOperation]:
    """Nothing where the model has none; the caller goes on with `output` where there is one."""
    if config.model.hidden_dropout == 0:
        return []
    return [ModelOperation("dropout", "dropout", (x,), (output,), frees=frees)]


def residual_sum(
    config: Config, x: str, residual: str, output: str, *, biased: bool, frees: tuple[str, ...] = ()
) -> list[ModelOperation]:
    """Bias, dropout and residual sum."""
    operations, last = list[ModelOperation](), x
    if config.model.linear_bias and biased:
        operations.append(copy("bias_add", x, hidden(config, f"{x}.biased")))
        last = f"{x}.biased"
    dropped = dropout(config, last, hidden(config, f"{x}.dropped"), frees=(last,) if last != x else ())
    if dropped:
        operations, last = operations + dropped, f"{x}.dropped"
    own = (last,) if last != x else ()
    return [
        *operations,
        ModelOperation("add", output, outputs=(hidden(config, output),), passes=(last, residual), frees=(*own, *frees)),
    ]


def copy(name: str, x: str, output: Tensor, frees: tuple[str, ...] = ()) -> ModelOperation:
    """A changed copy whose gradient is the output's."""
    return ModelOperation("copy", name, outputs=(output,), passes=(x,), frees=frees)


def recomputed(name: str, inputs: tuple[str, ...], body: Sequence[ModelOperation]) -> ModelOperation:
    """Activation checkpointing around a body."""
    return ModelOperation("recomputed", name, inputs, body[-1].outputs, saved=inputs, body=tuple(body))


def tiled(name: str, x: str, body: Sequence[ModelOperation]) -> ModelOperation:
    """A body that is computed in tiles of a rank's rows, and once more going back."""
    return ModelOperation("tiled", name, (x,), body[-1].outputs, saved=(x,), body=tuple(body))
