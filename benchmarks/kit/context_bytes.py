"""The bytes that context ranks send each other in a step, counted at torch.distributed's calls."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class ContextBytes(TorchDispatchMode):
    """Adds up the messages that this rank sends to others of the context group."""

    def __init__(self, context: dist.ProcessGroup) -> None:
        super().__init__()
        self.sent = 0
        self._name = context.group_name

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(function) == "c10d.send.default" and self._name in _names(args):
            self.sent += sum(leaf.nbytes for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor))
        return function(*args, **(kwargs or {}))


def _names(args: Any) -> list[str]:
    """Return the names of the process groups among an operation's arguments."""
    return [
        dist.ProcessGroup.unbox(leaf).group_name
        for leaf in tree_leaves(args)
        if isinstance(leaf, torch.ScriptObject) and "ProcessGroup" in str(leaf._type())
    ]
