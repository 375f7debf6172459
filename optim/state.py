"""Optimizer state in the model's own terms, so that a checkpoint fits every layout and both optimizer kinds.

Megatron's optimizers keep their state per kind: whole tensors (plain), or slices of one flat buffer that ignore where a
parameter ends (sharded). Neither loads into the other, and a chain of two (dense and expert) not into one. Here each
parameter's state is brought to the parameter's shape and named after it, with the sharding of the model's own
checkpoint: `optimizer.exp_avg.<name>`, `optimizer.exp_avg_sq.<name>` and, in half precision, `optimizer.master.<name>`.
In the sharded optimizer each parameter is collected on one data parallel rank, another one for each parameter, which
writes it; on loading every rank reads the whole parameter and keeps its slice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.optimizer import get_param_id_to_sharded_param_map, make_sharded_optimizer_tensor
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer

from optim.build import members

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass
class _Owned:
    """What this rank's optimizer holds of one parameter: the flat range [start, end), its master weights and state."""

    start: int
    end: int
    main: torch.Tensor
    member: Any

    @property
    def state(self) -> dict[str, Any]:
        return self.member.optimizer.state.get(self.main, {})


def _parameters(chunks: list[torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    for i, chunk in enumerate(chunks):
        for name, parameter in chunk.named_parameters():
            if parameter.requires_grad:
                yield f"{i}.{name}", parameter


def _find_owned(optimizer: MegatronOptimizer, parameters: list[tuple[str, torch.nn.Parameter]]) -> list[_Owned | None]:
    """For each parameter what this rank's optimizer holds of it; None where another data parallel rank holds it all."""
    whole: dict[int, Any] = {}  # plain optimizers: id of a main parameter -> the member that steps it
    sharded = []
    for member in members(optimizer):
        if isinstance(member, DistributedOptimizer):
            sharded.append(member)
        elif member.optimizer is not None:
            whole.update({id(main): member for group in member.optimizer.param_groups for main in group["params"]})
    result: list[_Owned | None] = []
    for _, parameter in parameters:
        main = getattr(parameter, "main_param", None)
        main = parameter if main is None else main
        owned = _Owned(0, parameter.numel(), main, whole[id(main)]) if id(main) in whole else None
        for member in sharded:
            if parameter in member.model_param_group_index_map:
                group, order = member.model_param_group_index_map[parameter]
                held = member._get_model_param_range_map(parameter)["param"]
                owned = _Owned(held.start, held.end, member.optimizer.param_groups[group]["params"][order], member)
        result.append(owned)
    return result


def _data_group(parameter: torch.nn.Parameter) -> dist.ProcessGroup:
    if getattr(parameter, "allreduce", True):
        return parallel_state.get_data_parallel_group(with_context_parallel=True)
    return parallel_state.get_expert_data_parallel_group()


def _kinds(parameter: torch.nn.Parameter) -> tuple[str, ...]:
    return MOMENTS if parameter.dtype == torch.float32 else ("master", *MOMENTS)


def _is_sharded(optimizer: MegatronOptimizer) -> bool:
    return any(isinstance(member, DistributedOptimizer) for member in members(optimizer))


def sharded_state(
    optimizer: MegatronOptimizer, chunks: list[torch.nn.Module], model_state: dict[str, Any], *, loading: bool
) -> dict[str, dict[str, Any]]:
    """Sharded tensors of the optimizer state, by parameter and kind, for Megatron's dist_checkpointing.

    `model_state` is the sharded state dict of the same chunks. With `loading`, tensors to be filled; else the state
    itself (zeros before the first step), on the host. A collective call: every rank of the job makes it.
    """
    parameters = list(_parameters(chunks))
    sharded_by_id = get_param_id_to_sharded_param_map(model_state, (parameter for _, parameter in parameters))
    sharded = _is_sharded(optimizer)
    result: dict[str, dict[str, Any]] = {}
    for i, ((name, parameter), owned) in enumerate(zip(parameters, _find_owned(optimizer, parameters), strict=True)):
        group = _data_group(parameter)
        writer = i % group.size()
        for kind in _kinds(parameter):
            if loading:
                value = torch.zeros(parameter.shape, dtype=torch.float32)
            else:
                value = torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device)
                if owned is not None:
                    part = owned.main if kind == "master" else owned.state.get(kind)
                    if part is not None:
                        value.view(-1)[owned.start : owned.end] = part.detach().view(-1)
                if sharded and group.size() > 1:
                    dist.reduce(value, dist.get_global_rank(group, writer), group=group)
                    if group.rank() != writer:
                        continue
                value = value.cpu()
            tensor = make_sharded_optimizer_tensor(sharded_by_id[i], value, f"optimizer.{kind}")
            if sharded and not loading:
                tensor = _as_only_copy(tensor)
            result.setdefault(name, {})[kind] = tensor
    return result


def _as_only_copy(tensor: Any) -> Any:
    # The last entry of Megatron's replica ids is the data parallel rank; the writer stands for all of them.
    return replace(tensor, replica_id=(*tensor.replica_id[:-1], 0))


@torch.no_grad()
def restore(optimizer: MegatronOptimizer, chunks: list[torch.nn.Module], loaded: dict[str, dict[str, torch.Tensor]], steps: int) -> None:
    """Put loaded state (by parameter and kind, whole parameters) into this rank's optimizer; `steps` were taken so far.

    Model weights must be loaded already: half-precision masters are taken from the checkpoint, not from them.
    """
    parameters = list(_parameters(chunks))
    for (name, _), owned in zip(parameters, _find_owned(optimizer, parameters), strict=True):
        if owned is None:
            continue
        if "master" in loaded[name]:
            owned.main.copy_(loaded[name]["master"].view(-1)[owned.start : owned.end].view_as(owned.main))
        if steps == 0:
            continue
        inner = owned.member.optimizer
        state = {
            kind: loaded[name][kind].view(-1)[owned.start : owned.end].to(owned.main.device).view_as(owned.main).clone() for kind in MOMENTS
        }
        if isinstance(inner, torch.optim.AdamW):
            on_device = any(group.get("fused") or group.get("capturable") for group in inner.param_groups)
            state["step"] = torch.tensor(float(steps), dtype=torch.float32, device=owned.main.device if on_device else "cpu")
        inner.state[owned.main] = state
    for member in members(optimizer):
        if member.optimizer is not None and not isinstance(member.optimizer, torch.optim.AdamW):
            for group in member.optimizer.param_groups:  # TransformerEngine and apex count steps per group
                group["step"] = steps


def steps_taken(optimizer: MegatronOptimizer) -> int:
    """Optimizer steps taken so far (fp16 skips some), the same on every rank that holds parameters; 0 before the first."""
    for member in members(optimizer):
        if member.optimizer is None:
            continue
        for group in member.optimizer.param_groups:
            if "step" in group:
                return int(group["step"])
        for state in member.optimizer.state.values():
            if "step" in state:
                return int(state["step"])
    return 0


def scaler_state(optimizer: MegatronOptimizer) -> dict[str, float] | None:
    """The fp16 loss scaler's numbers, or None in other precisions."""
    scaler = getattr(members(optimizer)[0], "grad_scaler", None)
    if scaler is None:
        return None
    return {
        "scale": float(scaler._scale),
        "growth_tracker": float(scaler._growth_tracker),
        "hysteresis_tracker": float(scaler._hysteresis_tracker),
    }


def restore_scaler(optimizer: MegatronOptimizer, saved: dict[str, float] | None) -> None:
    """Undo `scaler_state`; None leaves the initial scale."""
    for member in members(optimizer):
        scaler = getattr(member, "grad_scaler", None)
        if scaler is not None and saved is not None:
            scaler._scale.fill_(saved["scale"])
            scaler._growth_tracker = int(saved["growth_tracker"])
            scaler._hysteresis_tracker = int(saved["hysteresis_tracker"])
