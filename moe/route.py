"""From the router's choice to sorted indices: which rows travel where, and which rows each expert reads.

Pure functions on tensors of one rank; nothing here communicates. The tokens of a layer are split into chunks of
consecutive tokens. A token that goes to several experts of one rank is one row of that rank's traffic, with one
assignment per expert.

Shapes: T tokens, E experts of the whole layer, P assignments of a token to an expert, Q assignments that this rank
computes, U unique rows (token, rank), n assignments of a chunk, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch.nn import functional as F

from memory.pool import WORKSPACE
from moe import kernels
from moe.placement.map import PlacementMap

MAX_BYTE, MAX_SHORT = 255, 32767


@dataclass(frozen=True)
class Choice:
    """The chosen assignments, sorted by token, then expert."""

    tokens: torch.Tensor  # [P] int64
    experts: torch.Tensor  # [P] int64, of the whole layer
    flat: torch.Tensor  # [P] int64: token * E + expert
    num_tokens: int
    assignments_per_token: int | None  # where it is the same for all


@dataclass(frozen=True)
class Sum:
    """How rows of a buffer are added up: output i is the sum of `source[index[starts[i] : starts[i + 1]]]`."""

    index: torch.Tensor
    starts: torch.Tensor


@dataclass(frozen=True)
class Chunk:
    """One chunk as its experts' rank sees it: n assignments of a row to a slot, out of the list of all that it gets."""

    # Where the chunk's assignments stand in that list; so listed, they are in the order of their rows.
    slices: list[slice]
    first_row: int  # in a buffer of all chunks' rows
    num_rows: int
    ids: torch.Tensor  # [n] places in the list of all assignments, sorted by expert
    rows: torch.Tensor  # [n] the assignments' rows, counted from `first_row`, sorted by expert
    counts: torch.Tensor  # [slots] int64
    sums: Sum  # from assignments sorted by expert to rows

    def in_row_order(self, values: torch.Tensor) -> torch.Tensor:
        """The chunk's part of a value per assignment, in the order that `sums.index` has."""
        return cut_list(values, self.slices)


@dataclass(frozen=True)
class DispatchOrder:
    """What this rank sends: assignments sorted by rank, then token, then expert; one row for all of a rank and
    token."""

    assignments: torch.Tensor  # [P] the assignments' places in the `Choice`
    tokens: torch.Tensor  # [P]
    ranks: torch.Tensor  # [P]
    is_first: torch.Tensor  # [P] bool: the first assignment of its row
    packed_ids: torch.Tensor  # [P] int64: row within the rank's rows * slots + slot

    def row_tokens(self, num_rows: int) -> torch.Tensor:
        """The token of each of the `num_rows` rows, in the order of the assignments."""
        tokens = self.tokens.new_empty(num_rows)
        tokens[self.is_first.cumsum(0) - 1] = self.tokens  # assignments of a row write the same
        return tokens


