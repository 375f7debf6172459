"""The gradient norm of the whole model and of each component, such as attention or experts.

Megatron-core's optimizer computes one norm before it clips, with an all-reduce of its own, and waits for the device.
Here each squared norm is added to the sum of its component, for the one all-reduce of a step (training/sums.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared

from optim.offload.optimizer import offload_of
from parallel.megatron.optimizer import HeldShard, find_held, gradient_of, is_sharded, members
from parallel.norms import tensor_norms
from parallel.owned import owner_of
from parallel.topology import Topology

# Model components, and substrings of their parameters' names: the first match counts, and the rest is "other".
COMPONENTS = (
    ("router", (".router.",)),
    ("shared_experts", (".shared_experts.",)),
    ("experts", (".experts.",)),
    ("norm", ("norm",)),  # of layers, of queries and keys, of the embedding
    ("attention", (".self_attention.",)),
    ("dense_mlp", (".mlp.",)),
    ("embedding", ("embedding.",)),
    ("head", ("output_layer.", "lm_head.", "pooler.", "binary_head.")),
)


BITS = 33  # of a norm: more than fp32 has, and far fewer than are exact in sums of fp64 numbers
# A number in fp64 is a sum of multiples of these powers of two; thousands of such multiples add up without rounding.
DIGITS = tuple(2.0**power for power in range(160, -201, -40))


def component_of(name: str) -> str:
    """Return the model component of a parameter's name, such as "attention". A tied head counts as "embedding"."""
    return next((component for component, marks in COMPONENTS if any(mark in name for mark in marks)), "other")


def digits(values: torch.Tensor) -> torch.Tensor:
    """Split fp64 values [n] into summands [n, len(DIGITS) + 1] that can be added without rounding.

    Each is a multiple of a power of two in DIGITS; the last is the remainder.
    """
    columns = []
    for power in DIGITS:
        columns.append(torch.trunc(values / power) * power)
        values = values - columns[-1]
    return torch.stack([*columns, values], dim=1)


class GradNorms:
    """Computes the gradient norm of each step, in total and per model component. `by_component`: the last step's norms.

    All ranks sum the same components, including those of other pipeline stages. exactly: each expert's square is added
    separately and without rounding, so that the norm has the same bits on whichever ranks the experts are.
    """

    def __init__(
        self, optimizer: MegatronOptimizer, chunks: Sequence[torch.nn.Module], topology: Topology, exactly: bool = False
    ):
        self.by_component: dict[str, float] = {}
        self._names = [component for component, _ in COMPONENTS] + ["other"]
        index = {component: i for i, component in enumerate(self._names)}
        components = {p: index[component_of(name)] for chunk in chunks for name, p in chunk.named_parameters()}
        # The optimizer updates a slice of each parameter, its fp32 copy, or the parameter itself.
        owned = zip(find_held(optimizer, components), components.items(), strict=True)
        self._components = {
            id(held.main): component
            for held, (parameter, component) in owned
            if held is not None and _counts(held, parameter, topology)
        }
        # The boundaries between experts in a tensor that the optimizer updates.
        stacked = [parameter for parameter in components if exactly and getattr(parameter, "holds_experts", False)]
        self._cuts = {
            id(held.main): list(range(-held.start % numel, held.end - held.start + 1, numel))
            for held, parameter in zip(find_held(optimizer, stacked), stacked, strict=True)
            if held is not None and (numel := parameter[0].numel())
        }
        self._exactly, offload = exactly, offload_of(optimizer)
        self._experts = None if offload is None else offload.experts
        self._members = members(optimizer)
        self._indices: dict[tuple[int, ...], torch.Tensor] = {}
        self._device = topology.device

    @torch.no_grad()
    def squares(self) -> torch.Tensor:
        """Return this rank's sums of squared gradients per component, flat fp64 on its device, once they are ready."""
        columns = len(DIGITS) + 1 if self._exactly else 1
        sums = torch.zeros(len(self._names), columns, dtype=torch.float64, device=self._device)
        for member in self._members:
            held = [(main, gradient_of(main)) for main in member.get_parameters() if id(main) in self._components]
            grads = [
                (self._components[id(main)], span)
                for main, grad in held
                if grad is not None
                for span in self._by_expert(main, grad)
            ]
            if grads:
                norms = tensor_norms([grad for _, grad in grads])
                squares = digits(norms * norms) if self._exactly else (norms * norms).unsqueeze(1)
                sums.index_add_(0, self._index([component for component, _ in grads]), squares)
        if self._experts is not None and len(squares := self._experts.squares()):
            columns_nC = digits(squares) if self._exactly else squares.unsqueeze(1)
            sums.index_add_(0, self._index([self._names.index("experts")] * len(squares)), columns_nC)
        return sums.flatten()

    def _by_expert(self, main: torch.Tensor, grad: torch.Tensor) -> Sequence[torch.Tensor]:
        if (cuts := self._cuts.get(id(main))) is None:
            return [grad]
        flat = grad.reshape(-1)
        return [flat[start:end] for start, end in pairwise([0, *cuts, len(flat)]) if end > start]

    def take(self, squares: torch.Tensor) -> float:
        """Set `by_component` from the sums over all ranks (a host tensor), and return the norm of the whole model."""
        by_component = squares.view(len(self._names), -1).sum(dim=1).tolist()
        self.by_component = {
            name: square**0.5 for name, square in zip(self._names, by_component, strict=True) if square != 0
        }
        return rounded(float(sum(by_component) ** 0.5))

    def _index(self, components: list[int]) -> torch.Tensor:
        # Created on the device once, as it is the same in every step.
        key = tuple(components)
        if key not in self._indices:
            self._indices[key] = torch.tensor(components, device=self._device)
        return self._indices[key]


def rounded(norm: float) -> float:
    """Round a norm to BITS significant bits, because the lower bits depend on how tensors are cut."""
    if not math.isfinite(norm):
        return norm
    mantissa, exponent = math.frexp(norm)
    return math.ldexp(round(math.ldexp(mantissa, BITS)), exponent - BITS)


def _counts(held: HeldShard, parameter: torch.nn.Parameter, topology: Topology) -> bool:
    """Return whether this rank adds a shard's gradient to the norm: exactly one rank with this gradient does.

    The gradients of some parameters are equal on tensor-parallel ranks and, unless the optimizer is sharded, on
    data-parallel ranks (Megatron-core's get_main_grads_for_grad_norm). A parameter's owner object, if any, decides.
    """
    if not param_is_not_shared(held.main):
        return False
    if (owner := owner_of(parameter)) is not None:
        if not owner.counts:
            return False
    elif not is_sharded(held.member):
        # Megatron marks experts with allreduce=False: their gradients are equal on their own data-parallel ranks.
        replicas = topology.data_context if getattr(parameter, "allreduce", True) else topology.expert_data
        if replicas.rank != 0:
            return False
    return bool(param_is_not_tensor_parallel_duplicate(held.main, getattr(held.member, "tp_group", None)))
