"""Units that come to a GPU again and again, in pinned memory of the host, so that a pass reads no file: SE-MoE
(arXiv:2205.10034, section 4) keeps all layers there, and a ring of slots on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from memory.budgets import HOST
from memory.completion import Completion
from memory.host_link import HostLink

SEGMENT = 2**30  # bytes; torch rounds pinned memory up to a power of two, so a segment is one and holds several units


@dataclass
class HostCopy:
    """A unit's memory, and what ends its reading."""

    memory: torch.Tensor
    read: Completion | None = None

    @property
    def must_be_read(self) -> bool:
        """Whether nobody reads it, or has: the reading failed, or was cancelled."""
        return self.read is None or self.read.error is not None


class HostCopies:
    """Keeps units as long as the host has room. Whoever comes first stays: the order of use is a cycle, in which a
    cache of what was used last would hit nothing. `expected`: bytes of all units that may come."""

    def __init__(self, link: HostLink) -> None:
        self.expected = 0
        self._link = link
        self._copies: dict[str, HostCopy] = {}
        self._segments: list[torch.Tensor] = []
        self._used = 0  # bytes of the newest segment
        self._is_full = False

    def of(self, key: str) -> HostCopy | None:
        """The unit's copy, if it has one."""
        return self._copies.get(key)

    def add(self, key: str, num_bytes: int) -> HostCopy | None:
        """Memory for a unit that has none; None where the host has no room."""
        if self._left < num_bytes and not self._is_full:
            self._begin_segment(num_bytes)
        if self._left < num_bytes:
            return None
        memory = self._segments[-1][self._used : self._used + num_bytes]
        self._used += num_bytes
        copy = self._copies[key] = HostCopy(memory)
        return copy

    @property
    def _left(self) -> int:
        """Bytes of the newest segment that nobody has."""
        return self._segments[-1].numel() - self._used if self._segments else 0

    def _begin_segment(self, least: int) -> None:
        wanted = max(least, min(SEGMENT, self.expected - sum(copy.memory.numel() for copy in self._copies.values())))
        size = 1 << (wanted - 1).bit_length()
        while size > HOST.room and size >= 2 * least:
            size //= 2
        segment = self._link.take(size, "weights")
        if segment is None:
            self._is_full = True
        else:
            self._segments.append(segment)
            self._used = 0
