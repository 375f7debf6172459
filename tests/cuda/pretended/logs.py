"""What each communicator was told to do, rank by rank, and whether NCCL could come to its end.

NCCL runs a communicator's operations one after the other in the order of their issue. A collective needs the same one
of every rank; a batch of sends and receives needs each one's other end. So two ranks that issue in another order wait
for each other forever: on a real GPU a hang, which need not show over gloo.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Key = tuple[str, tuple[int, ...]]  # of a communicator: its name and its ranks in the world
End = tuple[int, int, str]  # of a message: the other rank in the group, numbers, dtype


@dataclass(frozen=True)
class Operation:
    """A collective, whose `what` is the same on every rank; or a batch of messages, whose `what` is None. An all-to-all
    is a collective with messages."""

    name: str
    what: Any
    call_site: str
    sends: tuple[End, ...] = ()
    receives: tuple[End, ...] = ()

    def __str__(self) -> str:
        words = [self.name] if self.what is None else [f"{self.name} {self.what}"]
        words += [f"{count} {dtype} to {peer}" for peer, count, dtype in self.sends]
        words += [f"{count} {dtype} from {peer}" for peer, count, dtype in self.receives]
        return f"{', '.join(words)} in {self.call_site}"


Log = dict[Key, list[Operation]]


def compare(logs: Sequence[Log]) -> list[str]:
    """The first operation of each communicator at which its ranks differ; `logs` by rank in the world."""
    found = []
    for key in sorted({key for log in logs for key in log}):
        difference = _first_difference([deque(logs[rank].get(key, ())) for rank in key[1]])
        if difference is not None:
            number, heads = difference
            each = "; ".join(
                f"rank {rank} has {'no more' if head is None else head}"
                for rank, head in zip(key[1], heads, strict=True)
            )
            found.append(f"communicator {key[0]} of ranks {key[1]}, operation {number}: {each}")
    return found


def _first_difference(left: list[deque[Operation]]) -> tuple[int, list[Operation | None]] | None:
    """(its number on the rank that is least far, what stands there on each rank), or None."""
    lengths = [len(operations) for operations in left]
    # What is open of each rank's first operation: its messages, taken away as they find their other end.
    sends: list[list[End] | None] = [None] * len(left)
    receives: list[list[End] | None] = [None] * len(left)

    def heads() -> list[Operation | None]:
        return [operations[0] if operations else None for operations in left]

    while any(left):
        first = heads()
        if all(head is not None and head.what is not None for head in first):
            if not _is_one_collective([head for head in first if head is not None]):
                break
            for operations in left:
                operations.popleft()
            continue
        moved = False
        for rank, head in enumerate(first):
            if head is not None and head.what is None and sends[rank] is None:
                sends[rank], receives[rank] = list(head.sends), list(head.receives)
                moved = True
        for rank, outgoing in enumerate(sends):
            for peer, count, dtype in list(outgoing or ()):
                end = rank, count, dtype
                if end in (receives[peer] or ()):
                    outgoing.remove((peer, count, dtype))  # type: ignore[union-attr]
                    receives[peer].remove(end)  # type: ignore[union-attr]
                    moved = True
        for rank, operations in enumerate(left):
            if sends[rank] == [] and receives[rank] == []:
                operations.popleft()
                sends[rank] = receives[rank] = None
                moved = True
        if not moved:
            break
    if not any(left):
        return None
    return min(length - len(rest) for length, rest in zip(lengths, left, strict=True)) + 1, heads()


def _is_one_collective(operations: Sequence[Operation]) -> bool:
    names = {(operation.name, operation.what) for operation in operations}
    sent = sorted((rank, peer, *what) for rank, each in enumerate(operations) for peer, *what in each.sends)
    received = sorted((peer, rank, *what) for rank, each in enumerate(operations) for peer, *what in each.receives)
    return len(names) == 1 and sent == received
