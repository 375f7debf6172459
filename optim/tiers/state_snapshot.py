"""The optimizer's state as it was at one moment, read bucket by bucket while training goes on."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from memory.completion import Completion
from memory.copy_stream import SAVES
from optim.arrangement.buckets import Bucket
from optim.tiers.buckets import WEIGHT, RecordLayout
from optim.tiers.expert_tier import ExpertTier
from optim.tiers.memory import TierMemory


class StateSnapshot:
    """What a save reads. Any one thread may read and release; a bucket that is not released does not change."""

    def __init__(
        self, memory: TierMemory, layout: RecordLayout, buckets: Sequence[Bucket], experts: ExpertTier | None = None
    ):
        """The main thread's call, between two steps. experts: the weights of buckets off the device."""
        self._memory, self._layout, self._buckets, self._experts = memory, layout, buckets, experts
        # Where each bucket's weights are; what holds padding alone is nobody's.
        of_experts = dict.fromkeys(bucket.of_experts for bucket in buckets if bucket.of_experts is not None)
        self._place_of = {each: place for place, each in enumerate(of_experts)}
        self._weights = None if experts is None else experts.hold(list(of_experts))
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
        bucket = self._buckets[index]
        kinds = self._layout.split(record, bucket.numel)
        if self._experts is not None and bucket.of_experts is not None:
            assert self._weights is not None
            weights = self._weights.read(self._place_of[bucket.of_experts])
            kinds[WEIGHT] = weights.view(self._experts.dtype)[: bucket.numel]
        return kinds

    def release(self, index: int) -> None:
        """It may change."""
        of_experts = self._buckets[index].of_experts
        if self._weights is not None and of_experts is not None:
            self._weights.release(self._place_of[of_experts])
        self._held[index].finish()  # last: whoever waits for it may hold the weights again

    def close(self) -> None:
        """All may."""
        if self._weights is not None:
            self._weights.close()
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
