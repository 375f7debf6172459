"""Optimizer state that lies off the device, in the model's own terms: boxes that say where their elements lie, without
them.

A tier keeps state in buckets, a flat tensor of each kind. A checkpoint is written and filled bucket by bucket, so that
neither ever takes memory for all of it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from optim.tiers.buckets import WEIGHT
from optim.tiers.tiers import Tiers

Held = dict[str, torch.Tensor]  # of a bucket: a flat tensor of each kind, on the host


@dataclass
class StoredTensor(ShardedTensor):
    """A box of a parameter's state in a bucket. `data` is a meta tensor: its shape, strides and offset say which
    elements of the bucket's flat tensor it is."""

    bucket: int = 0
    kind: str = ""

    @classmethod
    def of(cls, box: ShardedTensor, bucket: int, kind: str) -> StoredTensor:
        """The same box of a global tensor, as a place in a bucket."""
        return cls(**{field.name: getattr(box, field.name) for field in fields(box)}, bucket=bucket, kind=kind)

    def within(self, held: Held) -> torch.Tensor:
        """The box's elements: a view into what the tier holds of its bucket."""
        assert self.data is not None
        flat = held[self.kind]
        first = flat.storage_offset() + self.data.storage_offset()
        return flat.as_strided(self.data.shape, self.data.stride(), first)


def by_bucket(tensors: Sequence[ShardedTensor]) -> dict[int, list[StoredTensor]]:
    """The tensors that lie in buckets, by bucket, in the order of the buckets."""
    result: dict[int, list[StoredTensor]] = {}
    for tensor in tensors:
        if isinstance(tensor, StoredTensor):
            result.setdefault(tensor.bucket, []).append(tensor)
    return dict(sorted(result.items()))


@torch.no_grad()
def fill(tiers: Tiers, tensors: Sequence[ShardedTensor], read: Callable[[ShardedTensor], None]) -> None:
    """Have `read` fill every bucket's boxes, one bucket after the other. What has no box becomes zero: moments that no
    step has made yet."""
    boxes = by_bucket(tensors)
    for index in range(len(tiers.buckets)):
        held = tiers.empty(index)
        for value in held.values():
            value.zero_()
        for box in boxes.get(index, []):
            target = copy.copy(box)
            target.data = box.within(held)
            read(target)
        tiers.fill(index)


def named(tiers: Tiers, names: dict[int, str]) -> Iterator[tuple[str, str, torch.Tensor]]:
    """(parameter's name, kind, tensor) of each part, by the names of the parameters' ids; a tensor may be read until
    the next is asked for."""
    hold = tiers.hold()
    try:
        for index, bucket in enumerate(tiers.buckets):
            held = hold.read(index)
            for piece in bucket.pieces:
                for kind in kinds(tiers, index):
                    value = held[kind][piece.offset : piece.offset + piece.end - piece.start]
                    yield names[id(tiers.slices[piece.index].parameter)], kind, value
            hold.release(index)
    finally:
        hold.close()


def kinds(tiers: Tiers, index: int) -> dict[str, torch.dtype]:
    """What there is of a bucket: its state, and its weights where they lie off the device."""
    off_device = tiers.experts is not None and tiers.buckets[index].of_experts is not None
    weights = {WEIGHT: tiers.experts.dtype} if tiers.experts is not None and off_device else {}
    return {**weights, **state_kinds(tiers)}


def state_kinds(tiers: Tiers) -> dict[str, torch.dtype]:
    """What there is of any bucket's state: before the first step no moments."""
    return {kind: dtype for kind, dtype in tiers.layout.kinds.items() if kind == "master" or tiers.steps > 0}
