"""Operations of self attention: grouped queries (Ainslie et al. 2023) or latent attention (arXiv:2405.04434, 2.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from configs import derived
from configs.derived import context_heads, num_cp_ranks
from configs.schema import Config
from models.blueprint.operation import (
    CONTEXT,
    CONTEXT_HEADS,
    EXCHANGED_TOKENS,
    HEADS,
    OWN_TOKENS,
    SCALAR,
    TENSOR,
    TOKENS,
    Collective,
    ModelOperation,
    Split,
    Tensor,
    Weight,
    changed_copy,
    column_linear,
    norm,
    own_row_kind,
    recomputed,
    row_linear,
)

MODULE = "self_attention"


def attention(config: Config, x: str, output: str) -> list[ModelOperation]:
    """Return the operations of attention, from the normalized hidden state `x` to `output`. The bias of `output` is
    added later."""
    return (_latent if config.model.attention == "latent" else _grouped)(config, x, output)


def _grouped(config: Config, x: str, output: str) -> list[ModelOperation]:
    model, head = config.model, derived.head_dim(config)
    heads, groups = model.num_attention_heads, derived.num_query_groups(config)
    bias = model.qkv_bias or model.linear_bias
    sizes = model.hidden_size, (heads + 2 * groups) * head
    query, key, value = (
        _heads(name, number * head) for name, number in (("query", heads), ("key", groups), ("value", groups))
    )
    operations = [
        column_linear(config, f"{MODULE}.linear_qkv", x, "qkv", sizes, bias=bias),
        ModelOperation("split", f"{MODULE}.linear_qkv", ("qkv",), (query, key, value)),
    ]
    held = {"qkv"}

    def then(old: Tensor, new: list[ModelOperation]) -> Tensor:
        """Append operations `new`, whose last output replaces tensor `old`, and return that output. `old` is freed
        unless it is a view."""
        frees = (old.name,) if old.name in held else ()
        operations.extend(new)
        operations[-1] = replace(operations[-1], frees=(*operations[-1].frees, *frees))
        held.difference_update(frees)
        held.add(operations[-1].output.name)
        return operations[-1].output

    rotates = model.position_embedding == "rope" and not model.qk_norm
    if not rotates and 1 < groups // config.parallel.tensor < heads // config.parallel.tensor:
        # The heads of a group are not equally spaced in memory, so they are copied.
        together = _heads("query.together", query.width)
        query = then(query, [ModelOperation("reshape", MODULE, (query.name,), (together,))])
    if model.qk_norm:
        query = then(query, _head_norm(config, "q_layernorm", query, heads))
        key = then(key, _head_norm(config, "k_layernorm", key, groups))
    if rotates:
        # One function rotates and copies them all, so that no view keeps the output of linear_qkv in memory.
        channels = int(head * model.rotary_fraction)
        turned = [_rotated(query, channels), _rotated(key, channels)]
        copied = replace(value, name="value.copied")
        operations += [*turned, ModelOperation("reshape", MODULE, (value.name,), (copied,), frees=tuple(sorted(held)))]
        (query, key), value = (each.output for each in turned), copied
        held = {query.name, key.name, value.name}
    elif model.position_embedding == "rope":
        channels = int(head * model.rotary_fraction)
        query, key = then(query, [_rotated(query, channels)]), then(key, [_rotated(key, channels)])
    operations += _core(config, (query, key, value), (head, head))
    frees = ("context", *sorted(held))
    return operations + row_linear(
        config, f"{MODULE}.linear_proj", "context", output, heads * head, bias=model.linear_bias, frees=frees
    )


def _latent(config: Config, x: str, output: str) -> list[ModelOperation]:
    """Return the operations of latent attention. Keys with values, and possibly queries, are computed through a
    low-rank layer."""
    model, head = config.model, derived.head_dim(config)
    heads, rotating, value_dim = model.num_attention_heads, model.rotary_head_dim, model.value_head_dim
    rank, query_rank, row_kind = model.kv_lora_rank, model.q_lora_rank, own_row_kind(config)
    operations, held = list[ModelOperation](), list[str]()

    queries_from = x
    if query_rank is not None:
        operations += _narrow(config, f"{MODULE}.linear_q_down_proj", x, "query.low", query_rank)
        held.append("query.low")
    operations += _narrow(config, f"{MODULE}.linear_kv_down_proj", x, "low", rank + rotating)
    held.append("low")
    low, turning = Tensor("key_value.low", rank, row_kind), Tensor("rotary_key", rotating, row_kind)
    operations.append(ModelOperation("split", f"{MODULE}.linear_kv_down_proj", ("low",), (low, turning)))
    if config.parallel.sequence:
        whole = Tensor("rotary_key.whole", rotating)
        collectives = (
            Collective("all_gather", TENSOR, whole),
            Collective("reduce_scatter", TENSOR, whole, is_backward=True),
        )
        operations.append(
            ModelOperation("gather", f"{MODULE}.rotary_key", (turning.name,), (whole,), collectives=collectives)
        )
        turning = whole
        held.append(whole.name)
    if query_rank is not None:
        queries_from = "query.low.normed"
        operations.append(
            norm(config, f"{MODULE}.q_layernorm", "query.low", Tensor(queries_from, query_rank, row_kind), query_rank)
        )
        held.append(queries_from)
    operations.append(
        norm(config, f"{MODULE}.kv_layernorm", low.name, Tensor("key_value.normed", rank, row_kind), rank)
    )
    held.append("key_value.normed")
    up = "linear_q_proj" if query_rank is None else "linear_q_up_proj"
    sizes = query_rank or model.hidden_size, heads * (head + rotating)
    operations.append(column_linear(config, f"{MODULE}.{up}", queries_from, "queries", sizes))
    plain_query, turned_query = _heads("query.plain", heads * head), _heads("query.turned", heads * rotating)
    query = _heads("query", heads * (head + rotating))
    query_turn, key_turn = _rotated(turned_query, rotating), _rotated(turning, rotating)
    split = ModelOperation("split", f"{MODULE}.{up}", ("queries",), (plain_query, turned_query))
    joined = ModelOperation("concatenate", MODULE, outputs=(query,), passes=(plain_query.name, query_turn.output.name))
    if config.parallel.context > 1:
        operations += [split, query_turn, replace(joined, frees=("queries", query_turn.output.name))]
        operations += _shared_latents(config, query, key_turn)
        frees = ("context", query.name, "latents", *held)
    else:
        operations += _expanded_latents(config, query, (split, query_turn, joined), key_turn)
        frees = ("context", query.name, "key", "value", *held)
    return operations + row_linear(config, f"{MODULE}.linear_proj", "context", output, heads * value_dim, frees=frees)


def _expanded_latents(
    config: Config, query: Tensor, of_queries: tuple[ModelOperation, ...], key_turn: ModelOperation
) -> list[ModelOperation]:
    """Return the operations of latent attention without context parallelism, where latents are expanded to keys and
    values of all heads. `of_queries`: the split of the queries, their rotation, and their concatenation to `query`.
    `key_turn`: the rotation of the rotary key."""
    model, head = config.model, derived.head_dim(config)
    heads, rotating, value_dim = model.num_attention_heads, model.rotary_head_dim, model.value_head_dim
    name, sizes = f"{MODULE}.linear_kv_up_proj", (model.kv_lora_rank, heads * (head + value_dim))
    plain_key, value_part = _heads("key.plain", heads * head), _heads("value.part", heads * value_dim)
    key, value = _heads("key", heads * (head + rotating)), _heads("value", heads * value_dim)
    split, query_turn, joined = of_queries
    done = ("queries", "keys_values", query_turn.output.name, key_turn.output.name)
    return [
        column_linear(config, name, "key_value.normed", "keys_values", sizes),
        split,
        ModelOperation("split", name, ("keys_values",), (plain_key, value_part)),
        query_turn,
        key_turn,
        joined,
        ModelOperation("concatenate", MODULE, (key_turn.output.name,), (key,), passes=(plain_key.name,)),
        changed_copy(MODULE, value_part.name, value, frees=done),
        *_core(config, (query, key, value), (head + rotating, value_dim)),
    ]


def _shared_latents(config: Config, query: Tensor, key_turn: ModelOperation) -> list[ModelOperation]:
    """Return the operations of latent attention under context parallelism. Ranks exchange latents and rotated keys, and
    expand each round's rows to keys and values, which are not saved. `key_turn`: the rotation of the rotary key."""
    model, head = config.model, derived.head_dim(config)
    heads, rank, rotating = model.num_attention_heads, model.kv_lora_rank, model.rotary_head_dim
    normed, whole = "key_value.normed", Tensor("key_value.whole", rank)
    operations, frees = list[ModelOperation](), [key_turn.output.name]
    collectives: tuple[Collective, ...] = (Collective("all_reduce", TENSOR, whole, is_backward=True),)
    if config.parallel.sequence:
        collectives = Collective("all_gather", TENSOR, whole), Collective("reduce_scatter", TENSOR, whole, True)
        operations.append(
            ModelOperation("gather", f"{MODULE}.kv_layernorm", (normed,), (whole,), collectives=collectives)
        )
        normed, collectives = whole.name, ()
        frees.append(whole.name)
    latents = Tensor("latents", rank + rotating)
    joined = ModelOperation(
        "concatenate", MODULE, (normed, key_turn.output.name), (latents,), frees=tuple(frees), collectives=collectives
    )
    operations += [key_turn, joined]
    shape = heads * (head + model.value_head_dim), rank
    weight = Weight(f"{MODULE}.linear_kv_up_proj.weight", shape, "matrix", (Split(0, TENSOR),))
    return operations + _core(config, (query, latents), (head + rotating, model.value_head_dim), weight)


