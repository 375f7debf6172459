"""Parameters outside Megatron-core's buffers, which its DDP and its sharded optimizer do not hold.

Megatron-core shards a model's gradients and state by offsets in flat buffers. Parameters that must be stored elsewhere
(a shard of a weight, an offloaded expert, a matrix that one rank steps whole) are registered with `own`, before
models/parallelize.py wraps the model. From then on the owner defines:

* the gradient: `main_grad`, memory of its own; micro-batches add to it, by autograd or by `add_grad`;
* its reduction, once a step, after the last micro-batch (parallel/megatron/ddp.py);
* which rank counts it in norms, and which one writes it, if several ranks hold the same (optim/grad_norms.py);
* its update: a member of the optimizer's chain steps all that this rank holds of it, or the offloaded optimizer does,
  and passes that read it wait at its gate (parallel/megatron/optimizer.py, offloaded.py);
* its box in checkpoints, for the weight and its moments (checkpoint/state.py).

An offloaded parameter is a stand-in that has only the shape. Its weights, its gradient and its state are records of the
offloaded optimizer (optim/offload/experts.py), which are copied to the device in turn.
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
class ShardBox:
    """Position of this rank's shard in the whole parameter, in elements along each dimension."""

    shape: tuple[int, ...]  # of the whole parameter
    offset: tuple[int, ...]  # of the shard's first element


class OwnedParameter:
    """The owner of a parameter, or of this rank's shard of one, from `own` to `release`."""

    def __init__(
        self,
        parameter: torch.nn.Parameter,
        group: dist.ProcessGroup | None,
        box: ShardBox | None,
        grad_dtype: torch.dtype,
        off_device: bool = False,
    ):
        self.parameter, self.group, self.box = parameter, group, box
        self.grad_dtype, self.off_device = grad_dtype, off_device
        # Whether the parameter holds its numbers: an offloaded one only inside `at_hand`.
        self.is_here = not off_device
        # Called with the parameter before its gradient of a step is first written: the last update may still read it.
        self.gate: Callable[[torch.nn.Parameter], None] | None = None
        self._hook: Any = None

    @property
    def counts(self) -> bool:
        """Whether this rank represents all ranks that hold the same shard, in norms and in checkpoints."""
        return self.group is None or self.group.rank() == 0

    def begin(self) -> None:
        """Allocate the gradient, and receive gradients from autograd.

        Gradients of an offloaded parameter are taken by its offloaded optimizer instead, which has their memory.
        """
        if self.off_device:
            return
        assert self.grad_dtype == torch.float32 or self.parameter.dtype != torch.float32, self.grad_dtype
        self.parameter.main_grad = torch.zeros_like(self.parameter, dtype=self.grad_dtype)  # type: ignore[attr-defined]
        self._hook = self.parameter.register_post_accumulate_grad_hook(lambda found: take_gradient(found, self.gate))

    @torch.no_grad()
    def add_grad(self, grad: torch.Tensor) -> None:
        """Add a micro-batch's gradient that autograd does not pass, of the shard's shape and any dtype."""
        add_gradient(self.parameter, grad, self.gate)

    @torch.no_grad()
    def reduce(self) -> None:
        """Sum the gradient over the ranks that hold the same shard. Their collective call, after the last
        micro-batch."""
        zero_if_old(self.parameter, self.gate)  # no micro-batch had one
        grad: torch.Tensor = self.parameter.main_grad  # type: ignore[attr-defined]
        if self.group is not None and self.group.size() > 1:
            dist.all_reduce(grad, group=self.group)

    def release(self) -> None:
        """Remove all references to the parameter: autograd's hooks form cycles that Python's collector cannot see."""
        if self._hook is not None:
            self._hook.remove()
        self.gate = self._hook = None
        del self.parameter.owned  # type: ignore[attr-defined]


def own(
    parameter: torch.nn.Parameter,
    group: dist.ProcessGroup | None,
    box: ShardBox | None = None,
    grad_dtype: torch.dtype = torch.float32,
    off_device: bool = False,
) -> OwnedParameter:
    """Keep a module's parameter out of Megatron-core's buffers. Called on a bare model, on every rank that holds it.

    Args:
        parameter: the whole parameter, or this rank's shard. It needs gradients; each rank steps all that it holds.
        group: ranks that hold the same shard: their gradients are summed. None: this rank alone.
        box: position of the shard; None: the parameter is whole, or its module knows the position.
        grad_dtype: dtype of the gradient's memory. Offloaded and fp32 parameters need fp32.
        off_device: the parameter is a stand-in for offloaded numbers.

    Raises ValueError for a parameter that is owned already, needs no gradient, or does not fit its box.
    """
    if owner_of(parameter) is not None or not parameter.requires_grad:
        raise ValueError(f"parameter {tuple(parameter.shape)} is owned already, or needs no gradient")
    if box is not None:
        fits = parameter.dim() == len(box.shape) == len(box.offset) and all(
            0 <= start <= end - size for start, size, end in zip(box.offset, parameter.shape, box.shape)
        )
        if not fits:
            raise ValueError(f"shard {tuple(parameter.shape)} does not fit its box: {box}")
    parameter.owned = OwnedParameter(parameter, group, box, grad_dtype, off_device)  # type: ignore[attr-defined]
    return owner_of(parameter)  # type: ignore[return-value]


def owner_of(parameter: torch.Tensor) -> OwnedParameter | None:
    """Return the owner of a parameter; None: Megatron-core's buffers hold it."""
    return getattr(parameter, "owned", None)


def owners(parameters: Iterable[torch.nn.Parameter]) -> list[OwnedParameter]:
    """Return the owners of those parameters that have one, in their order."""
    return [owner for parameter in parameters if (owner := owner_of(parameter)) is not None]


def is_off_device(parameter: torch.Tensor) -> bool:
    """Whether a parameter is a stand-in for offloaded numbers."""
    return (owner := owner_of(parameter)) is not None and owner.off_device


def is_at_hand(parameter: torch.Tensor) -> bool:
    """Whether an offloaded parameter holds its numbers now: see `at_hand`."""
    return is_off_device(parameter) and parameter.owned.is_here  # type: ignore[attr-defined, no-any-return]


@contextmanager
def at_hand(parameters: Sequence[torch.nn.Parameter], tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Inside, offloaded parameters hold these tensors of their shapes."""
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
    """Return a chunk's sharded state dict in which each shard has its box, under the name of the whole parameter."""

    def with_box(value: Any) -> Any:
        sharded = isinstance(value, (ShardedTensor, ShardedTensorFactory)) and value.data is not None
        owner = owner_of(value.data) if sharded else None
        if owner is None or owner.box is None:
            return value
        assert isinstance(value, ShardedTensor), f"{value.key}: a shard of a gated weight is more than one box"
        stacked = value.prepend_axis_num  # axes over layers
        return replace(
            value,
            local_shape=tuple(value.data.shape),
            global_shape=(*value.global_shape[:stacked], *owner.box.shape),
            global_offset=(*value.global_offset[:stacked], *owner.box.offset),
            axis_fragmentations=None,  # shards form no regular grid
            replica_id=(*value.replica_id[:-1], 0 if owner.group is None else owner.group.rank()),
        )

    return dict_list_map_inplace(with_box, state)  # type: ignore[no-any-return]
