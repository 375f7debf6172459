"""Which all-to-all the layers use: one object of a kind for each group, shared by its layers."""

from __future__ import annotations

import weakref

import torch.distributed as dist

from configs.schema import ConfigError
from moe.alltoall.flat import AllToAll, FlatAllToAll
from moe.alltoall.hierarchical import HierarchicalAllToAll, ranks_per_node

_made: weakref.WeakValueDictionary[tuple[int, str], FlatAllToAll | HierarchicalAllToAll] = weakref.WeakValueDictionary()


def shared(group: dist.ProcessGroup, kind: str) -> AllToAll:
    """The exchange `kind` (flat or hierarchical) of a group, made at the first call; all its ranks call this alike.

    Raises ConfigError where ranks do not share nodes evenly, or all share one, so that there is no hierarchy.
    """
    made = _made.get((id(group), kind))
    if made is None or made.group is not group:
        made = FlatAllToAll(group) if kind == "flat" else _hierarchical(group)
        _made[id(group), kind] = made
    return made


def kinds(group: dist.ProcessGroup) -> list[str]:
    """Names of the all-to-alls that make sense for a group. Collective."""
    return ["flat"] if _mates(group) is None else ["flat", "hierarchical"]


def _mates(group: dist.ProcessGroup) -> int | None:
    mates = ranks_per_node(group)
    return mates if mates is not None and 1 < mates < group.size() else None


def _hierarchical(group: dist.ProcessGroup) -> HierarchicalAllToAll:
    mates = _mates(group)
    if mates is None:
        raise ConfigError(
            "moe.all_to_all (hierarchical) needs an expert parallel group with several ranks on each of several nodes, "
            f"evenly; this one has {group.size()} ranks. Try moe.all_to_all=flat."
        )
    return HierarchicalAllToAll(group, mates)
