"""How much each rank sends and receives in each chunk of a call: one exchange of counts for all chunks and both
passes."""

from __future__ import annotations

import torch

from moe import route
from moe.alltoall.flat import AllToAll, ExchangeCounts
from moe.route import Choice, Chunk, ChunkOffsets, DispatchOrder
from moe.schedule.chunk_plan import Plan
from parallel.trace import named


class PassSizes:
    """One pass's chunks as both sides see them: who sends how many rows, and which assignments belong to a chunk."""

    def __init__(self, counts: ExchangeCounts, first_column: int, degree: int) -> None:
        columns = [(column, column + 1) for column in range(first_column, first_column + 2 * degree, 2)]
        self.degree = degree
        self.sends, self.receives = (
            ChunkOffsets(*([[of_rank[column[kind]] for column in columns] for of_rank in side] for kind in (0, 1)))
            for side in (counts.sent, counts.received)
        )
        self.dispatches = [counts.split_sizes([rows]) for rows, _ in columns]
        self.combines = [counts.split_sizes([rows], back=True) for rows, _ in columns]
        of_assignments = [assignments for _, assignments in columns]
        self.assignments = counts.split_sizes(of_assignments)
        self.assignments_back = counts.split_sizes(of_assignments, back=True)
        self.received_rows = self.receives.total_rows()  # of each chunk

    def chunks(self, rows_Q: torch.Tensor, slots_Q: torch.Tensor, num_slots: int) -> list[Chunk]:
        """The chunks of the received assignments; `rows_Q` count in a buffer of all chunks' rows."""
        chunks, first = [], 0
        for i, num_rows in enumerate(self.received_rows):
            parts = self.receives.slices(self.receives.assignments, i)
            chunks.append(route.make_chunk(parts, rows_Q, slots_Q, first, num_rows, num_slots))
            first += num_rows
        return chunks


@named("dispatch")
def exchange_sizes(
    choice: Choice, order: DispatchOrder, plan: Plan, exchange: AllToAll, both: bool
) -> tuple[PassSizes, PassSizes]:
    """(forward, backward) sizes of a call; the same object where the degrees are, or without `both`. The host waits
    once."""
    degrees = [plan.degree] if plan.degree == plan.backward_degree or not both else [plan.degree, plan.backward_degree]
    counts = [route.exchange_counts(order, choice.num_tokens, exchange.size, degree).flatten(1) for degree in degrees]
    exchanged = exchange.count(counts[0] if len(counts) == 1 else torch.cat(counts, dim=1))
    forward = PassSizes(exchanged, 0, plan.degree)
    return forward, PassSizes(exchanged, 2 * plan.degree, plan.backward_degree) if len(degrees) == 2 else forward
