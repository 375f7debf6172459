"""Loader of weights from files to device memory, in the background of the forward passes.

With a GPU, weights that are loaded in every pass are kept in pinned host memory, so that a pass reads no file: SE-MoE
(arXiv:2205.10034, section 4) keeps all layers there, and a ring of slots on the device.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from base.errors import ConfigError
from inference.weights.rank_weights import LocalShard, WeightUnit
from memory.budgets import HOST
from memory.completion import TIMEOUT, Cancelled, Completion, Users, soonest_free
from memory.copy_stream import PASSES
from memory.host_link import HostLink
from models.weight_files.expected import FP32_NAMES

ALIGNMENT = 64  # bytes, of each weight in its unit
SLOW = 10.0  # seconds of waiting before a message names the tensor
STAGE_BYTES = 32 * 2**20  # bytes of the blocks in which a table is loaded, if no unit is larger
NUM_STAGES = 2  # buffers of pinned memory between files and a GPU
HUGE_BYTES = 64 * 2**20  # from this size on, host memory is allocated in large pages
SEGMENT = 2**30  # bytes of pinned memory, which torch rounds up to a power of two; holds several units


class WeightFiles(Protocol):
    """Protocol of a reader of weights by their logical names."""

    def fill(self, name: str, target: torch.Tensor, at: tuple[int, ...] | None = None) -> None:
        """Fill a host tensor with the part of a weight that begins at the indices `at`."""

    def file_of(self, name: str) -> Path:
        """Return the (first) file that contains a weight."""


@dataclass
class HostCopy:
    """Host memory of a unit of weights, and the completion of the read from the files."""

    memory: torch.Tensor
    read: Completion | None = None

    @property
    def must_be_read(self) -> bool:
        """Whether a read of the unit must be enqueued: there was none, or the last one failed or was cancelled."""
        return self.read is None or self.read.error is not None


class HostCopies:
    """Pinned host copies of units of weights, added while the host has free memory and never evicted: units are used in
    a cycle, in which an LRU cache would never hit. `expected`: bytes of all units that may be added."""

    def __init__(self, link: HostLink) -> None:
        self.expected = 0
        self._link = link
        self._by_key: dict[str, HostCopy] = {}
        self._segments: list[torch.Tensor] = []
        self._used = 0  # bytes of the newest segment that are used
        self._is_full = False

    def find(self, key: str) -> HostCopy | None:
        """Return the copy of a unit of weights in host memory, or None."""
        return self._by_key.get(key)

    def add(self, key: str, num_bytes: int) -> HostCopy | None:
        """Return newly reserved host memory for a unit of weights, or None if the host has no free memory."""
        if self._left < num_bytes and not self._is_full:
            self._begin_segment(num_bytes)
        if self._left < num_bytes:
            return None
        memory = self._segments[-1][self._used : self._used + num_bytes]
        self._used += num_bytes
        added = self._by_key[key] = HostCopy(memory)
        return added

    @property
    def _left(self) -> int:
        """Unused bytes of the newest segment of pinned memory."""
        return self._segments[-1].numel() - self._used if self._segments else 0

    def _begin_segment(self, least: int) -> None:
        wanted = max(least, min(SEGMENT, self.expected - sum(each.memory.numel() for each in self._by_key.values())))
        size = 1 << (wanted - 1).bit_length()
        while size > HOST.headroom and size >= 2 * least:
            size //= 2
        segment = self._link.take(size, "weights")
        if segment is None:
            self._is_full = True
        else:
            self._segments.append(segment)
            self._used = 0


@dataclass
class _StagingBuffer:
    memory: torch.Tensor
    users: Users = field(default_factory=Users)


class UnitLoader:
    """Loader of units of weights (such as an expert, or a layer's attention) into device memory, as `dtype`."""

    def __init__(self, files: WeightFiles, link: HostLink, dtype: torch.dtype, timeout: float = TIMEOUT) -> None:
        self._files, self._link, self._dtype, self._timeout = files, link, dtype, timeout
        self._stages: list[_StagingBuffer] = []
        self.stage_bytes = 0  # least size of a buffer: the largest unit's, so that no memory is pinned in a pass
        self.host_copies = HostCopies(link)  # used with a GPU
        self._allocated = Completion.already()  # the device's earlier uses of newly allocated memory
        self._reading = ""  # name of the tensor that the reading thread reads
        self.bytes_read = 0

    def num_bytes(self, unit: WeightUnit) -> int:
        """Return the bytes of a unit of weights in memory, with the padding of each weight."""
        return sum(self._padded(shard) for shard in unit.shards)

    def views(self, unit: WeightUnit, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the weights of a unit as views of `memory`, by logical name."""
        found, start = {}, 0
        for shard in unit.shards:
            dtype = self._dtype_of(shard)
            found[shard.name] = memory[start : start + shard.numel * dtype.itemsize].view(dtype).view(shard.shape)
            start += self._padded(shard)
        return found

    def load(
        self, unit: WeightUnit, memory: torch.Tensor, free: Sequence[Completion], priority: int, again: bool = False
    ) -> Completion:
        """Enqueue the load of a unit into `memory` after all completions in `free` are done; return the completion of
        the load.

        again: whether the unit will be loaded again, so that on a GPU machine the host keeps a copy if it has memory.
        """
        size = self.num_bytes(unit)
        if self._link.device.type == "cpu":
            return self._read(unit, memory, free, priority)
        users: Users | None = None
        kept = self.host_copies.find(unit.key) or (self.host_copies.add(unit.key, size) if again else None)
        if kept is None:
            stage = self._stage(size)
            source, users = stage.memory[:size], stage.users
            read = self._read(unit, source, users.all(), priority)
            users.add(read)
        else:
            if kept.must_be_read:
                kept.read = self._read(unit, kept.memory, (), priority)
            assert kept.read is not None
            source, read = kept.memory, kept.read
        target = memory[:size]
        up = self._link.up.submit(
            lambda: target.copy_(source, non_blocking=True), (read,), size, (self._allocated, *free), priority
        )

        def cancel_read() -> None:
            if isinstance(up.error, Cancelled):
                read.cancel()

        up.when_issued(cancel_read)
        if users is not None:
            users.add(up, size)
        return up

    def _read(self, unit: WeightUnit, memory: torch.Tensor, free: Sequence[Completion], priority: int) -> Completion:
        size = self.num_bytes(unit)
        self.bytes_read += size
        return self._link.read.submit(lambda: self._fill(unit, memory), (), size, free, priority)

    def load_now(self, unit: WeightUnit) -> dict[str, torch.Tensor]:
        """Load a unit into new device memory, a table in blocks of rows; return its tensors by logical name."""
        memory = self.allocate(self.num_bytes(unit))
        start = 0
        for block in self._blocks(unit):
            self.wait(block, self.load(block, memory[start:], (), PASSES))
            start += self.num_bytes(block)
        return self.views(unit, memory)

    def _blocks(self, unit: WeightUnit) -> list[WeightUnit]:
        """Split a unit that is one table into blocks of rows that fit into a staging buffer."""
        most = max(self.stage_bytes, STAGE_BYTES)
        if len(unit.shards) > 1 or self.num_bytes(unit) <= most:
            return [unit]
        (shard,) = unit.shards
        num_rows, row = shard.shape[0], self.num_bytes(unit) // shard.shape[0]
        size = max(ALIGNMENT, most // row // ALIGNMENT * ALIGNMENT)  # rows, whose bytes are aligned
        starts = range(0, num_rows, size)
        return [WeightUnit(unit.key, (shard.row_slice(start, min(size, num_rows - start)),)) for start in starts]

    def read_rows(self, shard: LocalShard, indices: Sequence[int]) -> torch.Tensor:
        """Read single rows of a table from its file, `[n, H]` on the host."""
        with torch.inference_mode(False):
            found = torch.empty(len(indices), *shard.shape[1:], dtype=self._dtype)
        _, first, held = shard.runs[0] if shard.runs else (0, 0, shard.shape[0])

        def read() -> None:
            self._reading = shard.name
            for target, row in zip(found, indices, strict=True):
                if row < held:
                    self._files.fill(shard.name, target[None], (first + row, 0))
                else:  # a row that pads the vocabulary
                    target.zero_()

        self.bytes_read += found.nbytes
        self.wait(WeightUnit(shard.name, (shard,)), self._link.read.submit(read, priority=PASSES))
        return found

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Allocate device memory, uint8, that loading threads may fill."""
        with torch.inference_mode(False):
            if self._link.device.type == "cpu" and num_bytes >= HUGE_BYTES:
                return _in_huge_pages(num_bytes)
            memory = torch.empty(num_bytes, dtype=torch.uint8, device=self._link.device)
        # The current stream may still use the memory that the allocator returns.
        self._allocated = Completion.so_far(self._link.device)
        return memory

    def wait(self, unit: WeightUnit, there: Completion) -> float:
        """Make the device's next operations wait for the load of a unit, and return the seconds that the host waited.
        Raises ConfigError if the read failed or timed out."""
        begin = time.perf_counter()
        try:
            there.order(min(SLOW, self._timeout))
        except TimeoutError:
            name = self._reading or unit.shards[0].name
            tensor = f"{self._files.file_of(name)}: tensor {name}"
            print(f"waiting for {tensor} for {SLOW:g} s", file=sys.stderr, flush=True)
            try:
                there.order(self._timeout)
            except TimeoutError as error:
                raise ConfigError(
                    f"{tensor} was not read within {self._timeout:g} s. Check the disk of this file."
                ) from error
        if there.error is not None:
            raise there.error
        return time.perf_counter() - begin

    def _stage(self, size: int) -> _StagingBuffer:
        if not self._stages or self._stages[0].memory.numel() < size:
            for stage in self._stages:  # wait for its reads and transfers
                for done in stage.users.all():
                    done.wait(self._timeout)
            self._stages = []
            self._stages = [_StagingBuffer(self._pinned(max(size, self.stage_bytes))) for _ in range(NUM_STAGES)]
        return self._stages[soonest_free([stage.users for stage in self._stages])]

    def _pinned(self, num_bytes: int) -> torch.Tensor:
        memory = self._link.take(num_bytes, "weights in transfer")
        if memory is None:
            raise ConfigError(
                f"the host has less than {num_bytes / 2**20:.0f} MiB of free memory, which buffers between files and "
                "GPU need. End other processes."
            )
        return memory

    def _fill(self, unit: WeightUnit, memory: torch.Tensor) -> None:
        for shard, target in zip(unit.shards, self.views(unit, memory).values(), strict=True):
            self._reading = shard.name
            if not shard.runs:
                self._files.fill(shard.name, target)
                continue
            if sum(length for _, _, length in shard.runs) < shard.shape[shard.dim]:
                target.zero_()  # rows that pad the vocabulary
            for here, there, length in shard.runs:
                if length:
                    at = [0] * len(shard.shape)
                    at[shard.dim] = there
                    self._files.fill(shard.name, target.narrow(shard.dim, here, length), tuple(at))

    def _dtype_of(self, shard: LocalShard) -> torch.dtype:
        return torch.float32 if shard.name.endswith(FP32_NAMES) else self._dtype

    def _padded(self, shard: LocalShard) -> int:
        return -(-shard.numel * self._dtype_of(shard).itemsize // ALIGNMENT) * ALIGNMENT


def _in_huge_pages(num_bytes: int) -> torch.Tensor:
    """Allocate host memory, uint8, in 2 MiB pages if possible: small pages cost 15 s for 17 GB at first use."""
    memory = mmap.mmap(-1, num_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
