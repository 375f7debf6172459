"""All steps that make a model parallel, in order. The model files themselves do not know the layout.

Megatron-core's layers read their shard sizes from settings when they are built: `layer_settings`, the first half. The
built model is then marked and wrapped: `parallelize`, the second half.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import parallel.megatron  # noqa: F401  (before anything else of Megatron-core is imported: see parallel/megatron/startup.py)

# isort: split
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.tensor_parallel.layers import (
    set_defaults_if_not_set_tensor_model_parallel_attributes,
    set_tensor_model_parallel_attributes,
)
from megatron.core.utils import get_model_config, unwrap_model

from configs import derived
from configs.schema import Config
from models.weights import logical_tensors
from parallel.megatron.ddp import in_half_precision, wrap
from parallel.topology import Topology

# selective: attention scores and the wide activations of dense feed-forward layers, which take most of a layer's memory
# (Korthikanti et al. 2022, section 4). For MoE layers moe.memory_strategy decides.
RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}


def layer_settings(config: Config) -> dict[str, Any]:
    """Return the settings of Megatron-core's TransformerConfig for the parallel layout and for recomputation."""
    layout = config.parallel
    return {
        # 1. Tensor and sequence parallelism: each layer holds a slice of its weights; norms and dropout process a share
        # of the tokens.
        "tensor_model_parallel_size": layout.tensor,
        "sequence_parallel": layout.sequence,
        # 2. Context parallelism: attention exchanges keys and values.
        "context_parallel_size": layout.context,
        # 3. Expert parallelism reuses the same ranks. If the tensor size of experts is None, Megatron-core takes the
        # one of the other layers, both for the groups and in the config.
        "expert_model_parallel_size": layout.expert,
        "expert_tensor_parallel_size": derived.expert_tensor_size(config),
        # 4. Pipeline parallelism: a chunk holds only its own layers. With two pipeline ranks the interleaved schedule
        # sends activations and gradients to the same rank. In one batch only their order distinguishes them, and they
        # get swapped; overlapped, each direction has its own group.
        "pipeline_model_parallel_size": layout.pipeline,
        "virtual_pipeline_model_parallel_size": layout.virtual_pipeline,
        "overlap_p2p_comm": layout.virtual_pipeline is not None,
        "batch_p2p_comm": layout.virtual_pipeline is None,
        # Otherwise the host waits for the whole device after each batch, which old versions of torch needed.
        "batch_p2p_sync": False,
        # 5. Recomputation: activations that a layer does not keep for its backward pass.
        **copy.deepcopy(RECOMPUTE[config.training.recompute]),  # Megatron-core may append to its lists
    }


def parallelize(config: Config, topology: Topology, chunks: Sequence[torch.nn.Module]) -> list[DistributedDataParallel]:
    """Mark and wrap this rank's model chunks from models/build.py for training."""
    settings = get_model_config(chunks[0])
    # 6. Marks of weights that are slices: the gradients' norm counts weights that all tensor ranks hold once.
    mark_tensor_parallel(chunks)
    # 7. Precision: the inputs and outputs of a half-precision model are cast at its borders.
    if config.training.precision != "fp32":
        chunks = [in_half_precision(settings, chunk) for chunk in chunks]
    # 8. Data parallelism: gradient buffers, their reduction, and the gather of a sharded optimizer's weights. Owned
    # parameters (parallel/owned.py) are left out; `wrap` starts their own gradients.
    data = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=config.parallel.overlap_grad_reduce,
        overlap_param_gather=derived.overlap_param_gather(config),
        use_distributed_optimizer=config.optimizer.distributed,
    )
    # 9. Weight gradients are added to those buffers by the kernels that compute them.
    if config.model.fusions != "off":
        accumulate_in_products(chunks)
    return wrap(data, chunks, topology.groups)


def accumulate_in_products(chunks: Sequence[torch.nn.Module]) -> None:
    """Make TransformerEngine's linear layers add their weight gradients to the fp32 gradient buffer within the matmul
    kernel. This saves a bf16 gradient and the pass that would add it."""
    # Megatron-core has one setting for all layers, and its own output layer needs apex for it. Only TransformerEngine's
    # layers have the attribute.
    for chunk in chunks:
        for module in chunk.modules():
            if hasattr(module, "fuse_wgrad_accumulation"):
                module.fuse_wgrad_accumulation = True  # Megatron's argument would be for all layers


def mark_tensor_parallel(chunks: Sequence[torch.nn.Module]) -> None:
    """Mark each weight as split over the tensor ranks or replicated. The gradient norm counts split weights on every
    rank, and replicated weights only on rank 0. Megatron-core marks weights when it initializes them, which is turned
    off here."""
    for item in logical_tensors(chunks):
        if item.dim is not None and not hasattr(item.local, "tensor_model_parallel"):
            stride = 2 if item.gated else 1
            set_tensor_model_parallel_attributes(item.local, is_parallel=True, dim=item.dim, stride=stride)
    for chunk in chunks:
        for parameter in chunk.parameters():
            set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)


def bare(chunks: Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
    """Return the model chunks without the wrappers of `parallelize`."""
    return list(unwrap_model(list(chunks)))


@contextmanager
def frozen_weights(chunks: Sequence[DistributedDataParallel]) -> Iterator[None]:
    """Context manager for reading weights between steps. It first finishes pending all-gathers, and turns dropout
    off."""
    for chunk in chunks:
        if chunk.ddp_config.overlap_param_gather:
            chunk.disable_forward_pre_hook(param_sync=True)
        chunk.eval()
    try:
        yield
    finally:
        for chunk in chunks:
            if chunk.ddp_config.overlap_param_gather:
                chunk.enable_forward_pre_hook()
            chunk.train()
