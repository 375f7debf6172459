"""Optimizer state in the model's own terms, so that a checkpoint fits every layout and both optimizer kinds.

Megatron's optimizers keep their state per kind: whole tensors (plain), or slices of one flat buffer that ignore where a
parameter ends (sharded). Neither loads into the other, and a chain of two (dense and expert) not into one. Here each
parameter's state is brought to the parameter's shape and named after it, with the sharding of the model's own
checkpoint: `optimizer.exp_avg.<name>`, `optimizer.exp_avg_sq.<name>` and, in half precision, `optimizer.master.<name>`.
Every rank writes what it owns, straight from where it lies, and reads only that: neither saving nor loading
communicates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.optimizer import get_param_id_to_sharded_param_map
from megatron.core.optimizer.optimizer import MegatronOptimizer

from optim.tiers import stored
from optim.tiers.buckets import WEIGHT
from optim.tiers.stored import StoredTensor
from optim.tiers.tiers import Tiers, tiers_of
from parallel.megatron.optimizer import (
    HeldPart,
    find_held,
    is_sharded,
    members,
    scale_and_least,
    scaler_numbers,
    scaler_of,
    set_scaler_numbers,
)
from parallel.owned import owner_of

MOMENTS = ("exp_avg", "exp_avg_sq")


def _owned(optimizer: MegatronOptimizer, parameters: list[tuple[str, torch.nn.Parameter]]) -> list[HeldPart | None]:
    return find_held(optimizer, [parameter for _, parameter in parameters])


def _parameters(chunks: list[torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    for i, chunk in enumerate(chunks):
        for name, parameter in chunk.named_parameters():
            if parameter.requires_grad:
                yield f"{i}.{name}", parameter


def sharded_state(
    optimizer: MegatronOptimizer, chunks: list[torch.nn.Module], model_state: dict[str, Any]
) -> list[ShardedTensor]:
    """This rank's optimizer state: views into it, each a box of a parameter's state. Makes no copy and asks no other
    rank. Of state off the device StoredTensors: places without data.

    `model_state` is the sharded state dict of the same chunks. A sharded optimizer owns of a parameter a range of its
    elements, which is a few boxes; as every element has one owner, every box is the main replica among the data
    parallel ranks. Before the first step there are no moments.
    """
    parameters = list(_parameters(chunks))
    sharded_by_id = get_param_id_to_sharded_param_map(model_state, (parameter for _, parameter in parameters))
    tiers = tiers_of(optimizer)
    if tiers is not None:
        return _stored_state(tiers, parameters, sharded_by_id)
    steps = steps_taken(optimizer)
    result: list[ShardedTensor] = []
    for i, ((_, parameter), owned) in enumerate(zip(parameters, _owned(optimizer, parameters), strict=True)):
        if owned is None or owned.start == owned.end:
            continue
        held = {} if parameter.dtype == torch.float32 else {"master": owned.main}
        if steps > 0:
            # A parameter that never had a gradient has no moments: zeros, as the optimizer would start with.
            held |= {kind: owned.state.get(kind, torch.zeros(0)) for kind in MOMENTS}
            held = {kind: value if value.numel() else torch.zeros_like(owned.main) for kind, value in held.items()}
        whole = _shards(sharded_by_id[i], parameter.shape)
        for kind, value in held.items():
            result += _state_boxes(
                whole, parameter.shape, kind, (owned.start, owned.end), value, is_sharded(owned.member)
            )
    return result


def _stored_state(
    tiers: Tiers, parameters: list[tuple[str, torch.nn.Parameter]], sharded_by_id: dict[int, Any]
) -> list[ShardedTensor]:
    order = {id(parameter): i for i, (_, parameter) in enumerate(parameters)}
    result: list[ShardedTensor] = []
    for index, bucket in enumerate(tiers.buckets):
        for piece in bucket.pieces:
            parameter = tiers.slices[piece.index].parameter
            whole = _shards(sharded_by_id[order[id(parameter)]], parameter.shape)
            parts = tiers.experts is not None and bucket.of_experts is not None and tiers.experts.records.parts > 1
            sharded = parts or owner_of(parameter) is None
            for kind, dtype in stored.kinds(tiers, index).items():
                place = torch.empty(bucket.numel, dtype=dtype, device="meta")[piece.offset :]
                for box in _state_boxes(whole, parameter.shape, kind, (piece.start, piece.end), place, sharded):
                    result.append(StoredTensor.of(box, index, kind))
    return result


def _state_boxes(
    whole: list[ShardedTensor],
    shape: torch.Size,
    kind: str,
    span: tuple[int, int],
    value: torch.Tensor,
    sharded: bool,
) -> Iterator[ShardedTensor]:
    """The boxes of a range of a parameter's elements, whose state `value` holds, under the names that checkpoints
    have."""
    for shard in whole:
        replica_id = (*shard.replica_id[:-1], 0) if sharded else shard.replica_id
        key = shard.key if kind == WEIGHT else f"optimizer.{kind}.{shard.key}"
        named = replace(shard, key=key, replica_id=replica_id)
        yield from _owned_boxes(named, shape, span, value)


def _shards(sharded: ShardedTensor | ShardedTensorFactory, shape: torch.Size) -> list[ShardedTensor]:
    """The boxes that make up a parameter in the model's checkpoint, as views into a parameter that takes no memory."""
    shadow = torch.empty(shape, dtype=torch.float32, device="meta")
    shards = (
        sharded.build_fn(sharded.key, shadow, sharded.replica_id, None)
        if isinstance(sharded, ShardedTensorFactory)
        else None
    )
    return list(nested_values(shards)) if shards is not None else [replace(sharded, data=shadow, dtype=shadow.dtype)]


