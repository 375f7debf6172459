"""Build this rank's model chunks for the configured layout, weights initialized. Needs initialized process groups."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import parallel.megatron  # noqa: F401  (before anything else of Megatron-core is imported: see parallel/megatron/startup.py)

# isort: split
import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import (
    set_defaults_if_not_set_tensor_model_parallel_attributes,
    set_tensor_model_parallel_attributes,
)

from configs.schema import Config
from models import bert, gpt
from models.initialize import initialize_weights
from models.specs import block_spec, resolve_backend
from models.transformer_config import transformer_config
from models.weights import logical_tensors
from parallel.megatron import apply_patches
from parallel.topology import choose_device

FAMILIES: dict[str, ModuleType] = {"gpt": gpt, "bert": bert}
VOCAB_MULTIPLE = 128  # rows per tensor rank: matrix kernels like sizes that are multiples of 128


def family_module(config: Config) -> ModuleType:
    """models.gpt or models.bert: both offer `forward(model, batch)`, `loss(output, batch)` and `logits`."""
    return FAMILIES[config.model.family]


def padded_vocab_size(vocab_size: int, tensor_parallel: int) -> int:
    """Rows that the embedding stores over all tensor ranks."""
    multiple = VOCAB_MULTIPLE * tensor_parallel
    return -(-vocab_size // multiple) * multiple


def build_model(config: Config, vocab_size: int, *, fill: bool = True) -> list[torch.nn.Module]:
    """This rank's model chunks (`parallel.virtual_pipeline` of them, or one), on its device, weights initialized, not wrapped.

    `vocab_size` is the logical one; padding of the storage changes neither loss nor gradients. Without `fill` the weights hold
    anything: the caller loads them. Raises ConfigError.
    """
    family = family_module(config)
    device = choose_device(config)
    apply_patches(device.type)
    megatron = transformer_config(config)
    backend = resolve_backend(config, device)
    num_chunks = config.parallel.virtual_pipeline or 1
    chunks = []
    # torch's own layers draw initial values that are overwritten below; the global generator must not move by how many
    # of them this rank happens to hold.
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        for index in range(num_chunks):
            vp_stage = index if num_chunks > 1 else None
            stage = {"ignore_virtual": False, "vp_stage": vp_stage}
            chunk = family.build_chunk(
                config,
                megatron,
                block_spec(config, megatron, backend, vp_stage),
                padded_vocab_size(vocab_size, config.parallel.tensor),
                pre_process=parallel_state.is_pipeline_first_stage(**stage),
                post_process=parallel_state.is_pipeline_last_stage(**stage),
                vp_stage=vp_stage,
            )
            chunk.logical_vocab_size = vocab_size
            chunks.append(chunk.to(device))
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.data = parameter.data.to(megatron.params_dtype)
        if chunk.post_process:
            _mask_padding(chunk.output_layer, vocab_size)
    _mark_tensor_parallel(chunks)
    if fill:
        initialize_weights(chunks, config)
    return chunks


def _mark_tensor_parallel(chunks: list[torch.nn.Module]) -> None:
    # The gradient norm counts a parameter once per tensor rank if it is split, else on rank 0 only. Megatron-core
    # marks weights while it initializes them, which is turned off here.
    for item in logical_tensors(chunks):
        if item.dim is not None and not hasattr(item.local, "tensor_model_parallel"):
            set_tensor_model_parallel_attributes(item.local, is_parallel=True, dim=item.dim, stride=2 if item.gated else 1)
    for chunk in chunks:
        for parameter in chunk.parameters():
            set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)


def _mask_padding(output_layer: torch.nn.Module, vocab_size: int) -> None:
    # Logits of rows that pad the vocabulary become the smallest number, so that softmax gives them exactly 0 and their
    # gradient is 0. Written past autograd: recording it would copy the gradient of all logits.
    group = output_layer.tp_group
    rows = output_layer.output_size_per_partition
    num_real = min(max(vocab_size - group.rank() * rows, 0), rows)
    if num_real == rows:
        return

    def mask(_module: torch.nn.Module, _inputs: Any, output: tuple[torch.Tensor, torch.Tensor | None]) -> None:
        logits = output[0].detach()
        logits[..., num_real:] = torch.finfo(logits.dtype).min

    output_layer.register_forward_hook(mask)
