"""The gradient norm, by part of the model.

Megatron-core's optimizer works out one number before it clips, with a reduction and a wait of its own. Here each
parameter's square goes into its part's sum, on one of the ranks that hold it; the sums ride in the step's one reduction
over all ranks (training/sums.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared

from optim.tiers.tiers import tiers_of
from parallel.megatron.optimizer import HeldPart, find_held, gradient_of, is_sharded, members
from parallel.norms import tensor_norms
from parallel.owned import owner_of
from parallel.topology import Topology

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


BITS = 33  # of a norm: finer than fp32's, and far coarser than the rounding of sums in fp64
# A number in fp64 is a sum of multiples of these powers of two; thousands of such multiples add up without rounding.
DIGITS = tuple(2.0**power for power in range(160, -201, -40))


def digits(values: torch.Tensor) -> torch.Tensor:
    """[n, DIGITS + 1]: what values [n], fp64, are the sums of; the last is below all powers."""
    columns = []
    for power in DIGITS:
        columns.append(torch.trunc(values / power) * power)
        values = values - columns[-1]
    return torch.stack([*columns, values], dim=1)


class GradNorms:
    """Squares of this rank's gradients in every step; `by_part` holds the last step's norms, the same on every rank.

    All ranks list the same parts, also those that other pipeline stages hold; a part that nobody has is left out.
    exactly: the squares of experts are those of each one, and all are added without rounding, so that the norm is the
    same to the bit wherever experts are.
    """

    def __init__(
        self,
        optimizer: MegatronOptimizer,
        chunks: Sequence[torch.nn.Module],
        topology: Topology,
        exactly: bool = False,
    ):
        self.by_part: dict[str, float] = {}
        self._names = [part for part, _ in PARTS] + ["other"]
        index = {part: i for i, part in enumerate(self._names)}
        parts = {parameter: index[part_of(name)] for chunk in chunks for name, parameter in chunk.named_parameters()}
        # What is stepped of each parameter: a slice of it, a copy in fp32, or itself.
        owned = zip(find_held(optimizer, parts), parts.items(), strict=True)
        self._parts = {
            id(piece.main): part
            for piece, (parameter, part) in owned
            if piece is not None and _counts(piece, parameter, topology)
        }
        # Where in a stepped tensor one expert's elements end and the next one's begin.
        stacked = [parameter for parameter in parts if exactly and getattr(parameter, "holds_experts", False)]
        self._cuts = {
            id(piece.main): list(range(-piece.start % numel, piece.end - piece.start + 1, numel))
            for piece, parameter in zip(find_held(optimizer, stacked), stacked, strict=True)
            if piece is not None and (numel := parameter[0].numel())
        }
        self._exactly, tiers = exactly, tiers_of(optimizer)
        self._experts = None if tiers is None else tiers.experts  # of those off the device
        self._members = members(optimizer)
        self._indices: dict[tuple[int, ...], torch.Tensor] = {}
        self._device = topology.device

    @torch.no_grad()
    def squares(self) -> torch.Tensor:
        """This rank's part [parts] of the sums over all ranks, fp64 on its device; the gradients must be ready."""
        columns = len(DIGITS) + 1 if self._exactly else 1
        sums = torch.zeros(len(self._names), columns, dtype=torch.float64, device=self._device)
        for member in self._members:
            held = [(main, gradient_of(main)) for main in member.get_parameters() if id(main) in self._parts]
            grads = [
                (self._parts[id(main)], part)
                for main, grad in held
                if grad is not None
                for part in self._pieces(main, grad)
            ]
            if grads:
                norms = tensor_norms([grad for _, grad in grads])
                squares = digits(norms * norms) if self._exactly else (norms * norms).unsqueeze(1)
                sums.index_add_(0, self._index([part for part, _ in grads]), squares)
        if self._experts is not None and len(squares := self._experts.squares()):
            columns_nC = digits(squares) if self._exactly else squares.unsqueeze(1)
            sums.index_add_(0, self._index([self._names.index("experts")] * len(squares)), columns_nC)
        return sums.flatten()

    def _pieces(self, main: torch.Tensor, grad: torch.Tensor) -> Sequence[torch.Tensor]:
        cuts = self._cuts.get(id(main))
        if cuts is None:
            return [grad]
        flat = grad.reshape(-1)
        ends = [0, *cuts, len(flat)]
        return [flat[start:end] for start, end in pairwise(ends) if end > start]

    def take(self, squares: torch.Tensor) -> float:
        """The norm of the whole model, from the sums over all ranks on the host."""
        by_part = squares.view(len(self._names), -1).sum(dim=1).tolist()
        self.by_part = {name: square**0.5 for name, square in zip(self._names, by_part, strict=True) if square != 0}
        return rounded(float(sum(by_part) ** 0.5))

    def _index(self, parts: list[int]) -> torch.Tensor:
        # Kept on the device, as they are the same in every step.
        key = tuple(parts)
        if key not in self._indices:
            self._indices[key] = torch.tensor(parts, device=self._device)
        return self._indices[key]


def rounded(norm: float) -> float:
    """A norm to BITS: its last digits would follow from where tensors are cut."""
    if not math.isfinite(norm):
        return norm
    mantissa, exponent = math.frexp(norm)
    return math.ldexp(round(math.ldexp(mantissa, BITS)), exponent - BITS)


def _counts(piece: HeldPart, parameter: torch.nn.Parameter, topology: Topology) -> bool:
    """Whether this rank's copy of a gradient is the one that counts: one of those that tensor ranks and, where the
    optimizer is not sharded, data parallel ranks hold alike (Megatron-core's get_main_grads_for_grad_norm). An owner
    knows who holds the same."""
    if not param_is_not_shared(piece.main):
        return False
    if (owner := owner_of(parameter)) is not None:
        if not owner.counts:
            return False
    elif not is_sharded(piece.member):
        # Megatron's mark of experts, whose gradients their own data parallel ranks share.
        alike = topology.data_context if getattr(parameter, "allreduce", True) else topology.expert_data
        if alike.rank != 0:
            return False
    return bool(param_is_not_tensor_parallel_duplicate(piece.main, getattr(piece.member, "tp_group", None)))
