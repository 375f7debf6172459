"""Mends of Megatron-core 0.16.1 that every device needs. Each says what breaks without it."""

from __future__ import annotations

import importlib
import logging
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, utils
from megatron.core.optimizer import clip_grads
from megatron.core.transformer import multi_latent_attention, transformer_layer
from megatron.core.transformer.moe import moe_utils

from parallel.norms import tensor_norms


def apply() -> None:
    """Apply all patches. Called once, by parallel.megatron.apply_patches."""
    _define_te_general_gemm()
    _measure_gradients_exactly()
    _accept_subclasses_of_layers()
    _let_latent_attention_do_without_te()
    _compare_counts_exactly()


def _define_te_general_gemm() -> None:
    # Without TransformerEngine the name is never bound, and the router's matrix product raises NameError on every
    # device. None selects the plain torch product. Fixed upstream in 0.17.0.
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def _let_latent_attention_do_without_te() -> None:
    # Without TransformerEngine the import of its layers still succeeds, with mocks in their place: the flag says that
    # it is there, and building a latent attention layer raises TypeError.
    if not isinstance(multi_latent_attention.TELinear, type):
        multi_latent_attention.HAVE_TE = False


def _accept_subclasses_of_layers() -> None:
    # A transformer layer knows Megatron's feed-forward classes by identity; for a subclass, which works as well, it
    # warns once per layer and lets it find its process groups by itself.
    logging.getLogger(transformer_layer.__name__).addFilter(
        lambda record: "Unknown MLP type" not in record.getMessage()
    )


def _measure_gradients_exactly() -> None:
    # What upstream falls back to without TransformerEngine and apex waits for the device once per tensor, and is not
    # exact on the CPU.
    def norm(
        chunk_size: int, noop_flag: Any, tensor_lists: list[list[torch.Tensor]], per_tensor: bool, *args: Any
    ) -> tuple[Any, None]:
        assert not per_tensor
        return torch.linalg.vector_norm(tensor_norms(tensor_lists[0])).float().view(1), None

    if clip_grads.l2_norm_impl is utils.local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl = norm


def _compare_counts_exactly() -> None:
    # Upstream compares each count of tokens with a mean in fp32: one token more than the mean is none where a layer has
    # more than 2^24 assignments in a global batch.
    def updated(tokens_LE: torch.Tensor, bias_LE: torch.Tensor, rate: float) -> torch.Tensor:
        group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        dist.all_reduce(tokens_LE, group=group)
        below_LE = tokens_LE.sum(dim=-1, keepdim=True) - tokens_LE * tokens_LE.size(-1)
        return bias_LE + torch.sign(below_LE).to(bias_LE.dtype) * rate

    # The package has a function of the same name as the module.
    module: Any = importlib.import_module("megatron.core.distributed.finalize_model_grads")
    module.get_updated_expert_bias = updated
