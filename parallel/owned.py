"""Parameters outside Megatron-core's buffers, which its DDP and its sharded optimizer do not handle.

Megatron-core shards a model's gradients and optimizer state by offsets in flat buffers. Parameters that must be stored
in another way (a shard of a weight, an offloaded expert, a matrix that one rank updates whole) are registered with
`own`, before models/parallelize.py wraps the model. From then on an object, the owner, defines for its parameter:

* the gradient: `main_grad`, in separate memory; micro-batches add to it, by autograd or with `add_grad`;
* its reduction, once a step, after the last micro-batch (parallel/megatron/ddp.py);
* which rank counts it in norms, and which rank writes it, if several ranks have the same (optim/grad_norms.py);
* its update, by an optimizer in Megatron's chain or the offloaded one (parallel/megatron/optimizer.py, offloaded.py);
* its position in checkpoints, for the weight and its moments (checkpoint/state.py).

An offloaded parameter is a placeholder with a shape: optim/offload/experts.py has its weights, gradient and state.
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
    """The position of this rank's shard in the whole parameter, in elements along each dimension."""

    shape: tuple[int, ...]  # of the whole parameter
    offset: tuple[int, ...]  # of the shard's first element


class OwnedParameter:
    """Handles the gradient of a parameter (or of this rank's shard of one) outside Megatron-core's buffers."""

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
        # Whether the parameter has its values: an offloaded one only inside `at_hand`.
        self.is_here = not off_device
        self._gate: Callable[[torch.nn.Parameter], None] | None = None
        self._hook: Any = None

    @property
    def counts(self) -> bool:
        """Whether this rank stands for all ranks with the same shard, in norms and in checkpoints."""
        return self.group is None or self.group.rank() == 0

    def wait_with(self, gate: Callable[[torch.nn.Parameter], None]) -> None:
        """Register `gate`, to be called before a step first writes the gradient, which an update may still read."""
        self._gate = gate

    def begin(self) -> None:
        """Allocate the gradient, and start to add autograd's gradients to it.

        Does nothing for an offloaded parameter: the offloaded optimizer stores its gradients.
        """
        self.parameter.grad_added_to_main_grad = False  # Megatron's attribute; see grad_buffers.py
        if self.off_device:
            return
        assert self.grad_dtype == torch.float32 or self.parameter.dtype != torch.float32, self.grad_dtype
        self.parameter.main_grad = torch.zeros_like(self.parameter, dtype=self.grad_dtype)  # type: ignore[attr-defined]
        self._hook = self.parameter.register_post_accumulate_grad_hook(lambda found: take_gradient(found, self._gate))

    @torch.no_grad()
    def add_grad(self, grad: torch.Tensor) -> None:
        """Add a micro-batch's gradient that does not come from autograd. It has the shard's shape and any dtype."""
        add_gradient(self.parameter, grad, self._gate)

    @torch.no_grad()
    def reduce(self) -> None:
        """All-reduce the gradient over the ranks with the same shard, after a step's last micro-batch."""
        zero_if_old(self.parameter, self._gate)  # no micro-batch had one
        grad: torch.Tensor = self.parameter.main_grad  # type: ignore[attr-defined]
        if self.group is not None and self.group.size() > 1:
            dist.all_reduce(grad, group=self.group)

    def release(self) -> None:
        """Drop all references to the parameter, because Python cannot collect cycles with autograd's hooks."""
        if self._hook is not None:
            self._hook.remove()
        self._gate = self._hook = None
        del self.parameter.owned


def own(
    parameter: torch.nn.Parameter,
    group: dist.ProcessGroup | None,
    box: ShardBox | None = None,
    grad_dtype: torch.dtype = torch.float32,
    off_device: bool = False,
) -> OwnedParameter:
    """Keep a bare model's parameter out of Megatron-core's buffers. Every rank that has the parameter makes the call.

    Args:
        parameter: the whole parameter, or this rank's shard. It needs gradients; each rank updates what it has.
        group: the ranks with the same shard, whose gradients are summed. None: only this rank has it.
        box: position of the shard. None: the parameter is whole, or its module knows the position.
        grad_dtype: dtype of the gradient's memory. Offloaded and fp32 parameters need fp32.
        off_device: whether the parameter is a placeholder for offloaded values.

    Raises ValueError if the parameter is owned already, needs no gradient, or does not fit into its box.
    """
    if owner_of(parameter) is not None or not parameter.requires_grad:
        fault = "is owned already" if parameter.requires_grad else "needs no gradient"
        raise ValueError(
            f"The parameter of shape {tuple(parameter.shape)} {fault}. Own only a parameter that needs a gradient, and "
            "only once."
        )
    if box is not None:
        bounds = zip(box.offset, parameter.shape, box.shape)
        inside = all(0 <= start <= end - size for start, size, end in bounds)
        if not (inside and parameter.dim() == len(box.shape) == len(box.offset)):
            raise ValueError(
                f"A shard of shape {tuple(parameter.shape)} at offset {box.offset} must be inside its parameter, whose "
                f"shape is {box.shape}. Give the shard's own offset."
            )
    owner = OwnedParameter(parameter, group, box, grad_dtype, off_device)
    parameter.owned = owner  # torch.nn.Parameter has no argument for this; `owner_of` reads it.
    return owner


def owner_of(parameter: torch.Tensor) -> OwnedParameter | None:
    """Return the owner of a parameter, or None if Megatron-core's buffers have it."""
    return getattr(parameter, "owned", None)


def owners(parameters: Iterable[torch.nn.Parameter]) -> list[OwnedParameter]:
    """Return the owners of the parameters that have one, in the same order."""
    return [owner for parameter in parameters if (owner := owner_of(parameter)) is not None]


def is_off_device(parameter: torch.Tensor) -> bool:
    """Whether a parameter is a placeholder whose values are offloaded to the host or the disk."""
    return (owner := owner_of(parameter)) is not None and owner.off_device


def is_at_hand(parameter: torch.Tensor) -> bool:
    """Whether the values of an offloaded parameter are loaded, which they are only inside the context `at_hand`."""
    return (owner := owner_of(parameter)) is not None and owner.off_device and owner.is_here


@contextmanager
def at_hand(parameters: Sequence[torch.nn.Parameter], tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Within this context, offloaded parameters have the values of these tensors of the same shapes."""
    stand_ins = [parameter.data for parameter in parameters]
    try:
        for parameter, tensor in zip(parameters, tensors, strict=True):
            parameter.data = tensor
            parameter.owned.is_here = True
        yield
    finally:
        for parameter, stand_in in zip(parameters, stand_ins, strict=True):
            parameter.data = stand_in
            parameter.owned.is_here = False


def with_boxes(state: dict[str, Any]) -> dict[str, Any]:
    """Return a model chunk's sharded state dict with the position of each owned shard in its whole parameter."""

    def with_box(value: Any) -> Any:
        sharded = isinstance(value, (ShardedTensor, ShardedTensorFactory)) and value.data is not None
        owner = owner_of(value.data) if sharded else None
        if owner is None or owner.box is None:
            return value
        assert isinstance(value, ShardedTensor), f"{value.key}: the shard of a gated weight has more than one box"
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
