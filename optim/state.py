"""Optimizer state per parameter, so that a checkpoint can be loaded with any parallel layout and either kind of
optimizer.

Megatron's plain optimizer stores whole tensors; its sharded one stores slices of a flat buffer, which cross the ends of
parameters. Neither can load the other's state. Here the state of each parameter has the parameter's shape and name, and
its sharding in the model's checkpoint: `optimizer.exp_avg.<name>`, `optimizer.exp_avg_sq.<name>` and, in half
precision, `optimizer.master.<name>`. Each rank writes and reads only the state that it has, without communication.

Offloaded state has buckets, each with one flat tensor per kind of state. A checkpoint is written and loaded bucket by
bucket, so neither needs memory for all state.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Generic, TypeVar

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.optimizer import get_param_id_to_sharded_param_map
from megatron.core.optimizer.optimizer import MegatronOptimizer

from optim.offload.optimizer import OffloadedOptimizer, offload_of
from optim.offload.records import WEIGHT
from parallel.megatron.optimizer import HeldShard, find_held, is_sharded, members
from parallel.owned import owner_of

Tag = TypeVar("Tag")
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass
class StoredTensor(ShardedTensor):
    """A box (a rectangular range) of a parameter's optimizer state that is stored in a bucket.

    `data`: meta view of the bucket's flat tensor. `kind`: such as master or exp_avg.
    """

    bucket: int = 0
    kind: str = ""

    @classmethod
    def of(cls, box: ShardedTensor, bucket: int, kind: str) -> StoredTensor:
        """Return a box (rectangular range) of a parameter's state as elements of a bucket's flat tensor of one kind."""
        return cls(**{field.name: getattr(box, field.name) for field in fields(box)}, bucket=bucket, kind=kind)

    def within(self, state: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the elements of this box as a view into its bucket's state: flat host tensors by kind."""
        assert self.data is not None
        flat = state[self.kind]
        first = flat.storage_offset() + self.data.storage_offset()
        return flat.as_strided(self.data.shape, self.data.stride(), first)


