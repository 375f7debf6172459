"""Gradients on their way into Megatron-core 0.16.1's buffers and over the data parallel ranks, without passes that
change nothing.

The buffers are fp32 and as large as the model's gradients: a pass over them is seen in a step's time on every device.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

Gate = Callable[[torch.nn.Parameter], None]  # waits until nothing works on a parameter beside the passes


def apply() -> None:
    """Apply both patches. Called once, by parallel.megatron.apply_patches."""
    _write_the_first_gradient()
    _exchange_nothing_alone()


# ---------------------------------------------------------------------------------------------------------------------
# The first micro-batch of a step writes its gradients
# ---------------------------------------------------------------------------------------------------------------------


def _write_the_first_gradient() -> None:
    # Without this each step fills the buffers with zeros, to which the first micro-batch's gradients are added: a pass
    # that writes and one that reads more than are needed.
    DistributedDataParallel.zero_grad_buffer = _forget_gradients
    DistributedDataParallel._make_backward_post_hook = _gradient_hook


def _forget_gradients(self: DistributedDataParallel) -> None:
    """Megatron's zero_grad_buffer: what the buffers hold is of the last step, and is written over."""
    for param in self.params_with_grad:
        param.grad_added_to_main_grad = False
        param.grad_is_old = True
        _take_parts(param)
    if getattr(self, "gate", None) is None and any(adds_by_itself(module) for module in self.modules()):
        # At once; where an update may still read the buffer each weight's part is zeroed in the forward pass.
        for buffer in self.buffers + self.expert_parallel_buffers:
            buffer.reset()
        for param in self.params_with_grad:
            if param in self.param_to_bucket_group:
                param.grad_is_old = False
            zero_if_old(param)  # one that no buffer holds
    for group in self.bucket_groups + self.expert_parallel_bucket_groups:
        group.reset()


def add_with_next(param: torch.Tensor, index: int, part: torch.Tensor) -> bool:
    """Have a part of the gradient of `param[index]` added to its buffer after the next gradient that autograd finds,
    and before the buffer counts it; False where it has no buffer."""
    if not hasattr(param, "main_grad"):
        return False
    param.__dict__.setdefault("grad_parts", []).append((index, part))
    return True


