"""How much each rank sends and receives in each chunk of a call, and in which order: one exchange of counts for all
chunks and both passes.

Shapes: P assignments of this rank's tokens, U rows that this rank sends, Q assignments that this rank computes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from memory.transfer import lists_to_device
from moe import route
from moe.alltoall.flat import AllToAll, ExchangeCounts
from moe.route import Choice, ChunkOffsets, Chunks, DispatchOrder, Sum
from parallel.trace import named


@dataclass(frozen=True)
class SendOrder:
    """For each chunk: the tokens of its rows that travel, of those that stay, and how what comes back is added up."""

    away: list[torch.Tensor]
    own: list[torch.Tensor]
    sums: list[Sum]


class PassSizes:
    """One pass's chunks as both sides see them: who sends how many rows, and which assignments belong to a chunk."""

    def __init__(self, counts: ExchangeCounts, num_kinds: int, first_column: int, degree: int) -> None:
        """counts: by chunk of both passes first rows, then assignments, with three kinds those of experts at home."""
        num_chunks = len(counts.sent[0]) // num_kinds
        rows, of_assignments, *at_home = (
            list(range(first, first + degree))
            for first in (kind * num_chunks + first_column for kind in range(num_kinds))
        )
        self.degree = degree
        self.sends, self.receives = (
            ChunkOffsets(
                *([[of_rank[column] for column in kind] for of_rank in side] for kind in (rows, of_assignments))
            )
            for side in (counts.sent, counts.received)
        )
        self.dispatches = [counts.split_sizes([column]) for column in rows]
        self.combines = [counts.split_sizes([column], back=True) for column in rows]
        self.assignments = counts.split_sizes(of_assignments)
        self.assignments_back = counts.split_sizes(of_assignments, back=True)
        self.received_rows = self.receives.total_rows()  # of each chunk
        # Assignments of experts at home in each chunk, where copies may have others.
        self.num_home = [sum(of_rank[column] for of_rank in counts.received) for of in at_home for column in of]
        self.tables: list[torch.Tensor] = []  # what `send_order` and `chunks` read on the device

    def host_tables(self, num_slots: int) -> list[list[int]]:
        """What they read, still on the host."""
        ranks = len(self.receives.rows)
        bases = route.chunk_bases([sum(counts) for counts in zip(*self.receives.assignments, strict=True)], num_slots)
        return [
            [*route.received_shifts(self.receives), *bases[0] * ranks, *bases[1] * ranks],
            [count for counts in self.receives.assignments for count in counts],
            route.sent_shifts(self.sends),
            [count for counts in self.sends.rows for count in counts],
        ]

    def send_order(
        self, row_tokens_U: torch.Tensor, choice: Choice, rank: int, turns_U: torch.Tensor | None = None
    ) -> SendOrder:
        """The order of the rows that `rank`, this one, sends. `turns_U`: see `route.combine_sums`."""
        slices = [self.sends.slices(self.sends.rows, chunk) for chunk in range(self.degree)]
        others = [[part for other, part in enumerate(parts) if other != rank] for parts in slices]
        listed = route.cut_list(
            row_tokens_U, [part for i in range(self.degree) for part in (*others[i], slices[i][rank])]
        )
        if choice.turns_T is not None:
            listed = choice.turns_T.index_select(0, listed)
        sizes = [size for i, rows in enumerate(self.sends.total_rows()) for size in _split(rows, slices[i][rank])]
        parts = listed.split(sizes)
        shifts = None
        if self.degree > 1:
            shifts = torch.repeat_interleave(*self.tables[2:], output_size=len(row_tokens_U))
        sums = route.combine_sums(row_tokens_U, choice.num_tokens, self.sends, shifts, turns_U)
        return SendOrder(list(parts[::2]), list(parts[1::2]), sums)

    def chunks(self, rank_rows_Q: torch.Tensor, slots_Q: torch.Tensor, num_slots: int) -> Chunks:
        """The chunks of the received assignments; `rank_rows_Q` are the numbers of their rows in their rank's."""
        table, counts = self.tables[0].view(3, -1), self.tables[1]
        if self.degree > 1:
            of_cells = table.index_select(1, torch.repeat_interleave(counts, output_size=len(slots_Q)))
            shifts_Q, of_chunk_Q = of_cells[0], of_cells[1:]
        else:
            shifts_Q, of_chunk_Q = torch.repeat_interleave(table[0], counts, output_size=len(slots_Q)), None
        slices = [self.receives.slices(self.receives.assignments, i) for i in range(self.degree)]
        made = route.make_chunks(rank_rows_Q + shifts_Q, slots_Q, self.received_rows, slices, num_slots, of_chunk_Q)
        for chunk, number in zip(made, self.num_home, strict=False):
            chunk.num_home = number
        return made


def _split(rows: int, own: slice) -> tuple[int, int]:
    return rows - (own.stop - own.start), own.stop - own.start


@named("dispatch")
def exchange_sizes(
    order: DispatchOrder, degrees: list[int], num_slots: int, exchange: AllToAll
) -> tuple[PassSizes, PassSizes]:
    """(forward, backward) sizes of a call; the same object where the degrees are. The host waits once."""
    exchanged = exchange.count(order.counts.flatten(1))
    num_kinds = order.counts.size(1)
    passes = [PassSizes(exchanged, num_kinds, sum(degrees[:i]), degree) for i, degree in enumerate(degrees)]
    tables = [sizes.host_tables(num_slots) for sizes in passes]
    on_device = lists_to_device([table for of_pass in tables for table in of_pass], order.tokens.device)
    for i, sizes in enumerate(passes):
        sizes.tables = on_device[4 * i : 4 * i + 4]
    return passes[0], passes[-1]
