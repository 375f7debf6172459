"""Patches that spare Megatron-core 0.16.1 needless passes over its gradient buffers.

The buffers are in fp32 and as large as the model's gradients: each pass takes a noticeable part of the step time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

Gate = Callable[[torch.nn.Parameter], None]  # waits until no update uses a parameter or its gradient


def apply() -> None:
    """Apply the patches of this module to Megatron-core. Called once, by parallel.megatron.apply_patches."""
    # Without this each step zeros the buffers and adds the first gradients to them: a needless write and read.
    DistributedDataParallel.zero_grad_buffer = _forget_gradients
    DistributedDataParallel._make_backward_post_hook = _gradient_hook
    _exchange_nothing_alone()


# -- the first micro-batch of a step writes its gradients --------------------------------------------------------------
# torch.nn.Parameter has no argument for its attributes: Megatron's main_grad and grad_added_to_main_grad, and
# grad_is_old (whether main_grad is the last step's) and grad_parts (gradients of its elements that are to be added).


def _forget_gradients(self: DistributedDataParallel) -> None:
    """Replace Megatron's zero_grad_buffer: mark gradients as old instead, so that the next step overwrites them."""
    for param in self.params_with_grad:
        param.grad_added_to_main_grad = False
        param.grad_is_old = True
        param.__dict__.pop("grad_parts", None)
    if getattr(self, "gate", None) is None and any(adds_by_itself(module) for module in self.modules()):
        # Now, unless an update may still read the buffer: then each weight's range is zeroed in the forward pass.
        for buffer in self.buffers + self.expert_parallel_buffers:
            buffer.reset()
        for param in self.params_with_grad:
            if param in self.param_to_bucket_group:
                param.grad_is_old = False
            zero_if_old(param)  # a parameter outside the buffers
    for group in self.bucket_groups + self.expert_parallel_bucket_groups:
        group.reset()


def add_with_next(param: torch.Tensor, index: int, grad: torch.Tensor) -> bool:
    """Store `grad`, to be added to the gradient of `param[index]` when autograd has its next gradient of `param`.

    It is added before DDP counts the gradient as ready. Returns False if the parameter has no gradient buffer.
    """
    if not hasattr(param, "main_grad"):
        return False
    param.__dict__.setdefault("grad_parts", []).append((index, grad))
    return True


def adds_by_itself(module: torch.nn.Module) -> bool:
    """Whether a module's matmuls add weight gradients directly to their buffer, which must be zeroed before."""
    return bool(getattr(module, "fuse_wgrad_accumulation", False))


def zero_if_old(param: torch.nn.Parameter, gate: Gate | None = None) -> None:
    """Zero a parameter's gradient buffer if it still has the gradient of the last step.

    gate: waits until no optimizer update reads the buffer. None: no update does.
    """
    if getattr(param, "grad_is_old", False):
        if gate is not None:
            gate(param)
        param.main_grad.zero_()  # type: ignore[attr-defined]
        param.grad_is_old = False  # type: ignore[attr-defined]


def open_buffer(param: torch.nn.Parameter) -> tuple[torch.Tensor, bool]:
    """Return a parameter's gradient buffer to write to in a backward pass, and whether the pass must overwrite it.

    No update reads the buffer any more: the forward pass waited for updates before it read the parameter. Autograd may
    still pass a dummy, or the gradient of another use of the parameter (a tied embedding), to the parameter's hook.
    """
    is_old = getattr(param, "grad_is_old", False)
    param.grad_is_old = False  # type: ignore[attr-defined]
    param.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    return param.main_grad, is_old  # type: ignore[attr-defined]


class GradientSum:
    """Sums one backward pass's contributions to a weight's gradient in fp32, in its gradient buffer if there is one."""

    def __init__(self, parameter: torch.Tensor) -> None:
        self._parameter, self._has_buffer = parameter, hasattr(parameter, "main_grad")
        if self._has_buffer:
            self._sum, self._writes_over = open_buffer(parameter)  # type: ignore[arg-type]
        else:
            self._sum, self._writes_over = torch.empty_like(parameter, dtype=torch.float32), True

    def add(self, grad: torch.Tensor, matrix_rows: slice = slice(None)) -> None:
        """Add a contribution to some rows of the weight's gradient. All calls must be for the same rows."""
        if self._writes_over:
            if len(grad) < len(self._sum):
                self._sum.zero_()
            self._sum[matrix_rows].copy_(grad)
            self._writes_over = False
        else:
            self._sum[matrix_rows].add_(grad)

    def for_autograd(self) -> torch.Tensor:
        """Return the gradient to pass to autograd: the sum, or a dummy if the sum is in the gradient buffer."""
        if self._writes_over:  # there was no contribution
            self._sum.zero_()
        return self._parameter.detach() if self._has_buffer else self._sum.to(self._parameter.dtype)


