"""Megatron-core 0.16.1's optimizers for offloaded state: they have gradients and norms and gather weights, but have no
state, and the offloaded optimizer updates the weights. Only they use Megatron's "precision-aware" mode: no fp32 copies,
and gradients on views of the weights (`decoupled_grad`)."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import megatron.core.optimizer
import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import (
    Float16OptimizerWithFloat16Params,
    MegatronOptimizer,
    MixedPrecisionOptimizer,
)
from megatron.core.utils import get_model_config

from configs import derived
from parallel.megatron import require_version
from parallel.megatron.grad_buffers import adds_by_itself, zero_if_old
from parallel.megatron.optimizer import is_sharded, members
from parallel.owned import is_off_device, owners

require_version()


class ExternalShardedOptimizer(DistributedOptimizer):
    """A sharded optimizer in Megatron's chain that only all-gathers weights; the offloaded optimizer updates them."""

    _reload: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, optimizer: Any, config: Any, *rest: Any, **named: Any):
        config = copy.copy(config)
        config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
        super().__init__(optimizer, config, *rest, **named)

    def call_on_reload(self, reload: Callable[[], None]) -> None:
        """Register `reload`, to be called whenever Megatron would copy the weights to their fp32 copies."""
        self._reload = reload

    def _copy_model_params_to_main_params(self, state_dict: Any = None) -> None:
        self._reload()

    @torch.no_grad()
    def step_with_ready_grads(self) -> bool:
        """Start the all-gathers of the weights. Each waits for the updates of its weights that are still in flight."""
        if not self.ddp_config.overlap_param_gather:
            for chunk in self.model_chunks:
                chunk.start_param_sync()
        return True


class ExternalWholeOptimizer(Float16OptimizerWithFloat16Params):
    """An optimizer in Megatron's chain for owned parameters, with parameter groups and gradients but no fp32 copies."""

    def __init__(self, optimizer: Any, config: Any, *rest: Any):
        scaler = rest[0] if len(rest) > 1 else None  # (scaler, init) or (init,), as in the two replaced classes
        MixedPrecisionOptimizer.__init__(self, optimizer, config, scaler, rest[-1])
        self.is_stub_optimizer = False
        self.float16_groups: list[Any] = []
        self.fp32_from_float16_groups: list[Any] = []
        self.fp32_from_fp32_groups = [group["params"] for group in optimizer.param_groups]

    def _copy_model_grads_to_main_grads(self) -> None:
        for parameter in self._parameters_here():
            parameter.decoupled_grad = parameter.main_grad  # the attribute that Megatron's optimizers read

    def _collect_main_grad_data_for_unscaling(self) -> list[torch.Tensor]:
        return [parameter.main_grad for parameter in self._parameters_here()]  # type: ignore[attr-defined]

    def _parameters_here(self) -> list[torch.nn.Parameter]:
        return [parameter for parameter in self.get_parameters() if not is_off_device(parameter)]

    def _copy_model_params_to_main_params(self, state_dict: Any = None) -> None:
        """Do nothing: `reload` of the sharded optimizers already copies all weights to their fp32 copies."""

    def step_with_ready_grads(self) -> bool:
        """Do nothing: updates may still be in flight, and a pass that reads a parameter waits for its update."""
        return True


@contextlib.contextmanager
def building_external() -> Iterator[None]:
    """Within this context, Megatron-core builds the optimizers of this module instead of its own."""
    ours = {"DistributedOptimizer": ExternalShardedOptimizer}
    ours |= dict.fromkeys(("Float16OptimizerWithFloat16Params", "FP32Optimizer"), ExternalWholeOptimizer)
    plain = {name: getattr(megatron.core.optimizer, name) for name in ours}
    vars(megatron.core.optimizer).update(ours)
    try:
        yield
    finally:
        vars(megatron.core.optimizer).update(plain)


