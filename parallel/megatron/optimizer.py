"""Access to Megatron-core 0.16.1's optimizers: members of a chain, shards of the sharded one, the fp16 loss scaler."""

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
    """Build Megatron-core's optimizer of wrapped model chunks. Its last member updates owned parameters. A collective
    call.

    Without this, the sharded optimizer would look for owned parameters in DDP's buffers. Megatron-core still forms the
    groups of all parameters, so its rule for weight decay applies to owned ones too.
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
    """Return the single optimizers in Megatron's chain, for dense and for expert parameters."""
    return optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]


def is_sharded(member: Any) -> bool:
    """Whether an optimizer updates slices of a flat buffer (the distributed optimizer) instead of whole parameters."""
    return isinstance(member, DistributedOptimizer)


@dataclass(frozen=True)
class HeldShard:
    """This rank's shard of a parameter in the optimizer: elements [start, end) of the flattened parameter, their master
    weights (`main`), the optimizer in the chain that updates them (`member`), and their state."""

    start: int
    end: int
    main: torch.Tensor
    member: Any

    @property
    def state(self) -> dict[str, Any]:
        return self.member.optimizer.state.get(self.main, {})


def find_held(optimizer: MegatronOptimizer, parameters: Iterable[torch.nn.Parameter]) -> list[HeldShard | None]:
    """Return this rank's shard of each parameter, or None if another data-parallel rank has the whole parameter.

    Without this, optimizer state has no names: Megatron's checkpoints cannot be loaded in a different layout.
    """
    plain: dict[int, Any] = {}  # id of a main parameter -> the member that steps all of it
    sharded = []
    for member in members(optimizer):
        if is_sharded(member):
            sharded.append(member)
        elif member.optimizer is not None:
            plain.update({id(main): member for group in member.optimizer.param_groups for main in group["params"]})
    result: list[HeldShard | None] = []
    for parameter in parameters:
        main = getattr(parameter, "main_param", None)
        main = parameter if main is None else main
        found = HeldShard(0, parameter.numel(), main, plain[id(main)]) if id(main) in plain else None
        for member in sharded:
            if parameter in member.model_param_group_index_map:
                group, order = member.model_param_group_index_map[parameter]
                span = member._get_model_param_range_map(parameter)["param"]
                found = HeldShard(span.start, span.end, member.optimizer.param_groups[group]["params"][order], member)
        result.append(found)
    return result


def gradient_of(main: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient of a tensor that the optimizer updates: `decoupled_grad` if there is one, else `grad`."""
    decoupled: torch.Tensor | None = getattr(main, "decoupled_grad", None)
    return main.grad if decoupled is None else decoupled


@torch.no_grad()
def ready_gradients(
    optimizer: MegatronOptimizer, unscaled: Container[int] = (), overflowed: torch.Tensor | None = None
) -> torch.Tensor | None:
    """Copy gradients to the tensors that the optimizer updates, unscaled in fp16. Returns the number of overflows.

    `unscaled`: addresses of gradients that are unscaled already; `overflowed`: the number of overflows among them.
    Megatron's `prepare_grads` would read the number on the host, once per optimizer, after a separate reduction.
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


def scaler_of(optimizer: MegatronOptimizer) -> Any:
    """Return the fp16 loss scaler, or None in other precisions."""
    return next((scaler for m in members(optimizer) if (scaler := getattr(m, "grad_scaler", None)) is not None), None)


def share_scaler(optimizer: MegatronOptimizer) -> None:
    """Make all optimizers of the chain unscale gradients with the scale that multiplies the loss.

    Each has its own scaler: after an overflow in only the experts' gradients, their scale would differ forever.
    """
    scaler = scaler_of(optimizer)
    for member in members(optimizer):
        if getattr(member, "grad_scaler", None) is not None:
            member.grad_scaler = scaler  # Megatron has no argument for a shared scaler.


def loss_scale(optimizer: MegatronOptimizer) -> tuple[float, float]:
    """Return the current fp16 loss scale and its minimum."""
    scaler = scaler_of(optimizer)
    return float(scaler._scale), float(scaler.min_scale)


def scaler_state(optimizer: MegatronOptimizer) -> dict[str, float] | None:
    """Return the fp16 loss scaler's state as numbers, which JSON can store, or None in other precisions."""
    if (scaler := scaler_of(optimizer)) is None:
        return None
    return {
        "scale": float(scaler._scale),
        "growth_tracker": float(scaler._growth_tracker),
        "hysteresis_tracker": float(scaler._hysteresis_tracker),
    }


def restore_scaler(optimizer: MegatronOptimizer, saved: dict[str, float] | None) -> None:
    """Set the fp16 loss scaler to the numbers of `scaler_state`. None leaves the initial scale."""
    if saved is not None and (scaler := scaler_of(optimizer)) is not None:
        scaler._scale = torch.full_like(scaler._scale, saved["scale"])
        scaler._growth_tracker = int(saved["growth_tracker"])
        scaler._hysteresis_tracker = int(saved["hysteresis_tracker"])