def add_gradient(param: torch.nn.Parameter, grad: torch.Tensor, gate: Gate | None) -> None:
    """Add a micro-batch's gradient to a parameter's gradient buffer; the first of a step overwrites the buffer.

    gate: waits, before that, until no optimizer update reads the buffer. None: no update does.
    """
    if getattr(param, "grad_is_old", False):
        if gate is not None:
            gate(param)
        param.main_grad.copy_(grad)  # type: ignore[attr-defined]
        param.grad_is_old = False  # type: ignore[attr-defined]
    else:
        param.main_grad.add_(grad)  # type: ignore[attr-defined]


def take_gradient(param: torch.nn.Parameter, gate: Gate | None) -> None:
    """Add the gradient that autograd has computed for a parameter to its gradient buffer, and free it.

    gate: waits until no optimizer update reads the buffer. None: no update does.
    """
    # A matmul that has added its gradient to the buffer leaves a dummy, except with a tied embedding.
    added = param.grad_added_to_main_grad and not getattr(param, "zero_out_wgrad", False)  # type: ignore[attr-defined]
    if param.grad is not None and not added:
        add_gradient(param, param.grad, gate)
    for index, grad in param.__dict__.pop("grad_parts", []):
        param.main_grad[index].add_(grad)  # type: ignore[attr-defined]
    param.grad = None


def _gradient_hook(self: DistributedDataParallel, param: torch.nn.Parameter) -> Callable[..., None]:
    """Replace Megatron's hook that runs when autograd has a parameter's gradient of a micro-batch."""

    def hook(*unused: Any) -> None:
        if param not in self.param_to_bucket_group:
            return
        overlap = self.ddp_config.overlap_grad_reduce
        # In the layer-wise schedule, the head has a separate backward call, where the gradient of a tied embedding is
        # None: the buffer has it already, and another call adds the embedding's.
        is_there = param.grad is not None or param.grad_added_to_main_grad  # type: ignore[attr-defined]
        assert is_there or not overlap, "overlap_grad_reduce needs a gradient in every backward pass"
        take_gradient(param, getattr(self, "gate", None))
        if overlap:
            self.param_to_bucket_group[param].register_grad_ready(param, self.force_all_reduce)

    return hook


# -- a rank without data-parallel peers exchanges nothing --------------------------------------------------------------


class _Done:
    """The handle of a collective of a single rank, which is always complete."""

    def wait(self) -> None:
        """Return immediately, because a collective of a single rank is always complete."""


class _WaitedOnce:
    """The handle of a gloo collective that several callers wait for.

    Only the first one really waits, because at each wait gloo would write the result again.
    """

    def __init__(self, handle: Any) -> None:
        self._handle, self._lock = handle, threading.Lock()

    def wait(self) -> None:
        """Wait for the collective, unless it has been waited for."""
        with self._lock:
            if self._handle is not None:
                self._handle.wait()
                self._handle = None


def _exchange_nothing_alone() -> None:
    # Without this, a group of one rank copies all gradients and weights onto themselves.
    reduce, gather = _ParamAndGradBucketGroup.start_grad_sync, _ParamAndGradBucketGroup.start_param_sync

    def start_grad_sync(self: Any, force_all_reduce: bool | None = False) -> None:
        if self.is_first_batch and self.grad_reduce_handle is not None:
            return  # as in Megatron: the hooks have started the reduction
        gate = getattr(self, "gate", None)
        for bucket in self.buckets:
            for param in bucket.params:
                zero_if_old(param, gate)  # no micro-batch of the step had a gradient for it
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
            self.param_gather_dispatched = True  # all that readers of a parameter wait for
            return
        if (gate := getattr(self, "gate", None)) is not None:  # see parallel/megatron/offloaded.py
            for param in self.params:
                gate(param)
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
