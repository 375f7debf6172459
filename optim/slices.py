"""Slices of parameters' state, wherever an optimizer keeps it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer

from optim.state import MOMENTS
from optim.tiers import stored
from optim.tiers.tiers import Tiers, tiers_of
from parallel.megatron.optimizer import find_held

Tag = TypeVar("Tag")


@dataclass(frozen=True)
class StateSlice(Generic[Tag]):
    """A range of a parameter's elements, and what the caller knows it by."""

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
    """Have `change` change what this rank's optimizer holds of these slices, in place: masters and moments, flat
    tensors on the device or the host. It is called as often, and with tensors as long and in the same order, on all
    ranks whose parameters are alike and are asked for the same ranges. Between two steps; a save that is under way has
    been waited for."""
    tiers = tiers_of(optimizer)
    if tiers is not None:
        _change_tiers(tiers, slices, change)
        return
    parts: list[tuple[torch.Tensor, Tag]] = []
    for each, owned in zip(slices, find_held(optimizer, [each.parameter for each in slices]), strict=True):
        if owned is None:
            continue
        start, end = max(each.start, owned.start), min(each.end, owned.end)
        if start < end:
            masters = [] if each.parameter.dtype == torch.float32 else [owned.main]
            moments = [owned.state[kind] for kind in MOMENTS if kind in owned.state]
            parts += [
                (held.detach().view(-1)[start - owned.start : end - owned.start], each.tag)
                for held in masters + moments
            ]
    change(parts)


def _change_tiers(
    tiers: Tiers, slices: Sequence[StateSlice[Tag]], change: Callable[[list[tuple[torch.Tensor, Tag]]], None]
) -> None:
    of_parameter: dict[int, list[StateSlice[Tag]]] = {}
    for each in slices:
        of_parameter.setdefault(id(each.parameter), []).append(each)

    def within(index: int, held: dict[str, torch.Tensor]) -> None:
        parts: list[tuple[torch.Tensor, Tag]] = []
        for piece in tiers.buckets[index].pieces:
            for each in of_parameter.get(id(tiers.slices[piece.index].parameter), ()):
                start, end = max(each.start, piece.start), min(each.end, piece.end)
                first = piece.offset - piece.start
                if start < end:
                    parts += [
                        (held[kind][first + start : first + end], each.tag) for kind in stored.kinds(tiers, index)
                    ]
        change(parts)

    touched = [
        index
        for index, bucket in enumerate(tiers.buckets)
        if any(
            each.start < piece.end and piece.start < each.end
            for piece in bucket.pieces
            for each in of_parameter.get(id(tiers.slices[piece.index].parameter), ())
        )
    ]
    tiers.change(touched, within)