def _narrow(config: Config, name: str, x: str, output: str, width: int) -> list[ModelOperation]:
    """Return the operations of a low-rank linear layer. Its output is split over the tensor ranks and then gathered on
    each rank; with sequence parallelism, each rank then keeps only its own tokens."""
    if config.parallel.tensor == 1:
        return [column_linear(config, name, x, output, (config.model.hidden_size, width))]
    split_output, whole = f"{output}.part", Tensor(output, width)
    gathered: tuple[Collective, ...] = (Collective("all_gather", TENSOR, whole),)
    if config.parallel.sequence:
        whole = Tensor(f"{output}.whole", width)
    elif name.endswith("linear_kv_down_proj"):
        # In the backward pass each rank takes its slice of the gradient; the rotary key's is summed over ranks first.
        shared = Tensor("rotary_key", config.model.rotary_head_dim)
        gathered += (Collective("all_reduce", TENSOR, shared, is_backward=True),)
    operations = [
        column_linear(config, name, x, split_output, (config.model.hidden_size, width)),
        ModelOperation("gather", name, (split_output,), (whole,), frees=(split_output,), collectives=gathered),
    ]
    if config.parallel.sequence:
        own, given = Tensor(output, width, OWN_TOKENS), (whole.name,)
        collectives = (Collective("all_gather", TENSOR, whole, is_backward=True),)
        operations.append(ModelOperation("scatter", name, given, (own,), frees=given, collectives=collectives))
    return operations


