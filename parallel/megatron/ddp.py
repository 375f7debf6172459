"""The insides of Megatron-core 0.16.1's DistributedDataParallel and schedules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import p2p_communication, schedules
from megatron.core.utils import get_model_config

from parallel.megatron import require_version

require_version()


def release(chunks: Sequence[DistributedDataParallel]) -> None:
    """Empty wrapped chunks, so that their memory, process groups and threads are free when nobody else holds them.

    Without it a process that trains one model after the other keeps them all: autograd's hooks hold the DDP, in cycles
    that Python's collector cannot see.
    """
    settings = get_model_config(chunks[0])
    settings.grad_scale_func = settings.no_sync_func = settings.grad_sync_func = settings.param_sync_func = None
    for chunk in chunks:
        if chunk.use_forward_hook and chunk.remove_forward_pre_hook_handles:
            chunk.disable_forward_pre_hook(param_sync=False)
        chunk.grad_accs.clear()
        chunk._modules.clear()
        chunk.gate = None  # it holds the optimizer's tiers, as those of the groups do
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            group.gate = group.reduced = None


def functions_of_a_step(chunks: Sequence[DistributedDataParallel]) -> list[tuple[Any, str, str]]:
    """What a step calls in Megatron-core: (owner, attribute, name in a trace). Without it a trace has kernels and no
    phases."""
    groups = [group for chunk in chunks for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)]
    return [
        (schedules, "forward_step", "forward"),
        (schedules, "backward_step", "backward"),
        (p2p_communication.P2PCommunicator, "_communicate", "pipeline exchange"),
        *((group, name, "gradient reduction") for group in groups for name in ("start_grad_sync", "finish_grad_sync")),
        *((group, name, "parameter gather") for group in groups for name in ("start_param_sync", "finish_param_sync")),
        (get_model_config(chunks[0]), "finalize_model_grads_func", "gradient reduction"),
    ]
