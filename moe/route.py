"""Turn the router's choice into sorted indices: the token rows sent to each rank, and the rows that each expert reads.

Pure functions on tensors of one rank, without communication. The tokens of a layer are split into chunks of consecutive
tokens or of strided ones. With strided chunks each chunk takes every K-th token, so that neighbours, which choose
similar experts, are in different chunks; the tokens are renumbered so that those of a chunk are consecutive again. A
token that is sent to several experts of one rank is one row of that rank's traffic, with one assignment per expert.

Shapes: T tokens, E experts of the whole layer, P assignments of a token to an expert, Q assignments that this rank
computes, U unique rows (token, rank), n assignments of a chunk, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch.nn import functional as F

from memory.pool import WORKSPACE
from memory.transfer import to_device
from moe import kernels
from moe.placement_map import PlacementMap

MAX_BYTE, MAX_SHORT = 255, 32767


@dataclass(frozen=True)
class Choice:
    """The router's choice as a list of assignments (token, expert), sorted by token, then expert.

    With strided chunks `tokens` has strided numbers (see `order_T`). On a GPU the list has its greatest possible
    length, so that the host does not wait for the actual length. Padding at its end has the token number T, which does
    not exist.
    """

    tokens: torch.Tensor  # [P] int64, or their strided numbers
    experts: torch.Tensor  # [P] int64, of the whole layer
    flat: torch.Tensor  # [P] int64: token * E + expert
    num_tokens: int
    assignments_per_token: int | None  # if this number is the same for all tokens
    order_T: torch.Tensor | None = None  # int64: the token with each strided number; None: chunks are not strided

    @property
    def may_be_padded(self) -> bool:
        """Return whether the list may end with entries that are not assignments."""
        return self.assignments_per_token is None and self.flat.device.type == "cuda"


@dataclass(frozen=True)
class Destinations:
    """The rank that computes each assignment, and the expert slot on that rank."""

    ranks: torch.Tensor  # [P] int64
    expert_slots: torch.Tensor  # [P] int64, numbered on their rank
    num_ranks: int
    num_slots: int  # expert slots per rank
    num_primary_slots: int  # the first slots of a rank, which hold primaries

    @classmethod
    def of_primaries(cls, choice: Choice, placement: PlacementMap) -> Destinations:
        """Return the destinations if each expert's primary computes all assignments of the expert."""
        num_slots = placement.num_expert_slots
        return cls(*placement.locate(choice.experts), placement.num_ranks, num_slots, num_slots)


@dataclass(frozen=True)
class Sum:
    """Indices for sums of a buffer's rows: output i is the sum of `source[index[starts[i] : starts[i + 1]]]`."""

    index: torch.Tensor
    starts: torch.Tensor


@dataclass
class Chunk:
    """The indices of one chunk on the rank that computes it: n of the received assignments (token row, expert slot)."""

    # The chunk's ranges in the list of received assignments. Concatenated, they are in the order of their rows.
    slices: list[slice]
    span: slice  # the chunk's range in a list of assignments that is sorted by chunk
    first_row: int  # the chunk's first row in a buffer with all chunks' rows
    num_rows: int
    ids: torch.Tensor  # [n] indices in the list of received assignments, sorted by slot
    token_rows: torch.Tensor  # [n] the assignments' rows, counted from `first_row`, sorted by slot
    ends: torch.Tensor  # [slots] int32: the end of each slot's assignments
    sums: Sum  # sum each row's assignments, which are sorted by slot
    host_ends: list[int] | None = None  # `ends` on the host, if it needs them: see `read_ends`
    num_primary_assignments: int | None = None  # assignments of primaries, if assignments of replicas may follow


class Chunks(list[Chunk]):
    """All chunks of a pass, and `ids_Q`, the indices of all their assignments, chunk by chunk."""

    def __init__(self, chunks: Iterable[Chunk], ids_Q: torch.Tensor) -> None:
        super().__init__(chunks)
        self.ids_Q = ids_Q