@dataclass(frozen=True)
class OwnedSlice:
    """Elements [start, end) of a flattened parameter whose optimizer state this rank has, to be put into buckets."""

    parameter: torch.nn.Parameter
    start: int
    end: int
    group: dict[str, Any]  # parameter group with lr and weight decay
    # A bucket combines only slices with equal keys: (optimizer in the chain, DDP's buffer, DDP's bucket), or only the
    # optimizer if the gradient is final only at the step's end.
    bucket_key: tuple[int, ...]
    reduced_at_step_end: bool  # whether its gradient is not final when DDP has reduced it
    order: int  # position in the order of first use in the forward pass

    @property
    def weights(self) -> torch.Tensor:
        return self.parameter.detach().view(-1)[self.start : self.end]

    @property
    def grads(self) -> torch.Tensor:
        return self.parameter.main_grad.view(-1)[self.start : self.end]  # type: ignore[attr-defined, no-any-return]


def owned_slices(optimizer: MegatronOptimizer, chunks: Sequence[DistributedDataParallel]) -> list[OwnedSlice]:
    """Return this rank's slices of all parameters in Megatron's optimizers, sorted by first use in the forward pass."""
    named = [(name, parameter) for chunk in chunks for name, parameter in chunk.module.named_parameters()]
    settings, found = get_model_config(chunks[0]), []
    for index, member in enumerate(members(optimizer)):
        if isinstance(member, ExternalWholeOptimizer):
            # There is no signal that their gradients are final before the step's end.
            found += [
                OwnedSlice(parameter, 0, parameter.numel(), param_group, (index,), True, order)
                for order, (_, parameter) in enumerate(named)
                for param_group in member.optimizer.param_groups
                if any(parameter is each for each in param_group["params"]) and not is_off_device(parameter)
            ]
            continue
        if not is_sharded(member) or member.is_stub_optimizer:
            continue
        for order, (name, parameter) in enumerate(named):
            if parameter not in member.model_param_group_index_map:
                continue
            group, _ = member.model_param_group_index_map[parameter]
            buffer, _, bucket = member.model_param_gbuf_map[parameter]
            span = member._get_model_param_range_map(parameter)["param"]
            if span.start < span.end:
                at_end = is_reduced_at_step_end(name, parameter, settings)
                bucket_key = (index,) if at_end else (index, buffer, bucket)
                param_group = member.optimizer.param_groups[group]
                found.append(OwnedSlice(parameter, span.start, span.end, param_group, bucket_key, at_end, order))
    return sorted(found, key=lambda owned: owned.order)


def is_reduced_at_step_end(name: str, parameter: torch.nn.Parameter, settings: Any) -> bool:
    """Whether Megatron's `finalize_model_grads` reduces a parameter's gradient further, after DDP has reduced it."""
    averaged = getattr(parameter, "average_gradients_across_tp_domain", False)
    alike = (settings.sequence_parallel and getattr(parameter, "sequence_parallel", False)) or averaged
    return derived.is_reduced_at_step_end(
        name,
        alike=alike,
        shared=getattr(parameter, "shared_embedding", False),
        tensor=settings.tensor_model_parallel_size,
        pipeline=settings.pipeline_model_parallel_size,
    )


def gate_weights(chunks: Sequence[DistributedDataParallel], gate: Callable[[torch.nn.Parameter], None]) -> None:
    """Register `gate`, to be called with each parameter before the parameter is used.

    That is before a pass reads it, before a step first writes its gradient, and before it is all-gathered.
    """

    def hook(parameters: list[torch.nn.Parameter], adds: bool) -> Callable[..., None]:
        def before_forward(*_: Any) -> None:
            for parameter in parameters:
                gate(parameter)
                if adds:
                    zero_if_old(parameter)

        return before_forward

    for chunk in chunks:
        chunk.gate = gate  # Megatron's DDP has no argument for this; parallel/megatron/grad_buffers.py reads it.
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            group.gate = gate  # Megatron's bucket group has no argument for this, either.
        for owner in owners(chunk.params_with_grad):
            owner.wait_with(gate)
        for module in chunk.module.modules():
            if own := [parameter for parameter in module.parameters(recurse=False) if parameter.requires_grad]:
                module.register_forward_pre_hook(hook(own, adds_by_itself(module)), prepend=True)


def watch_reduced(chunks: Sequence[DistributedDataParallel], reduced: Callable[[Any], None]) -> None:
    """Register `reduced`, to be called with a group of DDP's buckets when the reduction of their gradients starts."""
    for chunk in chunks:
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            group.reduced = reduced  # Megatron's bucket group has no argument for this.
