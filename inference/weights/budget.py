"""How much memory a model's weights, its cache and its passes may take."""

from __future__ import annotations

import torch
import torch.distributed as dist

from configs.ranks import launched
from inference.weights.plan import MIB, BudgetTooSmall
from memory import host_memory

SHARE = 0.8  # of what is free, where nobody limits it
LEFT_IN_GROUP = 0.95  # of what a control group leaves
OF_ADDRESSES = 0.6  # of what `ulimit -v` leaves: threads reserve addresses that they never use


def memory_budget(given: float | None, device: torch.device) -> float:
    """Bytes for this rank: `given` MiB; else 95% of what the control groups leave, or 80% of what is free, of the host
    or the GPU, shared by the ranks of this node; and 60% of what the process's own limit leaves."""
    if given is not None:
        return given * MIB
    if device.type == "cuda":
        return SHARE * torch.cuda.mem_get_info(device)[0]
    launch = launched()
    ranks = launch.local_world_size or launch.world_size
    group, addresses = host_memory.left_by_cgroups(), host_memory.left_of_addresses()
    shared = [SHARE * host_memory.free(), *([] if group is None else [LEFT_IN_GROUP * group])]
    return min([min(shared) / ranks, *([] if addresses is None else [OF_ADDRESSES * addresses])])


def refuse_together(problem: BudgetTooSmall | None) -> None:
    """Raise BudgetTooSmall on every rank where a budget is too small for one: what the rank that wants most says. A
    collective call."""
    if dist.get_world_size() == 1:
        if problem is not None:
            raise problem
        return
    found: list[tuple[int, str]] = [(0, "")] * dist.get_world_size()
    dist.all_gather_object(found, (0, "") if problem is None else (problem.wanted, str(problem)))
    wanted, rank = max((wanted, -rank) for rank, (wanted, _) in enumerate(found))
    if wanted:
        raise BudgetTooSmall(f"{found[-rank][1]} (rank {-rank})", wanted)
