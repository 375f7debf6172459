"""Fixes of defects in Megatron-core 0.16.1 on every device. Each comment describes the failure without the fix."""

from __future__ import annotations

import functools
import importlib
import logging
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, utils
from megatron.core.optimizer import clip_grads
from megatron.core.pipeline_parallel import p2p_communication, schedules
from megatron.core.tensor_parallel import mappings
from megatron.core.transformer import multi_latent_attention, transformer_layer
from megatron.core.transformer.moe import moe_utils
from torch.utils.weak import WeakTensorKeyDictionary

from parallel.norms import tensor_norms


def apply() -> None:
    """Apply the fixes of this module to Megatron-core. Called once, by parallel.megatron.apply_patches."""
    # Without TransformerEngine the name is never bound, and the router's matrix product raises NameError on every
    # device. None selects the plain torch product. Fixed upstream in 0.17.0.
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    # Without TransformerEngine the import of its layers still succeeds, with mocks in their place: the flag is then
    # wrong, and building a latent attention layer raises TypeError.
    if not isinstance(multi_latent_attention.TELinear, type):
        multi_latent_attention.HAVE_TE = False
    # A transformer layer compares feed-forward classes by identity. A subclass works, but causes a warning per layer.
    logger = logging.getLogger(transformer_layer.__name__)
    logger.addFilter(lambda record: "Unknown MLP type" not in record.getMessage())
    # Without TransformerEngine and Apex, the norm waits for the device once per tensor, and is not exact on a CPU.
    if clip_grads.l2_norm_impl is utils.local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl = _norm
    # By its path, because the package has a function of the same name as this module.
    module: Any = importlib.import_module("megatron.core.distributed.finalize_model_grads")
    module.get_updated_expert_bias = _updated_bias
    # A non-contiguous tensor, such as the gradient of a tensor in a concatenation, is summed over the tensor ranks in a
    # copy, but the tensor itself is returned. Fixed upstream in 0.19.0 (#5338).
    add_up = mappings._reduce
    mappings._reduce = functools.wraps(add_up)(lambda input_, group: add_up(input_.contiguous(), group))
    _free_outputs_once_sent()


def _norm(
    chunk_size: int, noop_flag: Any, tensor_lists: list[list[torch.Tensor]], per_tensor: bool, *args: Any
) -> tuple[Any, None]:
    assert not per_tensor
    return torch.linalg.vector_norm(tensor_norms(tensor_lists[0])).float().view(1), None


def _updated_bias(tokens_LE: torch.Tensor, bias_LE: torch.Tensor, rate: float) -> torch.Tensor:
    # Megatron compares counts with their mean in fp32: beyond 2^24 tokens, a difference of one token is lost.
    group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    dist.all_reduce(tokens_LE, group=group)
    below_LE = tokens_LE.sum(dim=-1, keepdim=True) - tokens_LE * tokens_LE.size(-1)
    return bias_LE + torch.sign(below_LE).to(bias_LE.dtype) * rate


_sends = WeakTensorKeyDictionary()  # output -> its send, while a pipeline runs


def _free_outputs_once_sent() -> None:
    # The interleaved schedule frees a chunk's output while its send may still read it: NCCL's reference to a tensor
    # does not keep memory that is freed through `Tensor.data`. Megatron waits since 0.18.0 (#4047), directly after it
    # has started the send; here the wait is a backward pass later, before the output is freed.
    send, free = p2p_communication.P2PCommunicator.send_forward_recv_forward, schedules.deallocate_output_tensor
    run = schedules.forward_backward_pipelining_with_interleaving

    @functools.wraps(send)
    def send_and_note(self: Any, output_tensor: torch.Tensor | None, *args: Any, **kwargs: Any) -> Any:
        received = send(self, output_tensor, *args, **kwargs)
        # Nobody has waited for an overlapped send. If outputs are never freed, it must not keep them either.
        if isinstance(received, tuple) and output_tensor is not None and self.config.deallocate_pipeline_outputs:
            _sends[output_tensor] = received[1]["send_next"]
        return received

    @functools.wraps(free)
    def free_once_sent(out: torch.Tensor | None, deallocate_pipeline_outputs: bool = False) -> None:
        if out is not None and deallocate_pipeline_outputs and (sent := _sends.pop(out, None)) is not None:
            sent.wait()
        free(out, deallocate_pipeline_outputs)

    @functools.wraps(run)
    def run_and_forget(*args: Any, **kwargs: Any) -> Any:
        try:
            return run(*args, **kwargs)
        finally:  # forward passes without backward passes free nothing, and a send may keep its tensor alive
            _sends.clear()

    p2p_communication.P2PCommunicator.send_forward_recv_forward = send_and_note
    schedules.deallocate_output_tensor = free_once_sent
    schedules.forward_backward_pipelining_with_interleaving = run_and_forget
