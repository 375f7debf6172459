"""Memory of the host that gradients of experts pass through, one micro-batch's at a time, before the host adds them up
(expert_tier.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from memory.completion import Completion, Users, soonest_free
from memory.copy_stream import LAYERS
from memory.host_link import HostLink

STAGES = 2  # one is filled while the host reads the other


@dataclass
class GradStage:
    """Room for a micro-batch's gradient of a layer, in the weights' dtype; and for that of an expert's copy, which came
    home in fp32."""

    flat: torch.Tensor
    record: torch.Tensor
    users: Users = field(default_factory=Users)


class GradStages:
    """The stages of one rank."""

    def __init__(self, link: HostLink, numel: int, arrived_numel: int, dtype: torch.dtype):
        """numel: of a layer's gradient; arrived_numel: of an expert's, where copies' gradients come home, or 0."""
        self._link = link
        self.num_bytes = 0  # that left so far
        size, arrived_size = numel * dtype.itemsize, arrived_numel * torch.float32.itemsize
        self._stages = [
            GradStage(link.allocate(size).zero_().view(dtype), link.allocate(arrived_size).view(torch.float32))
            for _ in range(STAGES)
        ]

    def next(self) -> GradStage:
        """The one that is free first."""
        return self._stages[soonest_free([each.users for each in self._stages])]

    def leave(self, stage: GradStage, memory: torch.Tensor, grad: torch.Tensor) -> Completion:
        """Have a flat gradient leave the device for a stage's memory."""
        on_gpu = self._link.device.type == "cuda"

        def work() -> None:
            memory.copy_(grad, non_blocking=True)
            if on_gpu:
                grad.record_stream(torch.cuda.current_stream())  # not used again before it has left

        so_far = Completion.so_far(self._link.device)
        self.num_bytes += grad.nbytes
        return self._link.down.submit(work, (so_far,), grad.nbytes, free=stage.users.all(), priority=LAYERS)


def adding(target: torch.Tensor, parts: Sequence[tuple[torch.Tensor, int]], over: bool) -> Callable[[], None]:
    """Work that adds parts to a record, each from where it begins there on, or writes them over it."""

    def work() -> None:
        for part, start in parts:
            there = target[start : start + part.numel()]
            there.copy_(part) if over else there.add_(part)

    return work