def boundaries(num_tokens: int, degree: int) -> list[int]:
    """First tokens of `degree` chunks of about equal size, and the number of tokens."""
    return [num_tokens * i // degree for i in range(degree + 1)]


def choose(routing_map_TE: torch.Tensor, assignments_per_token: int | None) -> Choice:
    """The assignments of a routing map (bool). `assignments_per_token`, where it is the same for all, saves a GPU's
    host the wait."""
    num_tokens, num_experts = routing_map_TE.shape
    flat_map = routing_map_TE.reshape(-1)
    if assignments_per_token is not None and flat_map.device.type == "cuda":
        flat_P = torch.nonzero_static(flat_map, size=num_tokens * assignments_per_token).view(-1)
    else:
        flat_P = flat_map.nonzero().view(-1)
    tokens_P = flat_P // num_experts
    return Choice(tokens_P, flat_P - tokens_P * num_experts, flat_P, num_tokens, assignments_per_token)


def count(keys: torch.Tensor, size: int, where: torch.Tensor | None = None) -> torch.Tensor:
    """How often each of 0 .. size - 1 occurs in `keys` (where the mask is true), int64. Unlike bincount, no GPU's host
    waits."""
    if keys.device.type == "cpu":
        return torch.bincount(keys if where is None else keys[where], minlength=size)
    ones = torch.ones_like(keys) if where is None else where.long()
    return torch.zeros(size, dtype=torch.int64, device=keys.device).scatter_add_(0, keys, ones)


def chunk_of(tokens: torch.Tensor, num_tokens: int, degree: int) -> torch.Tensor:
    """The chunk of each token, by `boundaries`: the largest i with num_tokens * i // degree <= token."""
    return ((tokens + 1) * degree - 1) // max(num_tokens, 1)


def stable_argsort(keys: torch.Tensor, limit: int) -> torch.Tensor:
    """Indices that sort small non-negative integers (all at most `limit`), equal ones in their order.

    On the host by numpy, whose sort of 8 and 16 bit integers is a radix sort: 32768 keys of a byte take 0.05 ms,
    torch's sort of int64 0.8 ms.
    """
    if keys.device.type != "cpu" or limit > MAX_SHORT:
        return keys.argsort(stable=True)
    narrow = keys.to(torch.uint8 if limit <= MAX_BYTE else torch.int16)
    return torch.from_numpy(narrow.numpy().argsort(kind="stable"))


def make_chunk(
    slices: list[slice], rows_Q: torch.Tensor, slots_Q: torch.Tensor, first_row: int, num_rows: int, num_slots: int
) -> Chunk:
    """The chunk with these parts of all assignments of the rank."""
    positions_n = cut_list(torch.arange(len(rows_Q), device=rows_Q.device), slices)
    rows_n, slots_n = cut_list(rows_Q, slices), cut_list(slots_Q, slices)
    if first_row:
        rows_n = rows_n - first_row
    order = stable_argsort(slots_n, num_slots)
    by_row = torch.empty_like(order)
    by_row[order] = torch.arange(len(order), device=order.device)
    of_row = count(rows_n, num_rows)
    sums = Sum(by_row, of_row.cumsum(0).sub_(of_row))
    return Chunk(slices, first_row, num_rows, positions_n[order], rows_n[order], count(slots_n, num_slots), sums)


def add_up(
    source: torch.Tensor, sums: Sum, weights: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Sums [outputs, H] of rows of `source`, each times its weight (fp32 or wider, in the order of `sums.index`); of
    none: zero. In `out` if given.

    One kernel reads each row once and adds in fp32; index_add_ on the host would write each output row as often as it
    is added to, and on a GPU it would depend on the order of atomic additions.
    """
    if kernels.has(source):
        out = WORKSPACE.lend((len(sums.starts), source.size(1)), source) if out is None else out
        return kernels.add_up(source, sums.index, sums.starts, weights, out)
    if len(sums.index) == 0:
        result = source.new_zeros(len(sums.starts), source.size(1))
    else:
        weights = None if weights is None else weights.to(source.dtype)
        result = F.embedding_bag(sums.index, source, sums.starts, mode="sum", per_sample_weights=weights)
    return result if out is None else out.copy_(result)


def dispatch_order(choice: Choice, placement: PlacementMap) -> DispatchOrder:
    """Sort the assignments by the rank of their expert and find the unique rows."""
    ranks_P, slots_P = placement.locate(choice.experts)
    order = stable_argsort(ranks_P, placement.num_ranks)
    ranks_P, slots_P, tokens_P = ranks_P[order], slots_P[order], choice.tokens[order]
    key = ranks_P * choice.num_tokens + tokens_P
    is_first = torch.ones_like(key, dtype=torch.bool)
    torch.ne(key[1:], key[:-1], out=is_first[1:])
    row = is_first.cumsum(0) - 1  # of each assignment, over all ranks
    rows_per_rank = count(ranks_P, placement.num_ranks, is_first)
    row_in_rank = row - (rows_per_rank.cumsum(0) - rows_per_rank)[ranks_P]
    return DispatchOrder(order, tokens_P, ranks_P, is_first, row_in_rank * placement.num_slots + slots_P)


def exchange_counts(sent: DispatchOrder, num_tokens: int, num_ranks: int, degree: int) -> torch.Tensor:
    """Counts [ranks, degree, 2] int64 of the rows and assignments that each rank gets from each chunk of this rank's
    tokens."""
    keys, size = sent.ranks * degree + chunk_of(sent.tokens, num_tokens, degree), num_ranks * degree
    return torch.stack([count(keys, size, sent.is_first), count(keys, size)], dim=1).view(num_ranks, degree, 2)


@dataclass(frozen=True)
class ChunkOffsets:
    """Where one side's rows and assignments, sorted by rank and then token, are cut into chunks: counts by rank, then
    chunk."""

    rows: list[list[int]]
    assignments: list[list[int]]

    @property
    def degree(self) -> int:
        return len(self.rows[0])

    def chunk_rows(self, chunk: int) -> list[int]:
        """Rows of a chunk by rank."""
        return [counts[chunk] for counts in self.rows]

    def total_rows(self) -> list[int]:
        """Rows of each chunk over all ranks."""
        return [sum(self.chunk_rows(chunk)) for chunk in range(self.degree)]

    def slices(self, counts: list[list[int]], chunk: int) -> list[slice]:
        """Each rank's part of a chunk in a list sorted by rank, then token; `counts` is `rows` or `assignments`."""
        first = 0
        result = []
        for of_rank in counts:
            start = first + sum(of_rank[:chunk])
            result.append(slice(start, start + of_rank[chunk]))
            first += sum(of_rank)
        return result


def cut_list(values: torch.Tensor, slices: Sequence[slice]) -> torch.Tensor:
    """The parts one after the other: a view where they touch."""
    slices = [part for part in slices if part.stop > part.start]
    if not slices:
        return values[:0]
    if all(a.stop == b.start for a, b in zip(slices, slices[1:], strict=False)):
        return values[slices[0].start : slices[-1].stop]
    return torch.cat([values[part] for part in slices])


def received_rows(ids_Q: torch.Tensor, cut: ChunkOffsets, num_slots: int) -> torch.Tensor:
    """For each received assignment its row in a buffer of all chunks, one after the other, each sorted by rank and
    token."""
    totals = [0, *accumulate(cut.total_rows())]
    shifts, repeats = [], []
    for rank, rows in enumerate(cut.rows):
        for chunk in range(cut.degree):
            before = totals[chunk] + sum(cut.rows[other][chunk] for other in range(rank))
            shifts.append(before - sum(rows[:chunk]))
            repeats.append(cut.assignments[rank][chunk])
    device = ids_Q.device
    shift = torch.repeat_interleave(
        torch.tensor(shifts, device=device), torch.tensor(repeats, device=device), output_size=len(ids_Q)
    )
    return ids_Q // num_slots + shift


def combine_sum(row_tokens: torch.Tensor, first_token: int, num_tokens: int) -> Sum:
    """How a chunk's returned rows (of these tokens, in the order sent) are added up per token."""
    tokens = row_tokens - first_token
    counts = count(tokens, num_tokens)
    return Sum(stable_argsort(tokens, num_tokens), counts.cumsum(0).sub_(counts))
