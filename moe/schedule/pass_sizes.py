"""Sizes and order of the rows that each rank sends and receives in each chunk of a call.

One exchange of counts serves all chunks and both passes.

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
    """The tokens of the rows that each chunk sends: to other ranks (`away`) and to this rank itself (`own`).

    `sums`: for each chunk, the indices that sum its returned rows per token.
    """

    away: list[torch.Tensor]
    own: list[torch.Tensor]
    sums: list[Sum]


class PassSizes:
    """The sizes of one pass's all-to-alls: rows and assignments of each chunk, sent to and received from each rank."""

    def __init__(self, counts: ExchangeCounts, num_kinds: int, first_column: int, degree: int) -> None:
        """`counts` has columns that count rows, assignments and, if `num_kinds` is 3, primaries' assignments.

        Each kind has a column for each chunk of each pass; `first_column` is the column of this pass's first chunk.
        """
        num_columns = len(counts.sent[0])
        firsts = range(first_column, num_columns, num_columns // num_kinds)
        of_rows, of_assignments, *of_primaries = (list(range(first, first + degree)) for first in firsts)
        self.degree = degree
        kinds, sides = [slice(first, first + degree) for first in firsts[:2]], (counts.sent, counts.received)
        self.sends, self.receives = (ChunkOffsets(*([each[kind] for each in side] for kind in kinds)) for side in sides)
        self.dispatches = [counts.split_sizes([column]) for column in of_rows]
        self.combines = [counts.split_sizes([column], back=True) for column in of_rows]
        self.assignments = counts.split_sizes(of_assignments)
        self.assignments_back = counts.split_sizes(of_assignments, back=True)
        self.received_rows = self.receives.total_rows()  # of each chunk
        # Assignments of primaries in each chunk; empty if there can be no replicas.
        columns = [column for kind in of_primaries for column in kind]
        self.num_primary_assignments = [sum(of_rank[column] for of_rank in counts.received) for column in columns]
        self.tables: list[torch.Tensor] = []  # `host_tables` on the device, for `send_order` and `chunks`

    def host_tables(self, num_slots: int) -> list[list[int]]:
        """Return the index tables for `chunks` and `send_order`: shifts and counts of received, then of sent rows."""
        ranks = len(self.receives.token_rows)
        bases = route.chunk_bases([sum(counts) for counts in zip(*self.receives.assignments, strict=True)], num_slots)
        return [
            [*route.received_shifts(self.receives), *bases[0] * ranks, *bases[1] * ranks],
            [count for counts in self.receives.assignments for count in counts],
            route.sent_shifts(self.sends),
            [count for counts in self.sends.token_rows for count in counts],
        ]

    def send_order(
        self, row_tokens_U: torch.Tensor, choice: Choice, rank: int, order_U: torch.Tensor | None = None
    ) -> SendOrder:
        """Return the order in which this rank, `rank`, sends its rows. `order_U`: see `route.combine_sums`."""
        slices = [self.sends.slices(self.sends.token_rows, chunk) for chunk in range(self.degree)]
        in_order = [each for of in slices for each in (*of[:rank], *of[rank + 1 :], of[rank])]
        listed = route.cut_list(row_tokens_U, in_order)
        if choice.order_T is not None:
            listed = choice.order_T.index_select(0, listed)
        counts = zip(self.sends.total_rows(), self.sends.token_rows[rank], strict=True)
        away_and_own = listed.split([size for total, own in counts for size in (total - own, own)])
        shifts = torch.repeat_interleave(*self.tables[2:], output_size=len(row_tokens_U)) if self.degree > 1 else None
        sums = route.combine_sums(row_tokens_U, choice.num_tokens, self.sends, shifts, order_U)
        return SendOrder(list(away_and_own[::2]), list(away_and_own[1::2]), sums)

    def chunks(self, rank_rows_Q: torch.Tensor, slots_Q: torch.Tensor, num_slots: int) -> Chunks:
        """Sort the received assignments into chunks. `rank_rows_Q`: each assignment's row, numbered per source rank."""
        table, counts = self.tables[0].view(3, -1), self.tables[1]
        if self.degree > 1:
            of_cells = table.index_select(1, torch.repeat_interleave(counts, output_size=len(slots_Q)))
            shifts_Q, of_chunk_Q = of_cells[0], of_cells[1:]
        else:
            shifts_Q, of_chunk_Q = torch.repeat_interleave(table[0], counts, output_size=len(slots_Q)), None
        slices = [self.receives.slices(self.receives.assignments, i) for i in range(self.degree)]
        made = route.make_chunks(rank_rows_Q + shifts_Q, slots_Q, self.received_rows, slices, num_slots, of_chunk_Q)
        for chunk, number in zip(made, self.num_primary_assignments, strict=False):
            chunk.num_primary_assignments = number
        return made


@named("dispatch")
def exchange_sizes(
    order: DispatchOrder, degrees: list[int], num_slots: int, exchange: AllToAll
) -> tuple[PassSizes, PassSizes]:
    """Exchange counts over all ranks, and return the sizes of a call's (forward, backward) pass. The host waits once.

    Both sizes are the same object if both passes have the same number of chunks.
    """
    exchanged = exchange.count(order.counts.flatten(1))
    num_kinds = order.counts.size(1)
    passes = [PassSizes(exchanged, num_kinds, sum(degrees[:i]), degree) for i, degree in enumerate(degrees)]
    tables = [sizes.host_tables(num_slots) for sizes in passes]
    on_device = lists_to_device([table for of_pass in tables for table in of_pass], order.tokens.device)
    for i, sizes in enumerate(passes):
        sizes.tables = on_device[4 * i : 4 * i + 4]
    return passes[0], passes[-1]
