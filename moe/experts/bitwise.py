"""Weight gradients that are the same bits whichever rank computes what: one block after the other, added in an order
that no plan changes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch

from moe.experts import blocks
from moe.experts.blocks import ExpertBlock
from moe.experts.weights import SlabGrads, SlabWork, WeightGrads, Weights, wide

Partial = list[torch.Tensor]  # one block's gradients of one expert's fc1, fc2 and, where there are any, biases


class BlockGrads(WeightGrads):
    """Gradients of one layer's experts. Those at home here are summed in fp32 or wider; those of which other ranks
    compute blocks too are kept block by block, until all are here."""

    def __init__(self, weights: Weights, apart: Collection[int] = ()) -> None:
        """apart: experts that are kept block by block."""
        self._weights, self._tensors = weights, weights.home.tensors
        self._sums = [torch.zeros_like(each, dtype=wide(each.dtype)) for each in self._tensors]
        self.apart: dict[int, list[Partial]] = {expert: [] for expert in apart}

    def add_blocks(self, work: SlabWork) -> None:
        """Add what the blocks of a slab's part of a chunk come to."""
        inputs = work.inputs
        first = sum(map(len, self._weights.slabs[: inputs.index]))
        with blocks.of(inputs.slab, inputs.source_NH, inputs.assignments.host_counts) as of_experts:
            cut = list(of_experts)
        slab = replace(inputs.slab, block_rows=None)
        for place, start, end in cut:
            one = slab.like(*(each[place : place + 1] for each in slab.tensors))
            alone, expert = SlabGrads(one, at_once=False), first + place
            with blocks.of_blocks(one, inputs.source_NH, [ExpertBlock(0, start, end)]) as of_block:
                of_block.weight_grads(work, alone)
            partial = [each[0] for each in alone.finish() if each is not None]
            if expert in self.apart:
                self.apart[expert].append(partial)
            else:
                self.add_partial(expert, partial)

    def empty_partial(self) -> Partial:
        """Room for one."""
        return [torch.empty_like(each[0]) for each in self._tensors]

    def add_partial(self, expert: int, partial: Partial) -> None:
        """Add one block's gradients to an expert's that is at home here."""
        for total, part in zip(self._sums, partial, strict=True):
            total[expert] += part

    def finish(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        fc1, fc2, *biases = (total.to(each.dtype) for total, each in zip(self._sums, self._tensors, strict=True))
        fc1_bias, fc2_bias = biases or (None, None)
        return fc1, fc2, fc1_bias, fc2_bias
