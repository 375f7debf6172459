"""Brings units of weights from files to memory, beside the passes, and waits for them."""

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

from configs.schema import ConfigError
from inference.weights.host_copies import HostCopies
from inference.weights.parts import LocalPart, WeightUnit
from memory.completion import TIMEOUT, Cancelled, Completion, Users, soonest_free
from memory.copy_stream import PASSES
from memory.host_link import HostLink
from models.weight_files.expected import FP32_NAMES

ALIGNMENT = 64  # bytes, of each weight in its unit
SLOW = 10.0  # seconds after which the user hears what is waited for
STAGE_BYTES = 32 * 2**20  # of a table's rows that come at once, where no unit is larger
NUM_STAGES = 2  # pieces of pinned memory between files and a GPU
HUGE_BYTES = 64 * 2**20  # from which memory of the host is asked for in large pages


class WeightFiles(Protocol):
    """What is asked of a reader of logical weights."""

    def fill(self, name: str, target: torch.Tensor, at: tuple[int, ...] | None = None) -> None:
        """Fill a host tensor with the box of a weight that begins at `at`."""

    def file_of(self, name: str) -> Path:
        """The file that a weight lies in, or the first of them."""


@dataclass
class _StagingPiece:
    memory: torch.Tensor
    users: Users = field(default_factory=Users)


def _cancel_too(before: Completion, read: Completion) -> None:
    """Nobody needs what is read for a copy that is left out."""
    if isinstance(before.error, Cancelled):
        read.cancel()


