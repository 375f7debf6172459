"""Memory of the pretended device: how much is alive, and who still uses what is given back.

Memory is a storage on the host that a `DeviceTensor` has held. torch's allocator hands it to the next one who asks as
soon as the last tensor is gone, unless `record_stream` told it of a stream that still uses it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from tests.cuda.pretended import order
from tests.cuda.pretended.observed import OBSERVED, call_site

_alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
_uses: dict[int, list[Use]] = {}
_recorded: dict[int, set[int]] = {}  # the streams that the allocator knows of, by their number


class Bytes:
    """Of the storages that are alive, and the most that have been at a time since `start`."""

    now = peak = 0

    @classmethod
    def add(cls, count: int) -> None:
        cls.now += count
        cls.peak = max(cls.peak, cls.now)


class Use:
    """A tensor that queued work of a stream or an exchange will read or write: `user` says which. It does not keep the
    memory alive."""

    def __init__(self, host: torch.Tensor, user: str) -> None:
        storage = host.untyped_storage()
        self.user, self._key, self._storage = user, storage._cdata, weakref.ref(storage)
        self._range = order.byte_range(host)
        self._geometry = host.storage_offset(), host.size(), host.stride()
        self._like = host.new_empty(0)
        self._kept: torch.UntypedStorage | None = None
        _uses.setdefault(self._key, []).append(self)

    def keep(self) -> None:
        """The allocator knows of this use, or the memory is not the allocator's."""
        self._kept = self._storage()

    def is_of(self, host: torch.Tensor) -> bool:
        return self._key == host.untyped_storage()._cdata

    def overlaps(self, begin: int, end: int) -> bool:
        """With a range of its storage."""
        return self._range[0] < end and begin < self._range[1]

    def tensor(self) -> torch.Tensor | None:
        """The numbers; None where the memory is gone."""
        storage = self._storage()
        return None if storage is None else self._like.new_empty(0).set_(storage, *self._geometry)

    def keep_if_recorded(self, stream: int) -> None:
        if stream in _recorded.get(self._key, ()):
            self.keep()

    def end(self) -> None:
        """It has been read or written."""
        uses = _uses.get(self._key, [])
        if self in uses:
            uses.remove(self)
            if not uses:
                del _uses[self._key]
        self._kept = None


def made(host: torch.Tensor) -> None:
    """A device tensor holds this memory."""
    storage = host.untyped_storage()
    key, count = storage._cdata, storage.nbytes()
    if key in _alive:
        return

    def given_back(_: object) -> None:
        del _alive[key]
        Bytes.add(-count)
        users = {use.user for use in _uses.pop(key, [])}
        for user in users.union(order.users_at_end(key, _recorded.pop(key, set()))):
            OBSERVED.fault(f"{user} still used memory that was given back in {call_site()}")

    order.start(storage)
    _alive[key] = weakref.ref(storage, given_back)
    Bytes.add(count)


def is_used(host: torch.Tensor, besides: Sequence[Use]) -> bool:
    """Whether something else that is queued will read this memory, or write to it."""
    span, uses = order.byte_range(host), _uses.get(host.untyped_storage()._cdata, ())
    return any(use.overlaps(*span) for use in uses if use not in besides)


def record(host: torch.Tensor, stream: int) -> None:
    """Tell the allocator of a stream, by its number."""
    _recorded.setdefault(host.untyped_storage()._cdata, set()).add(stream)


def start() -> None:
    """A new run begins: its peak is counted from here."""
    _uses.clear()
    Bytes.peak = Bytes.now
