"""The optimizer's state as it was at one moment, read bucket by bucket while training goes on."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from memory.completion import Completion
from memory.copy_stream import SAVES
from optim.tiers.buckets import RecordLayout
from optim.tiers.memory import TierMemory


class StateSnapshot:
    """What a save reads. Any one thread may read and release; a bucket that is not released does not change."""

    def __init__(self, memory: TierMemory, layout: RecordLayout, numels: Sequence[int]):
        """The main thread's call, between two steps."""
        self._memory, self._layout, self._numels = memory, layout, numels
        off = [index for index, tier in enumerate(memory.arrangement.tiers) if tier != "device"]
        self._stored = {index: place for place, index in enumerate(off)}
        self._hold = memory.store.hold(off, memory.buffer)
        self._so_far = Completion.so_far(memory.link.device)
        self._held = [
            self._hold.held[self._stored[index]] if index in self._stored else memory.hold_resident(index)
            for index in range(len(memory.arrangement.tiers))
        ]

    def read(self, index: int) -> dict[str, torch.Tensor]:
        """A bucket's state by kind, flat tensors of the host, until the next `read` or its release. Raises what its
        last change raised."""
        if index in self._stored:
            record = self._hold.read(self._stored[index])
        else:
            record, resident = self._memory.buffer, self._memory.resident[index]
            assert resident is not None
            size = resident.numel()
            done = self._memory.link.down.submit(
                lambda: record[:size].copy_(resident, non_blocking=True), (self._so_far,), priority=SAVES
            )
            done.wait()
            if done.error is not None:
                raise done.error
        return self._layout.split(record, self._numels[index])

    def release(self, index: int) -> None:
        """It may change."""
        self._held[index].finish()

    def close(self) -> None:
        """All may."""
        for held in self._held:
            held.finish()

    @property
    def is_over(self) -> bool:
        """Whether all are released."""
        return all(held.is_issued for held in self._held)

    def wait(self) -> None:
        """Until all are released. Raises TimeoutError."""
        for held in self._held:
            held.wait()