def _parameters(chunks: list[torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    for i, chunk in enumerate(chunks):
        for name, parameter in chunk.named_parameters():
            if parameter.requires_grad:
                yield f"{i}.{name}", parameter


def _held(
    optimizer: MegatronOptimizer, chunks: list[torch.nn.Module]
) -> Iterator[tuple[str, torch.nn.Parameter, HeldShard | None]]:
    named = list(_parameters(chunks))
    shards = find_held(optimizer, [parameter for _, parameter in named])
    yield from ((*each, shard) for each, shard in zip(named, shards, strict=True))


def sharded_state(
    optimizer: MegatronOptimizer, chunks: list[torch.nn.Module], model_state: dict[str, Any]
) -> list[ShardedTensor]:
    """Return this rank's optimizer state as boxes (rectangular ranges) of the parameters' state.

    Boxes are views of state on the device, or StoredTensors without data for offloaded state. Nothing is copied or
    communicated. `model_state` is the sharded state dict of the same model chunks. A sharded optimizer has a range of a
    parameter's elements, which is cut into a few boxes. Each element is on one data-parallel rank, so each box is a
    main replica. Before the first step there are no moments.
    """
    parameters = list(_parameters(chunks))
    sharded_by_id = get_param_id_to_sharded_param_map(model_state, (parameter for _, parameter in parameters))
    if (offload := offload_of(optimizer)) is not None:
        return _stored_state(offload, parameters, sharded_by_id)
    steps = steps_taken(optimizer)
    result: list[ShardedTensor] = []
    for i, (_, parameter, owned) in enumerate(_held(optimizer, chunks)):
        if owned is None or owned.start == owned.end:
            continue
        held = {} if parameter.dtype == torch.float32 else {"master": owned.main}
        if steps > 0:
            # A parameter that never had a gradient has no moments: they are zero, as at the optimizer's start.
            held |= {kind: owned.state.get(kind, torch.zeros(0)) for kind in MOMENTS}
            held = {kind: value if value.numel() else torch.zeros_like(owned.main) for kind, value in held.items()}
        whole = _shards(sharded_by_id[i], parameter.shape)
        for kind, value in held.items():
            result += _state_boxes(
                whole, parameter.shape, kind, (owned.start, owned.end), value, is_sharded(owned.member)
            )
    return result


def _stored_state(
    offload: OffloadedOptimizer, parameters: list[tuple[str, torch.nn.Parameter]], sharded_by_id: dict[int, Any]
) -> list[ShardedTensor]:
    order = {id(parameter): i for i, (_, parameter) in enumerate(parameters)}
    has_shards = offload.experts is not None and offload.experts.records.num_shards > 1
    result: list[ShardedTensor] = []
    for index, bucket in enumerate(offload.buckets):
        for span in bucket.slice_spans:
            parameter = offload.slices[span.index].parameter
            whole = _shards(sharded_by_id[order[id(parameter)]], parameter.shape)
            sharded = (has_shards and bucket.expert_bucket is not None) or owner_of(parameter) is None
            for kind, dtype in _bucket_kinds(offload, index).items():
                data = torch.empty(bucket.numel, dtype=dtype, device="meta")[span.offset :]
                for box in _state_boxes(whole, parameter.shape, kind, (span.start, span.end), data, sharded):
                    result.append(StoredTensor.of(box, index, kind))
    return result


def _bucket_kinds(offload: OffloadedOptimizer, index: int) -> dict[str, torch.dtype]:
    """Return the kinds of state that a bucket has, with their dtypes.

    Before the first step there are no moments. Only buckets of offloaded experts have weights.
    """
    is_expert = offload.experts is not None and offload.buckets[index].expert_bucket is not None
    weights = {WEIGHT: offload.experts.dtype} if offload.experts is not None and is_expert else {}
    kinds = {kind: dtype for kind, dtype in offload.layout.kinds.items() if kind == "master" or offload.steps > 0}
    return {**weights, **kinds}


def _state_boxes(
    whole: list[ShardedTensor], shape: torch.Size, kind: str, span: tuple[int, int], value: torch.Tensor, sharded: bool
) -> Iterator[ShardedTensor]:
    """Yield a range of a parameter's state as boxes (rectangular ranges) with the names that checkpoints use.

    `span`: [start, end) in the flattened parameter. `value`: its state there. `whole`: the parameter's shards in the
    checkpoint. `sharded`: whether the optimizer is sharded over data-parallel ranks.
    """
    for shard in whole:
        replica_id = (*shard.replica_id[:-1], 0) if sharded else shard.replica_id
        key = shard.key if kind == WEIGHT else f"optimizer.{kind}.{shard.key}"
        named = replace(shard, key=key, replica_id=replica_id)
        yield from _owned_boxes(named, shape, span, value)


def _shards(sharded: ShardedTensor | ShardedTensorFactory, shape: torch.Size) -> list[ShardedTensor]:
    """Return the boxes (rectangular ranges) into which a checkpoint splits a parameter, as views into a meta tensor."""
    shadow = torch.empty(shape, dtype=torch.float32, device="meta")
    if isinstance(sharded, ShardedTensorFactory):
        return list(nested_values(sharded.build_fn(sharded.key, shadow, sharded.replica_id, None)))
    return [replace(sharded, data=shadow, dtype=shadow.dtype)]


def _owned_boxes(
    shard: ShardedTensor, shape: torch.Size, span: tuple[int, int], value: torch.Tensor
) -> Iterator[ShardedTensor]:
    """Yield a range of a parameter's state as boxes (rectangular ranges), without elements outside one shard.

    `shard`: the part of the parameter in the model's checkpoint. `span`: [start, end) in the flattened parameter.
    `value`: its state there.
    """
    view = shard.data
    strides = torch.empty(shape, device="meta").stride()
    assert view.dim() == len(shape) and view.stride() == strides, (
        f"{shard.key} is not a box of its parameter: its strides are {view.stride()}, not {strides}"
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
    """Cut elements [start, end) of a row-major tensor into at most 2 * dimensions - 1 boxes: (first corner, sizes)."""
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
    """Give the optimizer the state it has after `steps` steps, with zero moments, to load a checkpoint into it."""
    if (offload := offload_of(optimizer)) is not None:
        offload.expect_state(steps)
        return
    for _, _, owned in _held(optimizer, chunks):
        if owned is None:
            continue
        inner = owned.member.optimizer
        if steps == 0:
            inner.state.pop(owned.main, None)
            continue
        state: dict[str, Any] = {kind: torch.zeros_like(owned.main, dtype=torch.float32) for kind in MOMENTS}
        if isinstance(inner, torch.optim.AdamW):
            on_device = any(group.get("fused") or group.get("capturable") for group in inner.param_groups)
            device = owned.main.device if on_device else "cpu"
            state["step"] = torch.tensor(float(steps), dtype=torch.float32, device=device)
        inner.state[owned.main] = state
    for member in members(optimizer):
        if member.optimizer is not None and not isinstance(member.optimizer, torch.optim.AdamW):
            for group in member.optimizer.param_groups:  # TransformerEngine and apex count steps per group
                group["step"] = steps


def steps_taken(optimizer: MegatronOptimizer) -> int:
    """Return how many steps the optimizer has taken (fp16 skips some), equal on all ranks that have parameters."""
    if (offload := offload_of(optimizer)) is not None:
        return int(offload.steps)
    inner = [member.optimizer for member in members(optimizer) if member.optimizer is not None]
    counters = (entry for each in inner for entry in (*each.param_groups, *each.state.values()) if "step" in entry)
    return next((int(entry["step"]) for entry in counters), 0)


def named_state(
    optimizer: MegatronOptimizer, chunks: list[torch.nn.Module]
) -> Iterator[tuple[int, str, str, torch.Tensor]]:
    """Yield this rank's optimizer state as (model chunk, parameter name, kind of state, tensor).

    Tensors of offloaded state are valid until the next bucket is reached. Offloaded weights have the kind WEIGHT.
    """
    if (offload := offload_of(optimizer)) is not None:
        names = {id(parameter): name for name, parameter in _parameters(chunks)}
        snapshot = offload.snapshot()
        try:
            for index, bucket in enumerate(offload.buckets):
                state, kinds = snapshot.read(index), _bucket_kinds(offload, index)
                for span in bucket.slice_spans:
                    chunk, _, rest = names[id(offload.slices[span.index].parameter)].partition(".")
                    for kind in kinds:
                        yield int(chunk), rest, kind, state[kind][span.offset : span.offset + span.end - span.start]
                snapshot.release(index)
        finally:
            snapshot.close()
        return
    for name, parameter, owned in _held(optimizer, chunks):
        if owned is None:
            continue
        held = {} if parameter.dtype == torch.float32 else {"master": owned.main}
        held |= {kind: owned.state[kind] for kind in MOMENTS if kind in owned.state}
        chunk, _, rest = name.partition(".")
        yield from ((int(chunk), rest, kind, value) for kind, value in held.items())


def state_bytes(optimizer: MegatronOptimizer, chunks: list[torch.nn.Module]) -> dict[str, int]:
    """Return the bytes of this rank's masters and moments after a step, as a dict by "device", "host" and "disk"."""
    offload, found = offload_of(optimizer), {"device": 0, "host": 0, "disk": 0}
    if offload is not None:
        arrangement = offload.memory.arrangement
        for size, target in zip(arrangement.sizes, arrangement.targets, strict=True):
            found[target] += size
        return found
    for _, parameter, owned in _held(optimizer, chunks):
        if owned is not None:
            kinds = len(MOMENTS) + (parameter.dtype != torch.float32)
            found["device"] += kinds * owned.main.numel() * torch.float32.itemsize
    return found


@torch.no_grad()
def fill_stored(
    optimizer: MegatronOptimizer, tensors: Sequence[ShardedTensor], read: Callable[[ShardedTensor], None]
) -> None:
    """Load offloaded optimizer state bucket by bucket; `read` fills each StoredTensor.

    State that none of the tensors covers becomes zero.
    """
    if (offload := offload_of(optimizer)) is None:
        return
    boxes: dict[int, list[StoredTensor]] = {}
    for tensor in tensors:
        if isinstance(tensor, StoredTensor):
            boxes.setdefault(tensor.bucket, []).append(tensor)
    for index in range(len(offload.buckets)):
        state = offload.empty(index)
        for value in state.values():
            value.zero_()
        for box in boxes.get(index, []):
            target = copy.copy(box)
            target.data = box.within(state)
            read(target)
        offload.fill(index)


@dataclass(frozen=True)
class StateSlice(Generic[Tag]):
    """Elements [start, end) of a flattened parameter, with a tag that the caller gets back with their state."""

    parameter: torch.nn.Parameter
    start: int
    end: int
    tag: Tag


@torch.no_grad()
def change_state(
    optimizer: MegatronOptimizer,
    slices: Sequence[StateSlice[Tag]],
    change: Callable[[list[tuple[torch.Tensor, Tag]]], None],
) -> None:
    """Call `change` to modify this rank's masters and moments of some slices in place, as (flat tensor, tag) pairs.

    Ranks with the same parameters that pass the same ranges get the same calls, with tensors of the same sizes in the
    same order. Call it between two steps, while no save is in flight.
    """
    if (offload := offload_of(optimizer)) is not None:
        _change_offloaded(offload, slices, change)
        return
    tensors: list[tuple[torch.Tensor, Tag]] = []
    for each, owned in zip(slices, find_held(optimizer, [each.parameter for each in slices]), strict=True):
        if owned is None:
            continue
        start, end = max(each.start, owned.start), min(each.end, owned.end)
        if start < end:
            masters = [] if each.parameter.dtype == torch.float32 else [owned.main]
            moments = [owned.state[kind] for kind in MOMENTS if kind in owned.state]
            tensors += [
                (held.detach().view(-1)[start - owned.start : end - owned.start], each.tag)
                for held in masters + moments
            ]
    change(tensors)


def _change_offloaded(
    offload: OffloadedOptimizer,
    slices: Sequence[StateSlice[Tag]],
    change: Callable[[list[tuple[torch.Tensor, Tag]]], None],
) -> None:
    of_parameter: dict[int, list[StateSlice[Tag]]] = {}
    for each in slices:
        of_parameter.setdefault(id(each.parameter), []).append(each)

    def within(index: int, state: dict[str, torch.Tensor]) -> None:
        tensors: list[tuple[torch.Tensor, Tag]] = []
        kinds = _bucket_kinds(offload, index)
        for span in offload.buckets[index].slice_spans:
            for each in of_parameter.get(id(offload.slices[span.index].parameter), ()):
                start, end = max(each.start, span.start), min(each.end, span.end)
                first = span.offset - span.start
                if start < end:
                    tensors += [(state[kind][first + start : first + end], each.tag) for kind in kinds]
        change(tensors)

    touched = [
        index
        for index, bucket in enumerate(offload.buckets)
        if any(
            each.start < span.end and span.start < each.end
            for span in bucket.slice_spans
            for each in of_parameter.get(id(offload.slices[span.index].parameter), ())
        )
    ]
    offload.change(touched, within)