class UnitLoader:
    """Reads units into pieces of memory of the device, as `dtype`."""

    def __init__(self, files: WeightFiles, link: HostLink, dtype: torch.dtype, timeout: float = TIMEOUT) -> None:
        self._files, self._link, self._dtype, self._timeout = files, link, dtype, timeout
        self._stages: list[_StagingPiece] = []
        self.stage_bytes = 0  # of a piece at least: the largest unit's, so that none is pinned in a pass
        self.copies = HostCopies(link)  # beside a GPU
        self._allocated = Completion.already()  # what the device did with the memory that was allocated, before
        self._reading = ""  # what the reading thread is at
        self.bytes_read = 0

    def num_bytes(self, unit: WeightUnit) -> int:
        """Bytes of a unit in memory."""
        return sum(self._padded(part) for part in unit.parts)

    def views(self, unit: WeightUnit, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        """The weights of a unit, by their logical names, in a piece of memory."""
        found, start = {}, 0
        for part in unit.parts:
            dtype = self._dtype_of(part)
            found[part.name] = memory[start : start + part.numel * dtype.itemsize].view(dtype).view(part.shape)
            start += self._padded(part)
        return found

    def load(
        self, unit: WeightUnit, memory: torch.Tensor, free: Sequence[Completion], priority: int, again: bool = False
    ) -> Completion:
        """Bring a unit to memory that is free once all of `free` is over. `again`: it will be wanted again, so beside a
        GPU the host keeps it where it has room."""
        size = self.num_bytes(unit)
        if self._link.device.type == "cpu":
            return self._read(unit, memory, free, priority)
        users: Users | None = None
        copy = self.copies.of(unit.key) or (self.copies.add(unit.key, size) if again else None)
        if copy is None:
            stage = self._stage(size)
            piece, users = stage.memory[:size], stage.users
            read = self._read(unit, piece, users.all(), priority)
            users.add(read)
        else:
            if copy.must_be_read:
                copy.read = self._read(unit, copy.memory, (), priority)
            assert copy.read is not None
            piece, read = copy.memory, copy.read
        target = memory[:size]
        up = self._link.up.submit(
            lambda: target.copy_(piece, non_blocking=True), (read,), size, (self._allocated, *free), priority
        )
        up.when_issued(lambda: _cancel_too(up, read))
        if users is not None:
            users.add(up, size)
        return up

    def _read(self, unit: WeightUnit, memory: torch.Tensor, free: Sequence[Completion], priority: int) -> Completion:
        size = self.num_bytes(unit)
        self.bytes_read += size
        return self._link.read.submit(lambda: self._fill(unit, memory), (), size, free, priority)

    def load_now(self, unit: WeightUnit) -> dict[str, torch.Tensor]:
        """A unit's weights by their logical names, in memory of their own. A table comes in blocks of its rows."""
        memory = self.allocate(self.num_bytes(unit))
        start = 0
        for block in self._blocks(unit):
            self.wait(block, self.load(block, memory[start:], (), PASSES))
            start += self.num_bytes(block)
        return self.views(unit, memory)

    def _blocks(self, unit: WeightUnit) -> list[WeightUnit]:
        """The unit in pieces that are as large as the staging pieces at most, where it is one table."""
        most = max(self.stage_bytes, STAGE_BYTES)
        if len(unit.parts) > 1 or self.num_bytes(unit) <= most:
            return [unit]
        (part,) = unit.parts
        num_rows, row = part.shape[0], self.num_bytes(unit) // part.shape[0]
        size = max(ALIGNMENT, most // row // ALIGNMENT * ALIGNMENT)  # rows, whose bytes are aligned
        starts = range(0, num_rows, size)
        return [WeightUnit(unit.key, (part.rows(start, min(size, num_rows - start)),)) for start in starts]

    def read_rows(self, part: LocalPart, rows: Sequence[int]) -> torch.Tensor:
        """Single rows of a table, `[n, H]` on the host."""
        with torch.inference_mode(False):
            found = torch.empty(len(rows), *part.shape[1:], dtype=self._dtype)
        _, first, held = part.runs[0] if part.runs else (0, 0, part.shape[0])

        def read() -> None:
            self._reading = part.name
            for target, row in zip(found, rows, strict=True):
                if row < held:
                    self._files.fill(part.name, target[None], (first + row, 0))
                else:  # a row that pads the vocabulary
                    target.zero_()

        self.bytes_read += found.nbytes
        self.wait(WeightUnit(part.name, (part,)), self._link.read.submit(read, priority=PASSES))
        return found

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Memory of the device, uint8, that other threads may fill."""
        with torch.inference_mode(False):
            if self._link.device.type == "cpu" and num_bytes >= HUGE_BYTES:
                return _in_huge_pages(num_bytes)
            memory = torch.empty(num_bytes, dtype=torch.uint8, device=self._link.device)
        # The allocator gives memory that the current stream may still be using for somebody else.
        self._allocated = Completion.so_far(self._link.device)
        return memory

    def wait(self, unit: WeightUnit, there: Completion) -> float:
        """What the device is given from now on comes after a unit is there; the seconds that the host waited. Raises
        ConfigError where reading failed or took too long."""
        begin = time.perf_counter()
        try:
            there.order(min(SLOW, self._timeout))
        except TimeoutError:
            name = self._reading or unit.parts[0].name
            said = f"{self._files.file_of(name)}: tensor {name}"
            print(f"waiting for {said} for {SLOW:g} s", file=sys.stderr, flush=True)
            try:
                there.order(self._timeout)
            except TimeoutError as error:
                raise ConfigError(f"{said} was not read within {self._timeout:g} s. Look at its disk") from error
        if there.error is not None:
            raise there.error
        return time.perf_counter() - begin

    def _stage(self, size: int) -> _StagingPiece:
        if not self._stages or self._stages[0].memory.numel() < size:
            for stage in self._stages:  # what is read into it goes on
                for done in stage.users.all():
                    done.wait(self._timeout)
            self._stages = []
            self._stages = [_StagingPiece(self._pinned(max(size, self.stage_bytes))) for _ in range(NUM_STAGES)]
        return self._stages[soonest_free([stage.users for stage in self._stages])]

    def _pinned(self, num_bytes: int) -> torch.Tensor:
        memory = self._link.take(num_bytes, "weights on their way")
        if memory is None:
            raise ConfigError(
                f"the host has no {num_bytes / 2**20:.0f} MiB of memory for weights on their way to the GPU. Free some"
            )
        return memory

    def _fill(self, unit: WeightUnit, memory: torch.Tensor) -> None:
        for part, target in zip(unit.parts, self.views(unit, memory).values(), strict=True):
            self._reading = part.name
            if not part.runs:
                self._files.fill(part.name, target)
                continue
            if sum(length for _, _, length in part.runs) < part.shape[part.dim]:
                target.zero_()  # rows that pad the vocabulary
            for here, there, length in part.runs:
                if length:
                    at = [0] * len(part.shape)
                    at[part.dim] = there
                    self._files.fill(part.name, target.narrow(part.dim, here, length), tuple(at))

    def _dtype_of(self, part: LocalPart) -> torch.dtype:
        return torch.float32 if part.name.endswith(FP32_NAMES) else self._dtype

    def _padded(self, part: LocalPart) -> int:
        return -(-part.numel * self._dtype_of(part).itemsize // ALIGNMENT) * ALIGNMENT


def _in_huge_pages(num_bytes: int) -> torch.Tensor:
    """Memory of the host, uint8, in pages of 2 MiB where the kernel has them: in small ones the first use of 17 GB of
    slots costs a quarter of a minute."""
    memory = mmap.mmap(-1, num_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
