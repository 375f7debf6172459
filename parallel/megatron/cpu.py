"""Adapter for CPUs: Megatron-core 0.16.1 names CUDA in about a hundred places, which are changed to "cpu" here.

The compiled functions of the listed modules are rewritten in place: the constant "cuda" becomes "cpu", the name `cuda`
(as in `torch.cuda.current_device()` or `tensor.cuda()`) becomes `cpu` (`torch.cpu` has the same small interface), and
tensor type names lose their "cuda.". That costs nothing at run time, leaves `torch.cuda` unchanged, and works in every
thread. Functions that renaming cannot fix are replaced below.
"""

from __future__ import annotations

import contextlib
import importlib
import types
from collections.abc import Iterator
from typing import Any

import torch

CONSTANTS = {
    "cuda": "cpu",
    "torch.cuda.FloatTensor": "torch.FloatTensor",
    "torch.cuda.HalfTensor": "torch.HalfTensor",
    "torch.cuda.BFloat16Tensor": "torch.BFloat16Tensor",
}
MODULES = (
    "distributed.distributed_data_parallel",
    "distributed.param_and_grad_buffer",
    "models.common.embeddings.rotary_pos_embedding",
    "models.common.embeddings.yarn_rotary_pos_embedding",
    "models.common.language_module.language_module",
    "optimizer.clip_grads",
    "optimizer.distrib_optimizer",
    "optimizer.grad_scaler",
    "optimizer.optimizer",
    "pipeline_parallel.p2p_communication",
    "pipeline_parallel.schedules",
    "tensor_parallel.data",
    "tensor_parallel.layers",
    "tensor_parallel.mappings",
    "tensor_parallel.utils",
    "transformer.attention",
    "transformer.moe.moe_utils",
    "transformer.moe.router",
    "transformer.moe.token_dispatcher",
    "transformer.transformer_layer",
    "transformer.utils",
    "utils",
)


def apply() -> None:
    """Rewrite the modules of Megatron-core in MODULES for a CPU. Called once, by parallel.megatron.apply_patches."""
    from megatron.core.tensor_parallel import random

    for name in MODULES:
        _rewrite_module(importlib.import_module(f"megatron.core.{name}"), {"cuda": "cpu"})
    # `torch.random` has get_rng_state and manual_seed as `torch.cuda` has.
    _rewrite_module(random, {"cuda": "random"})
    random._get_cuda_rng_state = lambda device="cpu", clone=False, graph_safe=False: torch.get_rng_state()
    random._set_cuda_rng_state = lambda new_state, device=-1, graph_safe=False: torch.set_rng_state(new_state)
    # Megatron's own fork warns if the host's generator was used inside, which is the purpose here.
    random.CudaRNGStatesTracker.fork = _fork
    _use_host_splits()
    _gather_uneven_over_gloo()
    _gather_parameters_one_by_one()


def _functions(module: types.ModuleType) -> Iterator[types.FunctionType]:
    """Yield every plain function that a module defines, including those in classes, properties and decorators."""
    for value in vars(module).values():
        members = vars(value).values() if isinstance(value, type) and value.__module__ == module.__name__ else [value]
        for member in members:
            candidates = [member.fget, member.fset] if isinstance(member, property) else [member]
            for function in candidates:
                function = getattr(function, "__func__", function)  # static and class methods
                while function is not None:
                    if isinstance(function, types.FunctionType) and function.__module__ == module.__name__:
                        yield function
                    function = getattr(function, "__wrapped__", None)


def _rewrite_code(code: types.CodeType, names: dict[str, str]) -> types.CodeType:
    def constant(value: Any) -> Any:
        if isinstance(value, types.CodeType):
            return _rewrite_code(value, names)
        if isinstance(value, tuple):
            return tuple(constant(item) for item in value)
        return CONSTANTS.get(value, value) if isinstance(value, str) else value

    return code.replace(
        co_consts=tuple(constant(value) for value in code.co_consts),
        co_names=tuple(names.get(name, name) for name in code.co_names),
    )


