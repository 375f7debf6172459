"""The bytes that context ranks send each other in a step, counted at torch.distributed's calls."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

EXCHANGES = ("alltoall_base_", "alltoall_")


class ContextBytes(TorchDispatchMode):
    """Adds up what this rank sends to others in all-to-alls of other groups than the experts'."""

    def __init__(self, experts: dist.ProcessGroup) -> None:
        super().__init__()
        self.sent = 0
        self._experts = experts.group_name

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = str(function).removesuffix(".default").partition(".")
        if namespace == "c10d" and name in EXCHANGES:
            (group,) = (
                dist.ProcessGroup.unbox(leaf)
                for leaf in tree_leaves(args)
                if isinstance(leaf, torch.ScriptObject) and "ProcessGroup" in str(leaf._type())
            )
            if group.group_name != self._experts:
                self.sent += _to_others(args[1], args[4] if name == "alltoall_base_" else [], group)
        return function(*args, **(kwargs or {}))


def _to_others(given: Any, splits: list[int], group: dist.ProcessGroup) -> int:
    """given: the parts for each rank, or all of them in one tensor, cut by rows."""
    if isinstance(given, torch.Tensor):
        rows = splits or [given.size(0) // group.size()] * group.size()
        assert sum(rows) == given.size(0)
        given = given.split(rows)
    return sum(part.nbytes for number, part in enumerate(given) if number != group.rank())