def _core(
    config: Config, own: Sequence[Tensor], channels: tuple[int, int], expansion: Weight | None = None
) -> list[ModelOperation]:
    """Return the operations of core attention (scores, softmax, weighted sum), with FLOPs for all query-key pairs,
    masked or not. Context-parallel ranks exchange heads for sequence rows before it, and back after it. Keys and values
    are sent in rounds.

    `own`: query, key and value; or query and latents, with the weight that expands these (`expansion`). `channels`: of
    a key head and of a value head.
    """
    heads, ranks = config.model.num_attention_heads, config.parallel.tensor * context_heads(config)
    given, exchanges, inputs = list(own), context_heads(config) > 1, tuple(tensor.name for tensor in own)
    output = _heads("context", heads * channels[1])
    operations, attended = list[ModelOperation](), output
    widths, axis = [own[1].width], None  # one latent for all heads
    if expansion is None:
        # With fewer key heads than ranks, several ranks hold the same head.
        key_heads = max(own[1].width // channels[0], ranks)
        widths, axis = [key_heads * size for size in channels], HEADS
    if exchanges:
        given = [_exchanged(own[0].name, own[0].width)]
        given += [_exchanged(tensor.name, width, axis) for tensor, width in zip(own[1:], widths, strict=True)]
        attended = _exchanged("context", output.width)
        collectives = _both_directions("all_to_all", *given)
        operations.append(ModelOperation("exchange", f"{MODULE}.heads", inputs, tuple(given), collectives=collectives))
    names: tuple[str, ...] = tuple(tensor.name for tensor in given)
    if expansion is not None:
        # The attention expands keys and values itself, again in the backward pass: none are kept.
        name, (outputs, width) = expansion.name.removesuffix(".weight"), expansion.shape
        operations.append(ModelOperation("expansion", name, weights=(expansion,), flops=2.0 * outputs * width))
    row = Tensor("key_value", sum(widths), SCALAR, axis)
    # In the backward pass, keys and values are sent again, and their gradients are sent back.
    rounds = (*_both_directions("rounds", row), Collective("rounds", CONTEXT, row, is_backward=True))
    operations.append(
        ModelOperation(
            "attention" if expansion is None else "latent_attention",
            f"{MODULE}.core_attention",
            names,
            (attended,),
            saved=(*names, attended.name),
            flops=2.0 * heads * sum(channels) * config.model.sequence_length,
            collectives=rounds if num_cp_ranks(config) > 1 else (),
        )
    )
    if exchanges:
        collectives = _both_directions("all_to_all", attended)
        frees = (*names, attended.name)
        operations.append(
            ModelOperation(
                "exchange", f"{MODULE}.heads", (attended.name,), (output,), frees=frees, collectives=collectives
            )
        )
    if config.training.recompute == "selective":
        return [recomputed(f"{MODULE}.core_attention", inputs, operations)]
    return operations


def _exchanged(name: str, width: int, axis: str | None = HEADS) -> Tensor:
    """Return the description of a tensor after the all-to-all that gathers sequence rows and splits heads. `axis`: None
    if the tensor has no head dimension."""
    return Tensor(f"{name}.exchanged", width, EXCHANGED_TOKENS, axis)


def _both_directions(kind: str, *wholes: Tensor) -> tuple[Collective, ...]:
    axis = CONTEXT_HEADS if kind == "all_to_all" else CONTEXT
    return tuple(Collective(kind, axis, whole, is_backward) for is_backward in (False, True) for whole in wholes)


def _heads(name: str, width: int) -> Tensor:
    return Tensor(name, width, TOKENS, TENSOR)


def _head_norm(config: Config, module: str, x: Tensor, heads: int) -> list[ModelOperation]:
    name, head = f"{MODULE}.{module}", derived.head_dim(config)
    output = _heads(f"{x.name}.normed", x.width)
    if config.model.qk_norm_over == "head":
        return [norm(config, name, x.name, output, head)]
    width, channels = heads * head, heads * head // config.parallel.tensor
    together = _heads(f"{x.name}.flat", x.width)  # the heads are not adjacent: those of other tensors are between them
    return [
        ModelOperation("reshape", name, (x.name,), (together,)),
        norm(config, name, together.name, output, width, channels=channels, frees=(together.name,)),
    ]


def _rotated(x: Tensor, channels: int) -> ModelOperation:
    output = Tensor(f"{x.name}.rotated", x.width, x.row_kind, x.axis)
    return ModelOperation("rotary", f"{MODULE}.rotary", (x.name,), (output,), channels=channels)