def _rewrite_module(module: types.ModuleType, names: dict[str, str]) -> None:
    for function in _functions(module):
        function.__code__ = _rewrite_code(function.__code__, names)
        if function.__defaults__:
            function.__defaults__ = tuple(
                CONSTANTS.get(d, d) if isinstance(d, str) else d for d in function.__defaults__
            )


@contextlib.contextmanager
def _fork(tracker: Any, name: str = "model-parallel-rng") -> Iterator[None]:
    """Within this context, random numbers are drawn from the tracked state `name`. Contexts can be nested."""
    outer_name, outer_state = tracker._current_state_name, torch.get_rng_state()
    if outer_name in tracker.states_:
        tracker.states_[outer_name] = outer_state
    torch.set_rng_state(tracker.states_[name])
    tracker._current_state_name = name
    try:
        yield
    finally:
        tracker.states_[name] = torch.get_rng_state()
        tracker._current_state_name = outer_name
        torch.set_rng_state(tracker.states_[name] if outer_name == name else outer_state)


def _use_host_splits() -> None:
    # On a GPU, the dispatcher copies its split sizes to the host on a side stream and waits for them. Here they are on
    # the host, and are only converted to numpy as all_to_all_single needs it.
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    def take_splits(self: Any, point: str, tokens_per_expert: torch.Tensor | None = None) -> torch.Tensor | None:
        if not self.drop_and_pad and point == self.cuda_dtoh_point:
            for name in ("input_splits", "output_splits", "output_splits_tp"):
                splits = getattr(self, name)
                if torch.is_tensor(splits):
                    setattr(self, name, splits.numpy())
        return tokens_per_expert

    MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize = take_splits


def _gather_uneven_over_gloo() -> None:
    # gloo's all_gather needs equal shapes, but dropless dispatch with expert tensor parallelism gathers unequal ones.
    from megatron.core.tensor_parallel import mappings

    gather_first_dim = mappings._gather_along_first_dim

    def gather(
        input_: torch.Tensor,
        group: torch.distributed.ProcessGroup,
        output_split_sizes: Any = None,
        use_global_buffer: bool = False,
    ) -> torch.Tensor:
        if output_split_sizes is None or group.size() == 1:
            return gather_first_dim(input_, group, output_split_sizes, use_global_buffer)
        sizes = [int(size) for size in output_split_sizes]
        padded = input_.new_zeros((max(sizes), *input_.shape[1:]))
        padded[: input_.shape[0]] = input_
        gathered = input_.new_empty((len(sizes) * max(sizes), *input_.shape[1:]))
        torch.distributed.all_gather_into_tensor(gathered, padded, group=group)
        return torch.cat([block[:size] for block, size in zip(gathered.chunk(len(sizes)), sizes, strict=True)])

    mappings._gather_along_first_dim = gather


def _gather_parameters_one_by_one() -> None:
    # gloo's coalesced all-gather (torch 2.13) corrupts the heap: a few thousand small ones in a row, as DDP makes
    # them to gather its parameters, end in a segmentation fault, even in a group of one. Separate gathers do not.
    from megatron.core.distributed import param_and_grad_buffer

    coalesce = param_and_grad_buffer._coalescing_manager
    open_blocks: list[Any] = []

    @contextlib.contextmanager
    def remember(group: torch.distributed.ProcessGroup, async_ops: bool = False) -> Iterator[Any]:
        with coalesce(group, async_ops=async_ops) as block:
            open_blocks.append(block)
            try:
                yield block
            finally:
                open_blocks.pop()

    def gather(
        output: torch.Tensor, input_: torch.Tensor, group: torch.distributed.ProcessGroup, async_op: bool
    ) -> None:
        work = group._allgather_base(output, input_)
        if async_op:
            open_blocks[-1].append(work)
        else:
            work.wait()

    param_and_grad_buffer._coalescing_manager = remember
    param_and_grad_buffer.dist_all_gather_func = gather
