"""Parameters outside Megatron-core's buffers: the one kind of thing that its DDP and its sharded optimizer do not hold.

Megatron-core cuts a model's gradients and state by places in flat buffers. What must lie elsewhere (a part of a weight,
an expert that comes and goes, a matrix that one rank steps whole) is registered here with `own`, before
models/parallelize.py wraps the model. From then on its owner says all that others ask:

* its gradient: `main_grad`, memory of its own; micro-batches add to it, by autograd or by `add_grad`;
* its reduction, once a step, after the last micro-batch (parallel/megatron/ddp.py);
* who counts it in norms, and who writes it where several ranks hold the same (optim/grad_norms.py);
* its update: a member of the optimizer's chain steps all that this rank holds of it, or the tiers do, and passes that
  read it wait at the tiers' gate (parallel/megatron/optimizer.py, tiered.py);
* its box in checkpoints, for the weight and its moments (checkpoint/state.py).

Off the device the parameter is a stand-in that says its shape. Its weights, its gradient and its state are records of
the optimizer's tiers (optim/tiers/expert_tier.py), and come to the device in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from parallel.megatron.grad_buffers import add_gradient, take_gradient, zero_if_old

# isort: split
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory


@dataclass(frozen=True)
class PartBox:
    """Where this rank's part lies in the whole parameter, both in numbers along each dimension."""

    shape: tuple[int, ...]  # of the whole
    offset: tuple[int, ...]  # of the part's first number


class OwnedParameter:
    """The owner of a parameter, or of this rank's part of one, from `own` to `release`."""

    def __init__(
        self,
        parameter: torch.nn.Parameter,
        group: dist.ProcessGroup | None,
        box: PartBox | None,
        grad_dtype: torch.dtype,
        off_device: bool = False,
    ):
        self.parameter, self.group, self.box = parameter, group, box
        self.grad_dtype, self.off_device = grad_dtype, off_device
        # Whether its numbers are at hand: off the device where some are read or written as a whole (`at_hand`).
        self.is_here = not off_device
        # Called with the parameter before its gradient of a step is first written: the last update may still read it.
        self.gate: Callable[[torch.nn.Parameter], None] | None = None
        self._hook: Any = None

    @property
    def counts(self) -> bool:
        """Whether this rank stands for all that hold the same part: in norms and in checkpoints."""
        return self.group is None or self.group.rank() == 0

    def begin(self) -> None:
        """Take the gradient's memory, and gradients from autograd. Off the device the tiers have that memory, and take
        gradients where they are made."""
        if self.off_device:
            return
        assert self.grad_dtype == torch.float32 or self.parameter.dtype != torch.float32, self.grad_dtype
        self.parameter.main_grad = torch.zeros_like(self.parameter, dtype=self.grad_dtype)  # type: ignore[attr-defined]
        self._hook = self.parameter.register_post_accumulate_grad_hook(lambda found: take_gradient(found, self.gate))

    @torch.no_grad()
    def add_grad(self, grad: torch.Tensor) -> None:
        """Add a micro-batch's gradient that autograd does not bring, of the part's shape and any dtype."""
        add_gradient(self.parameter, grad, self.gate)

    @torch.no_grad()
    def reduce(self) -> None:
        """Make the gradient final: added up over the ranks that hold the same part. A collective call of theirs, after
        the last micro-batch."""
        zero_if_old(self.parameter, self.gate)  # no micro-batch had one
        grad: torch.Tensor = self.parameter.main_grad  # type: ignore[attr-defined]
        if self.group is not None and self.group.size() > 1:
            dist.all_reduce(grad, group=self.group)

    def release(self) -> None:
        """Let go of the parameter: autograd's hooks make circles that Python's collector cannot see."""
        if self._hook is not None:
            self._hook.remove()
        self.gate = self._hook = None
        del self.parameter.owned  # type: ignore[attr-defined]