def _owned_boxes(
    shard: ShardedTensor, shape: torch.Size, span: tuple[int, int], value: torch.Tensor
) -> Iterator[ShardedTensor]:
    """What lies both in a shard of a parameter (a view into it) and in a range of its elements, which `value` holds."""
    view = shard.data
    strides = torch.empty(shape, device="meta").stride()
    assert view.dim() == len(shape) and view.stride() == strides, (
        f"{shard.key} is no box of its parameter: {view.stride()}, {strides}"
    )
    first = [view.storage_offset() // stride % size for stride, size in zip(strides, shape)]
    flat, prepended = value.detach().view(-1), shard.prepend_axis_num
    for start, sizes in boxes(tuple(shape), *span):
        low = [max(a, b) for a, b in zip(start, first)]
        high = [min(a + n, b + m) for a, n, b, m in zip(start, sizes, first, view.shape)]
        if any(a >= b for a, b in zip(low, high)):
            continue
        at = sum(a * stride for a, stride in zip(low, strides)) - span[0] + flat.storage_offset()
        data = flat.as_strided([b - a for a, b in zip(low, high)], strides, at)
        inner = [offset + a - b for offset, a, b in zip(shard.global_offset[prepended:], low, first)]
        yield replace(
            shard,
            data=data,
            dtype=data.dtype,
            local_shape=tuple(data.shape),
            global_offset=(*shard.global_offset[:prepended], *inner),
            axis_fragmentations=None,  # no regular grid
        )


def boxes(shape: tuple[int, ...], start: int, end: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut the elements [start, end) of a row-major tensor into boxes, (first corner, sizes) each: at most 2 *
    dimensions - 1."""
    if len(shape) <= 1:
        if start < end:
            yield ((start,), (end - start,)) if shape else ((), ())
        return
    row = math.prod(shape[1:])
    if row == 0:
        return
    index, rest = divmod(start, row)
    if rest:
        stop = min(end, (index + 1) * row)
        yield from (((index, *a), (1, *n)) for a, n in boxes(shape[1:], rest, stop - index * row))
        start = stop
    whole = max(end - start, 0) // row
    if whole:
        yield (start // row, *(0 for _ in shape[1:])), (whole, *shape[1:])
        start += whole * row
    yield from (((start // row, *a), (1, *n)) for a, n in boxes(shape[1:], 0, end - start))


@torch.no_grad()
def allocate(optimizer: MegatronOptimizer, chunks: list[torch.nn.Module], steps: int) -> None:
    """Make the optimizer look as it does after `steps` steps, with zeros for moments, so that `sharded_state` has views
    to fill."""
    tiers = tiers_of(optimizer)
    if tiers is not None:
        tiers.drop()
        tiers.settle()  # no weight of an earlier step comes back any more
        tiers.steps = steps
        return
    parameters = list(_parameters(chunks))
    for owned in _owned(optimizer, parameters):
        if owned is None:
            continue
        inner = owned.member.optimizer
        if steps == 0:
            inner.state.pop(owned.main, None)
            continue
        state: dict[str, Any] = {kind: torch.zeros_like(owned.main, dtype=torch.float32) for kind in MOMENTS}
        if isinstance(inner, torch.optim.AdamW):
            on_device = any(group.get("fused") or group.get("capturable") for group in inner.param_groups)
            state["step"] = torch.tensor(
                float(steps), dtype=torch.float32, device=owned.main.device if on_device else "cpu"
            )
        inner.state[owned.main] = state
    for member in members(optimizer):
        if member.optimizer is not None and not isinstance(member.optimizer, torch.optim.AdamW):
            for group in member.optimizer.param_groups:  # TransformerEngine and apex count steps per group
                group["step"] = steps


def steps_taken(optimizer: MegatronOptimizer) -> int:
    """Optimizer steps taken so far (fp16 skips some), the same on every rank that holds parameters; 0 before the
    first."""
    tiers = tiers_of(optimizer)
    if tiers is not None:
        return int(tiers.steps)
    for member in members(optimizer):
        if member.optimizer is None:
            continue
        for group in member.optimizer.param_groups:
            if "step" in group:
                return int(group["step"])
        for state in member.optimizer.state.values():
            if "step" in state:
                return int(state["step"])
    return 0


def scaler_state(optimizer: MegatronOptimizer) -> dict[str, float] | None:
    """The fp16 loss scaler's numbers, or None in other precisions."""
    scaler = scaler_of(optimizer)
    return None if scaler is None else scaler_numbers(scaler)


def loss_scale(optimizer: MegatronOptimizer) -> tuple[float, float]:
    """The fp16 loss scale as it is now and the lowest that it may fall to."""
    return scale_and_least(scaler_of(optimizer))


def restore_scaler(optimizer: MegatronOptimizer, saved: dict[str, float] | None) -> None:
    """Undo `scaler_state`; None leaves the initial scale."""
    scaler = scaler_of(optimizer)
    if scaler is not None and saved is not None:
        set_scaler_numbers(scaler, saved)


def named_state(
    optimizer: MegatronOptimizer, chunks: list[torch.nn.Module]
) -> Iterator[tuple[int, str, str, torch.Tensor]]:
    """What this rank's optimizer holds beside the model's parameters: (chunk, parameter's name, kind, tensor) of each
    part. Of state off the device a part is of one bucket, read from where it lies, and valid until the next; weights
    that lie there are of the kind WEIGHT."""
    parameters = list(_parameters(chunks))
    tiers = tiers_of(optimizer)
    if tiers is not None:
        for name, kind, value in stored.named(tiers, {id(parameter): name for name, parameter in parameters}):
            chunk, _, rest = name.partition(".")
            yield int(chunk), rest, kind, value
        return
    for (name, parameter), owned in zip(parameters, _owned(optimizer, parameters), strict=True):
        if owned is None:
            continue
        held = {} if parameter.dtype == torch.float32 else {"master": owned.main}
        held |= {kind: owned.state[kind] for kind in MOMENTS if kind in owned.state}
        chunk, _, rest = name.partition(".")
        yield from ((int(chunk), rest, kind, value) for kind, value in held.items())


def state_bytes(optimizer: MegatronOptimizer, chunks: list[torch.nn.Module]) -> dict[str, int]:
    """Bytes of this rank's optimizer state on the device, the host and the disk: masters and moments, as they are once
    a step was taken."""
    tiers, found = tiers_of(optimizer), {"device": 0, "host": 0, "disk": 0}
    if tiers is not None:
        for size, tier in zip(tiers.memory.arrangement.sizes, tiers.memory.arrangement.tiers, strict=True):
            found[tier] += size
        return found
    parameters = list(_parameters(chunks))
    for (_, parameter), owned in zip(parameters, _owned(optimizer, parameters), strict=True):
        if owned is not None:
            kinds = len(MOMENTS) + (parameter.dtype != torch.float32)
            found["device"] += kinds * owned.main.numel() * torch.float32.itemsize
    return found


def fill_stored(
    optimizer: MegatronOptimizer, tensors: Sequence[ShardedTensor], read: Callable[[ShardedTensor], None]
) -> None:
    """Have `read` fill what `sharded_state` gave of state off the device, if any, a bucket at a time."""
    tiers = tiers_of(optimizer)
    if tiers is not None:
        stored.fill(tiers, tensors, read)