def _take_parts(param: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
    return param.__dict__.pop("grad_parts", [])  # type: ignore[no-any-return]


def adds_by_itself(module: torch.nn.Module) -> bool:
    """Whether a module's products add their gradients to the buffer, and must find zeros there."""
    return bool(getattr(module, "fuse_wgrad_accumulation", False))


def zero_if_old(param: torch.nn.Parameter, gate: Gate | None = None) -> None:
    """Forget the gradient of the last step. `gate` waits until nothing reads it any more; without it nothing does."""
    if getattr(param, "grad_is_old", False):
        if gate is not None:
            gate(param)
        param.main_grad.zero_()  # type: ignore[attr-defined]
        param.grad_is_old = False  # type: ignore[attr-defined]


def open_buffer(param: torch.nn.Parameter) -> tuple[torch.Tensor, bool]:
    """The buffer to which a forward pass adds its part of a gradient by itself, and whether it has to write it over
    what is there: that is the last step's.

    What works on the parameter was waited for before the pass read it. Autograd may bring the hook the gradient of
    another use (a tied embedding's), or one that means nothing.
    """
    is_old = getattr(param, "grad_is_old", False)
    param.grad_is_old = False  # type: ignore[attr-defined]
    param.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    return param.main_grad, is_old  # type: ignore[attr-defined]


class GradientSum:
    """A weight's gradient that a backward pass makes in parts, added up in fp32: in its buffer, where it has one."""

    def __init__(self, parameter: torch.Tensor) -> None:
        self._parameter, self._has_buffer = parameter, hasattr(parameter, "main_grad")
        if self._has_buffer:
            self._sum, self._writes_over = open_buffer(parameter)  # type: ignore[arg-type]
        else:
            self._sum, self._writes_over = torch.empty_like(parameter, dtype=torch.float32), True

    def add(self, grad: torch.Tensor, rows: slice = slice(None)) -> None:
        """One part's, of these rows of the weight: always the same."""
        if self._writes_over:
            if len(grad) < len(self._sum):
                self._sum.zero_()
            self._sum[rows].copy_(grad)
            self._writes_over = False
        else:
            self._sum[rows].add_(grad)

    def for_autograd(self) -> torch.Tensor:
        """What autograd brings the parameter's hooks: one that means nothing where its buffer has it."""
        if self._writes_over:  # there was no part
            self._sum.zero_()
        return self._parameter.detach() if self._has_buffer else self._sum.to(self._parameter.dtype)


def add_gradient(param: torch.nn.Parameter, grad: torch.Tensor, gate: Gate | None) -> None:
    """Add a micro-batch's gradient to the step's. The first is written over the last step's, which `gate` waits for:
    an update may still read it."""
    if getattr(param, "grad_is_old", False):
        if gate is not None:
            gate(param)
        param.main_grad.copy_(grad)  # type: ignore[attr-defined]
        param.grad_is_old = False  # type: ignore[attr-defined]
    else:
        param.main_grad.add_(grad)  # type: ignore[attr-defined]


def take_gradient(param: torch.nn.Parameter, gate: Gate | None) -> None:
    """Add what autograd has for a parameter to the step's gradient, and let go of it."""
    # A product that added its gradient by itself leaves one that means nothing, but for a tied embedding's part.
    added = param.grad_added_to_main_grad and not getattr(param, "zero_out_wgrad", False)  # type: ignore[attr-defined]
    if param.grad is not None and not added:
        add_gradient(param, param.grad, gate)
    for index, part in _take_parts(param):
        param.main_grad[index].add_(part)  # type: ignore[attr-defined]
    param.grad = None


def _gradient_hook(self: DistributedDataParallel, param: torch.nn.Parameter) -> Callable[..., None]:
    """Megatron's hook on a parameter whose gradient of a micro-batch is there."""

    def hook(*unused: Any) -> None:
        if param not in self.param_to_bucket_group:
            return
        overlap = self.ddp_config.overlap_grad_reduce
        # None is the head's gradient of a tied embedding where the head has a backward call of its own (layer-wise
        # schedule): the buffer has it already, and another call brings the embedding's.
        is_there = param.grad is not None or param.grad_added_to_main_grad  # type: ignore[attr-defined]
        assert is_there or not overlap, "a gradient that is None is not safe with overlap_grad_reduce"
        take_gradient(param, getattr(self, "gate", None))
        if overlap:
            self.param_to_bucket_group[param].register_grad_ready(param, self.force_all_reduce)

    return hook


def _gate(owner: Any, param: torch.nn.Parameter) -> None:
    """Go on once nothing works on a parameter beside the passes: see parallel/megatron/tiered.py."""
    if (gate := getattr(owner, "gate", None)) is not None:
        gate(param)


def _zero_what_is_old(group: _ParamAndGradBucketGroup) -> None:
    """Parameters that no micro-batch of the step had a gradient for."""
    for bucket in group.buckets:
        for param in bucket.params:
            zero_if_old(param, getattr(group, "gate", None))


# ---------------------------------------------------------------------------------------------------------------------
# A rank without data parallel peers exchanges nothing
# ---------------------------------------------------------------------------------------------------------------------


class _Done:
    """In place of an exchange's handle."""

    def wait(self) -> None:
        """Nothing is under way."""


class _WaitedOnce:
    """An exchange of gloo's that several wait for: each wait of its own would write the result once more, over what
    has been made of it since."""

    def __init__(self, handle: Any) -> None:
        self._handle, self._lock = handle, threading.Lock()

    def wait(self) -> None:
        """Until the result is there."""
        with self._lock:
            if self._handle is not None:
                self._handle.wait()
                self._handle = None


def _exchange_nothing_alone() -> None:
    # Without this a group of one copies all gradients and all weights onto themselves; gloo does it through a third
    # buffer of their size.
    reduce, gather = _ParamAndGradBucketGroup.start_grad_sync, _ParamAndGradBucketGroup.start_param_sync

    def start_grad_sync(self: Any, force_all_reduce: bool | None = False) -> None:
        if self.is_first_batch and self.grad_reduce_handle is not None:
            return  # as upstream: it was started by the hooks
        _zero_what_is_old(self)
        if not _is_alone(self):
            reduce(self, force_all_reduce)
        else:
            for bucket in self.buckets:
                if bucket.gradient_scaling_factor != 1.0:
                    bucket.grad_data *= bucket.gradient_scaling_factor
            self.grad_reduce_handle = _Done() if self.ddp_config.overlap_grad_reduce else None
        if self.grad_reduce_handle is not None and (reduced := getattr(self, "reduced", None)) is not None:
            if torch.distributed.get_backend(self.intra_distributed_optimizer_instance_group) == "gloo":
                self.grad_reduce_handle = _WaitedOnce(self.grad_reduce_handle)
            reduced(self)

    def start_param_sync(self: Any, force_sync: bool = False) -> None:
        if _is_alone(self):
            self.param_gather_dispatched = True  # and whoever reads a parameter waits for that alone
            return
        for param in self.params:
            _gate(self, param)
        gather(self, force_sync)

    _ParamAndGradBucketGroup.start_grad_sync = start_grad_sync
    _ParamAndGradBucketGroup.start_param_sync = start_param_sync


def _is_alone(group: Any) -> bool:
    settings = group.ddp_config
    if settings.check_for_nan_in_grad or settings.check_for_large_grads:
        return False
    if not settings.use_distributed_optimizer:
        return bool(group.data_parallel_group.size() == 1)
    return (
        settings.num_distributed_optimizer_instances == 1
        and group.intra_distributed_optimizer_instance_group.size() == 1
    )
