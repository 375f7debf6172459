"""The gradient norm by part of the model, from the same sums over the same ranks as the total.

Megatron-core's optimizer works out one number before it clips. Here each parameter's square goes into its part's sum;
the sums of all parts travel in the reduction, and come to the host in the copy, that the total needs anyway.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared

from parallel.megatron.optimizer import find_owned, measure_norm_with, members
from parallel.norms import tensor_norms

# A part and what its parameters' names hold; the first that matches counts. Everything else is "other".
PARTS = (
    ("router", (".router.",)),
    ("shared_experts", (".shared_experts.",)),
    ("experts", (".experts.",)),
    ("norm", ("norm",)),  # of layers, of queries and keys, of the embedding
    ("attention", (".self_attention.",)),
    ("dense_mlp", (".mlp.",)),
    ("embedding", ("embedding.",)),
    ("head", ("output_layer.", "lm_head.", "pooler.", "binary_head.")),
)


def part_of(name: str) -> str:
    """The part of the model that a parameter of this name belongs to. A tied head's gradient counts as the
    embedding's."""
    return next((part for part, marks in PARTS if any(mark in name for mark in marks)), "other")


class GradNorms:
    """Takes the place of the optimizer's `get_grad_norm`; `by_part` then holds the last step's norms, the same on every
    rank.

    All ranks list the same parts, also those that other pipeline stages hold; a part that nobody has is left out.
    """

    def __init__(self, optimizer: MegatronOptimizer, chunks: Sequence[torch.nn.Module]):
        self.by_part: dict[str, float] = {}
        names = [part for part, _ in PARTS] + ["other"]
        index = {part: i for i, part in enumerate(names)}
        parts = {parameter: index[part_of(name)] for chunk in chunks for name, parameter in chunk.named_parameters()}
        # What is stepped of each parameter: a slice of it, a copy in fp32, or itself.
        owned = zip(find_owned(optimizer, parts), parts.values(), strict=True)
        self._parts = {id(piece.main): part for piece, part in owned if piece is not None}
        self._members, self._names = members(optimizer), names
        self._indices: dict[tuple[int, ...], torch.Tensor] = {}
        self.optimizer, self._device = optimizer, next(iter(parts)).device
        measure_norm_with(optimizer, self._measure)

    @torch.no_grad()
    def _measure(self) -> float:
        # Members whose sums go over the same ranks share a reduction: all of them in the sharded optimizer.
        squares: dict[dist.ProcessGroup, torch.Tensor] = {}
        for member in self._members:
            group = member.get_grad_stats_parallel_group()
            if group not in squares:
                squares[group] = torch.zeros(len(self._names), dtype=torch.float64, device=self._device)
            held = [main for main in member.get_parameters() if _counts(main, member)]
            if held:
                norms = tensor_norms([main.grad for main in held])
                squares[group].index_add_(0, self._index([self._parts[id(main)] for main in held]), norms * norms)
        for group, sums in squares.items():
            dist.all_reduce(sums, group=group)
        by_part = torch.stack(list(squares.values())).sum(dim=0).tolist()
        self.by_part = {name: square**0.5 for name, square in zip(self._names, by_part, strict=True) if square != 0}
        return float(sum(by_part) ** 0.5)

    def _index(self, parts: list[int]) -> torch.Tensor:
        # Kept on the device, as they are the same in every step.
        key = tuple(parts)
        if key not in self._indices:
            self._indices[key] = torch.tensor(parts, device=self._device)
        return self._indices[key]


def _counts(main: torch.Tensor, member: MegatronOptimizer) -> bool:
    """Whether this rank's copy of a parameter is the one that counts, by the rules of Megatron's
    get_main_grads_for_grad_norm."""
    if main.grad is None or not param_is_not_shared(main):
        return False
    return bool(param_is_not_tensor_parallel_duplicate(main, getattr(member, "tp_group", None)))
