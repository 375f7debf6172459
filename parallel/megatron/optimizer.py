"""The insides of Megatron-core 0.16.1's optimizers, in one place: members of the chain, slices of the sharded one, the
loss scaler.

Each function says what breaks without it.
"""

from __future__ import annotations

import copy
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import megatron.core.optimizer
import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection

from parallel.megatron import require_version
from parallel.owned import owner_of

require_version()


def build_chain(
    config: OptimizerConfig, chunks: Sequence[DistributedDataParallel], groups: ProcessGroupCollection
) -> MegatronOptimizer:
    """Megatron-core's optimizer of wrapped chunks. Owned parameters (parallel/owned.py) are the last member's, which
    steps them whole. A collective call.

    Without it the sharded optimizer would look for them in DDP's buffers. Groups are still made by Megatron-core, of
    all parameters: its rule for weight decay holds for owned ones, and no rank needs to know whether another has any.
    """
    make, outside = megatron.core.optimizer._get_megatron_optimizer_based_on_param_groups, []

    def make_without_owned(*, param_groups: list[dict[str, Any]], **named: Any) -> MegatronOptimizer:
        for group in param_groups:
            own = [parameter for parameter in group["params"] if owner_of(parameter) is not None]
            if own:
                outside.append({**group, "params": own})
                group["params"] = [parameter for parameter in group["params"] if owner_of(parameter) is None]
        return make(param_groups=param_groups, **named)

    megatron.core.optimizer._get_megatron_optimizer_based_on_param_groups = make_without_owned
    try:
        chain = get_megatron_optimizer(config, chunks, use_gloo_process_groups=False, pg_collection=groups)
    finally:
        megatron.core.optimizer._get_megatron_optimizer_based_on_param_groups = make
    if outside:
        whole = copy.copy(config)
        whole.use_distributed_optimizer = False
        member = make(config=whole, model_chunks=chunks, param_groups=outside, pg_collection=groups)
        chain.chained_optimizers.append(member)
        chain.is_stub_optimizer = False
    return chain


def members(optimizer: MegatronOptimizer) -> list[Any]:
    """The single optimizers inside Megatron's chain (dense parameters, expert parameters)."""
    return optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]


def is_sharded(member: Any) -> bool:
    """Whether a member steps slices of one flat buffer (the distributed optimizer) instead of whole parameters."""
    return isinstance(member, DistributedOptimizer)


@dataclass(frozen=True)
class HeldPart:
    """What this rank's optimizer holds of a parameter: the flat range [start, end), its master weights, who steps it,
    and its state."""

    start: int
    end: int
    main: torch.Tensor
    member: Any

    @property
    def state(self) -> dict[str, Any]:
        return self.member.optimizer.state.get(self.main, {})


def find_held(optimizer: MegatronOptimizer, parameters: Iterable[torch.nn.Parameter]) -> list[HeldPart | None]:
    """For each parameter what this rank's optimizer holds of it; None where another data parallel rank holds it all.

    Without it the state has no names: Megatron's own checkpoint of a sharded optimizer is cut by ranks, and fits no
    other layout.
    """
    plain: dict[int, Any] = {}  # id of a main parameter -> the member that steps all of it
    sharded = []
    for member in members(optimizer):
        if is_sharded(member):
            sharded.append(member)
        elif member.optimizer is not None:
            plain.update({id(main): member for group in member.optimizer.param_groups for main in group["params"]})
    result: list[HeldPart | None] = []
    for parameter in parameters:
        main = getattr(parameter, "main_param", None)
        main = parameter if main is None else main
        found = HeldPart(0, parameter.numel(), main, plain[id(main)]) if id(main) in plain else None
        for member in sharded:
            if parameter in member.model_param_group_index_map:
                group, order = member.model_param_group_index_map[parameter]
                span = member._get_model_param_range_map(parameter)["param"]
                found = HeldPart(span.start, span.end, member.optimizer.param_groups[group]["params"][order], member)
        result.append(found)
    return result


def gradient_of(main: torch.Tensor) -> torch.Tensor | None:
    """The gradient that a stepped tensor has: beside it where that is of another dtype (see
    parallel/megatron/tiered.py)."""
    decoupled: torch.Tensor | None = getattr(main, "decoupled_grad", None)
    return main.grad if decoupled is None else decoupled


@torch.no_grad()
def ready_gradients(
    optimizer: MegatronOptimizer, unscaled: Container[int] = (), overflowed: torch.Tensor | None = None
) -> torch.Tensor | None:
    """Copy the gradients to where they are stepped, in fp16 unscaled; then whether any of this rank's overflowed, more
    than zero on its device. Of those at the addresses `unscaled` this is known: `overflowed`.

    Megatron's `prepare_grads` reads that on the host, once for each member, after a reduction of its own.
    """
    overflows = [] if overflowed is None else [overflowed]
    for member in members(optimizer):
        scaler = getattr(member, "grad_scaler", None)
        if scaler is None:
            member.prepare_grads()
            continue
        member.found_inf.zero_()
        if not member.is_stub_optimizer:
            member._copy_model_grads_to_main_grads()
            grads = [grad for grad in member._collect_main_grad_data_for_unscaling() if grad.data_ptr() not in unscaled]
            torch._amp_foreach_non_finite_check_and_unscale_(grads, member.found_inf, scaler.inv_scale)
        overflows.append(member.found_inf)
    return torch.cat(overflows).sum(dim=0, keepdim=True, dtype=torch.float64) if overflows else None


# ---------------------------------------------------------------------------------------------------------------------
# The fp16 loss scaler
# ---------------------------------------------------------------------------------------------------------------------


def scaler_of(optimizer: MegatronOptimizer) -> Any:
    """The fp16 loss scaler, or None in other precisions."""
    return next(
        (scaler for member in members(optimizer) if (scaler := getattr(member, "grad_scaler", None)) is not None), None
    )


def share_scaler(optimizer: MegatronOptimizer) -> None:
    """Let all members unscale by the scale that the loss is multiplied with.

    Megatron gives each a scaler of its own: once gradients of the experts alone have overflowed, they would be divided
    by half of that scale for ever.
    """
    scaler = scaler_of(optimizer)
    for member in members(optimizer):
        if getattr(member, "grad_scaler", None) is not None:
            member.grad_scaler = scaler


def scaler_numbers(scaler: Any) -> dict[str, float]:
    """The scaler's state. Megatron's own state_dict holds tensors of the device, which a checkpoint's JSON cannot."""
    return {
        "scale": float(scaler._scale),
        "growth_tracker": float(scaler._growth_tracker),
        "hysteresis_tracker": float(scaler._hysteresis_tracker),
    }


def set_scaler_numbers(scaler: Any, numbers: dict[str, float]) -> None:
    """Undo `scaler_numbers`."""
    scaler._scale = torch.full_like(scaler._scale, numbers["scale"])
    scaler._growth_tracker = int(numbers["growth_tracker"])
    scaler._hysteresis_tracker = int(numbers["hysteresis_tracker"])


def scale_and_least(scaler: Any) -> tuple[float, float]:
    """The loss scale as it is now and the lowest that it may fall to."""
    return float(scaler._scale), float(scaler.min_scale)