@dataclass(frozen=True)
class DispatchOrder:
    """The assignments that this rank sends, sorted by destination rank, then token, then expert.

    All assignments of a token to the same rank share a row, unless `row_per_assignment` is set. Padding (see `Choice`)
    may follow at the end.
    """

    assignments: torch.Tensor  # [P] indices in the `Choice`
    tokens: torch.Tensor  # [P]
    token_rows: torch.Tensor  # [P] each assignment's row among all sent rows
    packed_ids: torch.Tensor  # [P] int64: (row among the rows for its rank) * num_slots + slot
    num_slots: int
    # [ranks, kinds, chunks]: the numbers of rows, of assignments and, if there may be replicas, of primaries'
    # assignments, for each rank and chunk. The chunks of all degrees follow one another.
    counts: torch.Tensor
    row_per_assignment: bool = False  # each assignment has a row of its own

    def row_tokens(self, num_rows: int, num_assignments: int) -> torch.Tensor:
        """Return the token of each row that this rank sends, int64 [num_rows], in the order of sending."""
        tokens = self.tokens.new_empty(num_rows)
        tokens[self.token_rows[:num_assignments]] = self.tokens[:num_assignments]  # assignments of a row write the same
        return tokens


def boundaries(num_tokens: int, degree: int) -> list[int]:
    """Return the first tokens of `degree` chunks of about equal size, followed by the number of tokens."""
    return [num_tokens * i // degree for i in range(degree + 1)]


def strided_order(num_tokens: int, stride: int, device: torch.device) -> torch.Tensor:
    """Return the tokens in the order 0, K, 2K, ..., 1, K + 1, ..., int64 [T], where K is `stride`."""
    if num_tokens % stride and num_tokens:
        return torch.cat([torch.arange(i, num_tokens, stride, device=device) for i in range(min(stride, num_tokens))])
    return torch.arange(num_tokens, device=device).view(-1, stride).t().flatten()


def choose(
    routing_map_TE: torch.Tensor,
    assignments_per_token: int | None,
    most_per_token: int | None = None,
    order_T: torch.Tensor | None = None,
) -> Choice:
    """Return the assignments of a routing map, bool [T, E], in the order of the tokens or of `order_T`.

    `assignments_per_token`: the number of experts of every token, if it is always the same. `most_per_token`: the
    greatest number of experts of a token. Either makes the list on a GPU shorter.
    """
    if order_T is not None:
        choice = choose(routing_map_TE.index_select(0, order_T), assignments_per_token, most_per_token)
        tokens_P = order_T.index_select(0, choice.tokens.clamp(max=choice.num_tokens - 1))
        flat_P = choice.experts.add(tokens_P, alpha=routing_map_TE.size(1)).clamp(max=routing_map_TE.numel() - 1)
        return replace(choice, flat=flat_P, order_T=order_T)
    num_tokens, num_experts = routing_map_TE.shape
    flat_map = routing_map_TE.reshape(-1)
    if flat_map.device.type == "cuda":
        most = assignments_per_token or most_per_token or num_experts
        flat_P = torch.nonzero_static(flat_map, size=num_tokens * most, fill_value=flat_map.numel()).view(-1)
    else:
        flat_P = flat_map.nonzero().view(-1)
    tokens_P = flat_P // num_experts
    experts_P = flat_P.sub(tokens_P, alpha=num_experts)
    choice = Choice(tokens_P, experts_P, flat_P, num_tokens, assignments_per_token)
    return replace(choice, flat=flat_P.clamp(max=flat_map.numel() - 1)) if choice.may_be_padded else choice


def stable_argsort(keys: torch.Tensor, limit: int) -> torch.Tensor:
    """Return the indices that stably sort non-negative integers of at most `limit`.

    On a CPU, numpy sorts 8 and 16 bit integers with a radix sort: 32768 keys of one byte take 0.05 ms. Torch's sort of
    int64 takes 0.8 ms.
    """
    if keys.device.type != "cpu" or limit > MAX_SHORT:
        return keys.argsort(stable=True)
    narrow = keys.to(torch.uint8 if limit <= MAX_BYTE else torch.int16)
    return torch.from_numpy(narrow.numpy().argsort(kind="stable"))


def sort_keys(keys: torch.Tensor, limit: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Stably sort non-negative integers of at most `limit`; return the sorted keys and the indices that sort them."""
    if keys.device.type != "cpu":
        in_order, order = keys.sort(stable=True)
        return in_order, order
    order = stable_argsort(keys, limit)
    return keys[order], order


def starts_of(values: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Return the index of the first occurrence of each of `numbers` (consecutive integers) in sorted `values`.

    All values must be among the numbers. A number that does not occur gets the index at which it would be inserted.
    """
    if values.device.type != "cpu":
        return torch.searchsorted(values, numbers)
    counts = torch.bincount(values - numbers[:1], minlength=len(numbers))
    return counts.cumsum(0).sub_(counts)


def make_chunks(
    rows_Q: torch.Tensor,
    slots_Q: torch.Tensor,
    num_rows: Sequence[int],
    slices: Sequence[list[slice]],
    num_slots: int,
    of_chunk_Q: torch.Tensor | None = None,
) -> Chunks:
    """Sort the received assignments by chunk and expert slot, with one sort for any number of chunks.

    `rows_Q`: each assignment's row, counted from the first row of its chunk. `slices`: each chunk's ranges in the list
    of received assignments, in the order of their rows. `of_chunk_Q` [2, Q]: the `chunk_bases` of each assignment's
    chunk; None for a single chunk.
    """
    numbers = torch.arange(max(len(rows_Q), num_slots * len(num_rows), *num_rows), device=rows_Q.device)
    keys = slots_Q if of_chunk_Q is None else slots_Q + of_chunk_Q[0]
    in_order, ids_Q = sort_keys(keys, num_slots * len(num_rows))
    sorted_rows_Q = rows_Q.index_select(0, ids_Q)
    by_row_Q = torch.empty_like(ids_Q)
    by_row_Q[ids_Q] = numbers[: len(ids_Q)]
    if of_chunk_Q is not None:
        by_row_Q -= of_chunk_Q[1]
    row_order = [each for of_chunk in slices for each in of_chunk]
    by_row_Q, rows_Q = cut_list(by_row_Q, row_order), cut_list(rows_Q, row_order)
    chunks: list[Chunk] = []
    first = first_row = 0
    for i, (count, of_chunk) in enumerate(zip(num_rows, slices, strict=True)):
        span = slice(first, first + sum(each.stop - each.start for each in of_chunk))
        expert_slots = numbers[i * num_slots : (i + 1) * num_slots]
        ends = torch.searchsorted(in_order[span], expert_slots, right=True, out_int32=True)
        sums = Sum(by_row_Q[span], starts_of(rows_Q[span], numbers[:count]))
        chunks.append(Chunk(of_chunk, span, first_row, count, ids_Q[span], sorted_rows_Q[span], ends, sums))
        first, first_row = span.stop, first_row + count
    return Chunks(chunks, ids_Q)


def chunk_bases(num_assignments: Sequence[int], num_slots: int) -> tuple[list[int], list[int]]:
    """Return two lists with an entry per chunk: its index times `num_slots`, and the index of its first assignment."""
    firsts = accumulate(num_assignments[:-1], initial=0)
    return [i * num_slots for i in range(len(num_assignments))], list(firsts)


def read_ends(chunks: Sequence[Chunk]) -> None:
    """Set `host_ends` of all chunks: copy the ends of all slots' assignments to the host in one transfer."""
    ends = torch.cat([chunk.ends for chunk in chunks]) if len(chunks) > 1 else chunks[0].ends
    numbers = ends.tolist()
    for i, chunk in enumerate(chunks):
        chunk.host_ends = numbers[i * len(chunk.ends) : (i + 1) * len(chunk.ends)]


def add_up(
    source: torch.Tensor, sums: Sum, weights: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return sums [outputs, H] of rows of `source`, in `out` if given; a sum of no rows is zero.

    Rows are multiplied by `weights` (fp32 or wider, in the order of `sums.index`). One kernel reads each row once and
    adds in fp32. With index_add_, the host would write each output row once per added row, and a GPU's result would
    depend on the order of atomic additions.
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


def dispatch_order(
    choice: Choice, destinations: Destinations, degrees: Sequence[int], row_per_assignment: bool = False
) -> DispatchOrder:
    """Sort the assignments by destination rank, number their unique rows, and count both per rank and chunk.

    `degrees`: the numbers of chunks for which to count. `row_per_assignment`: each assignment gets its own row, so that
    no sum of rows depends on the ranks.
    """
    num_tokens, num_ranks, num_slots = choice.num_tokens, destinations.num_ranks, destinations.num_slots
    ranks_P, slots_P = destinations.ranks, destinations.expert_slots
    if ranks_P.device.type == "cpu":
        order = stable_argsort(ranks_P, num_ranks)
        ranks_P, slots_P, tokens_P = ranks_P[order], slots_P[order], choice.tokens[order]
        keys_P = tokens_P.add(ranks_P, alpha=num_tokens)  # one key for each row, ascending
    else:  # a code holds rank, token and slot: codes are sorted, then decoded
        codes_P = slots_P.add(choice.tokens.add(ranks_P, alpha=num_tokens), alpha=num_slots)
        if choice.may_be_padded:
            codes_P = codes_P.masked_fill(choice.tokens == num_tokens, num_ranks * num_tokens * num_slots)
        codes_P, order = codes_P.sort()
        keys_P = codes_P // num_slots
        ranks_P, slots_P = keys_P // max(num_tokens, 1), codes_P.sub(keys_P, alpha=num_slots)
        tokens_P = keys_P.sub(ranks_P, alpha=num_tokens)
    # Each assignment's row number, followed by the number of rows.
    is_new = torch.zeros(len(keys_P) + 1, dtype=torch.bool, device=keys_P.device)
    if len(keys_P):
        is_new[1:].fill_(True)
        if not row_per_assignment:
            torch.ne(keys_P[1:], keys_P[:-1], out=is_new[1:-1])
    rows_P = is_new.cumsum(0)
    # The first key of each rank's share of each chunk, and the key after its last.
    cuts = [boundaries(num_tokens, degree) for degree in degrees]
    ends = [
        [[rank * num_tokens + token for cut in cuts for token in cut[side : len(cut) - 1 + side]] for side in (0, 1)]
        for rank in range(num_ranks)
    ]
    bounds = torch.searchsorted(keys_P, to_device(torch.tensor(ends), keys_P.device))  # [ranks, 2 ends, chunks]
    counted = [rows_P.take(bounds), bounds]
    if destinations.num_primary_slots < num_slots:
        counted.append(F.pad((slots_P < destinations.num_primary_slots).cumsum(0), (1, 0)).take(bounds))
    bounded = torch.stack(counted, dim=2)  # [ranks, 2 ends, kinds, chunks]
    first_rows = bounded[:, 0, 0, 0]
    if choice.may_be_padded:
        ranks_P = ranks_P.clamp(max=num_ranks - 1)
    rows_P = rows_P[:-1]
    packed_P = slots_P.add(rows_P - first_rows.index_select(0, ranks_P), alpha=num_slots)
    counts = bounded[:, 1] - bounded[:, 0]
    return DispatchOrder(order, tokens_P, rows_P, packed_P, num_slots, counts, row_per_assignment)


@dataclass(frozen=True)
class ChunkOffsets:
    """The numbers of rows and of assignments that a rank sends to, or receives from, each rank in each chunk.

    The lists are indexed [rank][chunk], and describe lists of rows or assignments that are sorted by rank, then token.
    """

    token_rows: list[list[int]]
    assignments: list[list[int]]

    @property
    def degree(self) -> int:
        return len(self.token_rows[0])

    def chunk_rows(self, chunk: int) -> list[int]:
        """Return a chunk's number of rows to or from each rank."""
        return [counts[chunk] for counts in self.token_rows]

    def total_rows(self) -> list[int]:
        """Return the number of rows of each chunk, summed over all ranks."""
        return [sum(self.chunk_rows(chunk)) for chunk in range(self.degree)]

    def slices(self, counts: list[list[int]], chunk: int) -> list[slice]:
        """Return the range of a chunk's entries for each rank, in a list that is sorted by rank, then token.

        `counts`: `token_rows` for a list of rows, `assignments` for a list of assignments.
        """
        firsts = accumulate((sum(of_rank) for of_rank in counts), initial=0)
        starts = [first + sum(of_rank[:chunk]) for first, of_rank in zip(firsts, counts)]
        return [slice(start, start + of_rank[chunk]) for start, of_rank in zip(starts, counts, strict=True)]


def cut_list(values: torch.Tensor, slices: Sequence[slice]) -> torch.Tensor:
    """Concatenate slices of `values`. The result is a view if the slices are adjacent."""
    slices = [each for each in slices if each.stop > each.start]
    if not slices:
        return values[:0]
    if all(a.stop == b.start for a, b in zip(slices, slices[1:], strict=False)):
        return values[slices[0].start : slices[-1].stop]
    return torch.cat([values[each] for each in slices])


def received_shifts(cut: ChunkOffsets) -> list[int]:
    """Return shifts by (rank, chunk), from a received row's index among its rank's rows to its index in the chunk."""
    before, shifts = [0] * cut.degree, []
    for token_rows in cut.token_rows:
        for chunk in range(cut.degree):
            shifts.append(before[chunk] - sum(token_rows[:chunk]))
            before[chunk] += token_rows[chunk]
    return shifts


def sent_shifts(cut: ChunkOffsets) -> list[int]:
    """Return shifts by (rank, chunk), from a sent row's index among all sent rows to its index in the chunk."""
    firsts = accumulate((sum(token_rows) for token_rows in cut.token_rows[:-1]), initial=0)
    of_cells = [first for first in firsts for _ in range(cut.degree)]
    return [shift - first for shift, first in zip(received_shifts(cut), of_cells, strict=True)]


def combine_sums(
    row_tokens_U: torch.Tensor,
    num_tokens: int,
    cut: ChunkOffsets,
    shifts_U: torch.Tensor | None,
    order_U: torch.Tensor | None = None,
) -> list[Sum]:
    """Return for each chunk the indices that sum its returned rows per token.

    Rows return in the order in which they were sent, and a token's rows are added in this order. `order_U`: add them in
    the order of these positions instead, which must sort the rows by token. `shifts_U`: the `sent_shifts` of each row;
    None for a single chunk.
    """
    numbers = torch.arange(max(num_tokens, len(row_tokens_U)), device=row_tokens_U.device)
    if order_U is None:
        in_order, index_U = sort_keys(row_tokens_U, num_tokens)
    else:
        index_U = torch.empty_like(order_U)
        index_U[order_U] = numbers[: len(order_U)]
        in_order = row_tokens_U.index_select(0, index_U)
    if shifts_U is not None:
        index_U = (numbers[: len(row_tokens_U)] + shifts_U).index_select(0, index_U)
    tokens, sums, first = boundaries(num_tokens, cut.degree), [], 0
    for i, num_rows in enumerate(cut.total_rows()):
        span = slice(first, first + num_rows)
        sums.append(Sum(index_U[span], starts_of(in_order[span], numbers[tokens[i] : tokens[i + 1]])))
        first += num_rows
    return sums
