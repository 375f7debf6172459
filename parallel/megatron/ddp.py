"""Access to internals of Megatron-core 0.16.1's Float16Module, DistributedDataParallel and schedules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import p2p_communication, schedules
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_model_config

from parallel.megatron import require_version
from parallel.owned import owners

require_version()


def in_half_precision(settings: TransformerConfig, chunk: torch.nn.Module) -> Float16Module:
    """Wrap a bare model chunk to compute in bf16 or fp16: its parameters are cast, its buffers keep their dtypes."""
    buffers = [(module, *named) for module in chunk.modules() for named in module.named_buffers(recurse=False)]
    wrapped = Float16Module(settings, chunk)
    # Without this the cast rounds the routers' counts and biases (github.com/NVIDIA/Megatron-LM/pull/7081).
    for module, name, buffer in buffers:
        setattr(module, name, buffer)
    return wrapped


def wrap(
    data: DistributedDataParallelConfig, chunks: Sequence[torch.nn.Module], groups: ProcessGroupCollection
) -> list[DistributedDataParallel]:
    """Wrap bare model chunks in Megatron's DDP, but leave owned parameters (parallel/owned.py) out of its buffers.

    Gradients are summed over the ranks instead of averaged.
    """
    settings, wrapped = get_model_config(chunks[0]), []
    for i, chunk in enumerate(chunks):
        own = owners(chunk.parameters())
        for owner in own:  # else DDP's constructor puts it into a buffer
            owner.parameter.requires_grad_(False)
        try:
            outer = DistributedDataParallel(settings, data, chunk, disable_bucketing=i > 0, pg_collection=groups)
        finally:
            for owner in own:
                owner.parameter.requires_grad_(True)
        # Without this, gradients are averages, and the loss must be multiplied by the number of ranks: the fp16
        # gradients of activations would overflow at a loss scale that is smaller by this factor.
        for buffer in (*outer.buffers, *outer.expert_parallel_buffers):
            for bucket in buffer.buckets:
                bucket.gradient_scaling_factor = 1.0  # Megatron's bucket has no argument for this.
        for owner in own:
            owner.begin()
        # so that each step resets their gradients, too
        outer.params_with_grad += [owner.parameter for owner in own if not owner.off_device]
        wrapped.append(outer)
    return wrapped


def finalize_gradients(chunks: Sequence[DistributedDataParallel], *rest: Any, **named: Any) -> None:
    """Reduce gradients: first those of owned parameters, then all others with Megatron-core's `finalize_model_grads`.

    Like that function, it reduces first over data-parallel ranks, then over tensor-parallel ranks and pipeline stages.
    """
    for chunk in chunks:
        for owner in owners(chunk.params_with_grad):
            owner.reduce()
    finalize_model_grads(chunks, *rest, **named)


def release(chunks: Sequence[DistributedDataParallel]) -> None:
    """Empty wrapped model chunks, so that their memory, process groups and threads are freed with the last reference.

    Without this they are kept: autograd's hooks refer to the DDP in cycles that Python's garbage collector cannot see.
    """
    settings = get_model_config(chunks[0])
    settings.grad_scale_func = settings.no_sync_func = settings.grad_sync_func = settings.param_sync_func = None
    for chunk in chunks:
        if chunk.use_forward_hook and chunk.remove_forward_pre_hook_handles:
            chunk.disable_forward_pre_hook(param_sync=False)
        chunk.grad_accs.clear()
        for owner in owners(chunk.params_with_grad):
            owner.release()
        chunk._modules.clear()
        chunk.gate = None  # set by gate_weights; refers to the offloaded optimizer, as the attributes of groups do
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            group.gate = group.reduced = None


def functions_of_a_step(chunks: Sequence[DistributedDataParallel]) -> list[tuple[Any, str, str]]:
    """Return functions of Megatron-core that a step calls, to be named in a trace: (owner, attribute, name).

    Otherwise a trace would show kernels but no phases.
    """
    groups = [group for chunk in chunks for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)]
    return [
        (schedules, "forward_step", "forward"),
        (schedules, "backward_step", "backward"),
        (p2p_communication.P2PCommunicator, "_communicate", "pipeline exchange"),
        *((group, name, "gradient reduction") for group in groups for name in ("start_grad_sync", "finish_grad_sync")),
        *((group, name, "parameter gather") for group in groups for name in ("start_param_sync", "finish_param_sync")),
        (get_model_config(chunks[0]), "finalize_model_grads_func", "gradient reduction"),
    ]