def own(
    parameter: torch.nn.Parameter,
    group: dist.ProcessGroup | None,
    box: PartBox | None = None,
    grad_dtype: torch.dtype = torch.float32,
    off_device: bool = False,
) -> OwnedParameter:
    """Keep a module's parameter out of Megatron-core's buffers. Called on a bare model, on every rank that holds it.

    Args:
        parameter: all of it, or this rank's part. It needs gradients; each rank steps all that it holds.
        group: ranks that hold the same part: their gradients are added up. None: this rank alone.
        box: where the part lies; None: all of it is here, or as its module says.
        grad_dtype: of the gradient's memory. Optimizer tiers and fp32 parameters take fp32 alone.
        off_device: it stands in for numbers that lie elsewhere.

    Raises ValueError for a parameter that is owned already, needs no gradient, or does not fit its box.
    """
    if owner_of(parameter) is not None or not parameter.requires_grad:
        raise ValueError(f"parameter {tuple(parameter.shape)} is owned already, or needs no gradient")
    if box is not None and not _fits(parameter, box):
        raise ValueError(f"part {tuple(parameter.shape)} does not fit its box: {box}")
    parameter.owned = OwnedParameter(parameter, group, box, grad_dtype, off_device)  # type: ignore[attr-defined]
    return owner_of(parameter)  # type: ignore[return-value]


def _fits(parameter: torch.Tensor, box: PartBox) -> bool:
    if not parameter.dim() == len(box.shape) == len(box.offset):
        return False
    return all(0 <= start <= end - size for start, size, end in zip(box.offset, parameter.shape, box.shape))


def owner_of(parameter: torch.Tensor) -> OwnedParameter | None:
    """Who owns a parameter; None: Megatron-core's buffers hold it."""
    return getattr(parameter, "owned", None)


def owners(parameters: Iterable[torch.nn.Parameter]) -> list[OwnedParameter]:
    """The owners of those parameters that have one, in their order."""
    return [owner for parameter in parameters if (owner := owner_of(parameter)) is not None]


def is_off_device(parameter: torch.Tensor) -> bool:
    """Whether a parameter stands in for numbers that lie off the device."""
    return (owner := owner_of(parameter)) is not None and owner.off_device


def is_at_hand(parameter: torch.Tensor) -> bool:
    """Whether a parameter that stands in for numbers off the device holds them now: see `at_hand`."""
    return is_off_device(parameter) and parameter.owned.is_here  # type: ignore[attr-defined, no-any-return]


@contextmanager
def at_hand(parameters: Sequence[torch.nn.Parameter], tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Inside, parameters off the device hold these tensors of their shapes."""
    stand_ins = [parameter.data for parameter in parameters]
    try:
        for parameter, tensor in zip(parameters, tensors, strict=True):
            parameter.data = tensor
            parameter.owned.is_here = True  # type: ignore[attr-defined]
        yield
    finally:
        for parameter, stand_in in zip(parameters, stand_ins, strict=True):
            parameter.data = stand_in
            parameter.owned.is_here = False  # type: ignore[attr-defined]


def with_boxes(state: dict[str, Any]) -> dict[str, Any]:
    """A chunk's sharded state dict in which each part has its box, under the name that the whole parameter has."""

    def place(value: Any) -> Any:
        sharded = isinstance(value, (ShardedTensor, ShardedTensorFactory)) and value.data is not None
        owner = owner_of(value.data) if sharded else None
        if owner is None or owner.box is None:
            return value
        assert isinstance(value, ShardedTensor), f"{value.key}: a part of a gated weight is more than one box"
        stacked = value.prepend_axis_num  # axes of layers
        return replace(
            value,
            local_shape=tuple(value.data.shape),
            global_shape=(*value.global_shape[:stacked], *owner.box.shape),
            global_offset=(*value.global_offset[:stacked], *owner.box.offset),
            axis_fragmentations=None,  # no regular grid
            replica_id=(*value.replica_id[:-1], 0 if owner.group is None else owner.group.rank()),
        )

    return dict_list_map_inplace(place, state)  # type: ignore[no-any-return]
