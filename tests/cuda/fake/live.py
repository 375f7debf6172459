"""How many bytes of the device are in use: those of every storage, from its first tensor to its last.

They are not rounded up to what an allocator hands out. Of what one kernel does only its results count.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary


class Live:
    """`now`, and the most that there were since `restart`: of what was made since `forget`."""

    def __init__(self) -> None:
        self.now = self.peak = 0
        self._seen: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._inside = self._epoch = 0

    def forget(self) -> None:
        """What is there is another run's, some of it in caches of Megatron-core's classes."""
        self.now = self.peak = 0
        self._epoch += 1

    def restart(self) -> None:
        """From now on."""
        self.peak = self.now

    def see(self, result: Any) -> None:
        """An operation has given this."""
        if self._inside:
            return
        for leaf in tree_leaves(result):
            if isinstance(leaf, FakeTensor) and leaf.fake_device.type == "cuda":
                storage = leaf.untyped_storage()
                if storage not in self._seen:
                    self._seen[storage] = None
                    self.now += storage.nbytes()
                    self.peak = max(self.peak, self.now)
                    weakref.finalize(storage, self._gone, storage.nbytes(), self._epoch).atexit = False

    @contextlib.contextmanager
    def kernel(self) -> Iterator[None]:
        """What is made inside never leaves the multiprocessors; the results are to be shown to `see`."""
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1

    def _gone(self, num_bytes: int, epoch: int) -> None:
        if epoch == self._epoch:
            self.now -= num_bytes


LIVE = Live()
