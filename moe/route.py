"""From the router's choice to sorted indices: which rows travel where, and which rows each expert reads.

Pure functions on tensors of one rank; nothing here communicates. The tokens of a layer are split into chunks of
consecutive tokens, or strided: each chunk takes every K-th, so that neighbours, which choose alike, go apart. Strided
tokens are numbered by their turns, in which a chunk's are consecutive again. A token that goes to several experts of
one rank is one row of that rank's traffic, with one assignment per expert.

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
    """The chosen assignments, sorted by token, then expert; where chunks are strided, by the tokens' turns.

    On a GPU the list is as long as it can be, so that no host waits for its length: what capacity dropped stands at its
    end, as assignments of token T.
    """

    tokens: torch.Tensor  # [P] int64, or their turns
    experts: torch.Tensor  # [P] int64, of the whole layer
    flat: torch.Tensor  # [P] int64: token * E + expert
    num_tokens: int
    assignments_per_token: int | None  # where it is the same for all
    turns_T: torch.Tensor | None = None  # int64: the token that has each turn; None: the one of that number

    @property
    def may_be_padded(self) -> bool:
        """Whether the list may be longer than there are assignments."""
        return self.assignments_per_token is None and self.flat.device.type == "cuda"


@dataclass(frozen=True)
class Places:
    """Where each assignment is computed."""

    ranks: torch.Tensor  # [P] int64
    slots: torch.Tensor  # [P] int64, of the rank's
    num_ranks: int
    num_slots: int  # that a rank has
    num_home: int  # the first of them, in which experts are at home

    @classmethod
    def at_home(cls, choice: Choice, placement: PlacementMap) -> Places:
        """At their experts' homes."""
        slots = placement.num_slots
        return cls(*placement.locate(choice.experts), placement.num_ranks, slots, slots)


@dataclass(frozen=True)
class Sum:
    """How rows of a buffer are added up: output i is the sum of `source[index[starts[i] : starts[i + 1]]]`."""

    index: torch.Tensor
    starts: torch.Tensor


@dataclass
class Chunk:
    """One chunk as its experts' rank sees it: n assignments of a row to a slot, out of the list of all that it gets."""

    # Where the chunk's assignments stand in that list; so listed, they are in the order of their rows.
    slices: list[slice]
    part: slice  # the chunk's in a list of all chunks' assignments, one chunk after the other
    first_row: int  # in a buffer of all chunks' rows
    num_rows: int
    ids: torch.Tensor  # [n] places in the list of all assignments, sorted by slot
    rows: torch.Tensor  # [n] the assignments' rows, counted from `first_row`, sorted by slot
    ends: torch.Tensor  # [slots] int32: where each slot's assignments end
    sums: Sum  # from assignments sorted by slot to rows
    host_ends: list[int] | None = None  # `ends` where the host needs them: see `read_ends`
    num_home: int | None = None  # assignments of experts at home, where copies may follow

    def in_row_order(self, values: torch.Tensor) -> torch.Tensor:
        """The chunk's part of a value per assignment, in the order that `sums.index` has."""
        return cut_list(values, self.slices)


class Chunks(list[Chunk]):
    """All chunks of a pass, one after the other."""

    def __init__(self, chunks: Iterable[Chunk], ids_Q: torch.Tensor) -> None:
        super().__init__(chunks)
        self.ids_Q = ids_Q  # theirs


@dataclass(frozen=True)
class DispatchOrder:
    """What this rank sends: assignments sorted by rank, then token, then expert; one row for all of a rank and
    token. After them may come those that were dropped."""

    assignments: torch.Tensor  # [P] the assignments' places in the `Choice`
    tokens: torch.Tensor  # [P]
    rows: torch.Tensor  # [P] of each its row among all that are sent
    packed_ids: torch.Tensor  # [P] int64: row within the rank's rows * num_slots + slot
    num_slots: int
    # [ranks, kinds, chunks]: rows, assignments, and where there may be copies those of experts at home, for each rank
    # in each chunk, of every degree in turn
    counts: torch.Tensor
    apart: bool = False  # each assignment has a row of its own

    def row_tokens(self, num_rows: int, num_assignments: int) -> torch.Tensor:
        """The token of each row, in the order of the assignments."""
        tokens = self.tokens.new_empty(num_rows)
        tokens[self.rows[:num_assignments]] = self.tokens[:num_assignments]  # assignments of a row write the same
        return tokens


def boundaries(num_tokens: int, degree: int) -> list[int]:
    """First tokens of `degree` chunks of about equal size, and the number of tokens."""
    return [num_tokens * i // degree for i in range(degree + 1)]


def turns(num_tokens: int, stride: int, device: torch.device) -> torch.Tensor:
    """The tokens 0, K, 2K, ..., 1, K + 1, ... for K = `stride`: int64 [T]."""
    if num_tokens % stride and num_tokens:
        return torch.cat(
            [torch.arange(first, num_tokens, stride, device=device) for first in range(min(stride, num_tokens))]
        )
    return torch.arange(num_tokens, device=device).view(-1, stride).t().flatten()


def choose(
    routing_map_TE: torch.Tensor,
    assignments_per_token: int | None,
    most_per_token: int | None = None,
    turns_T: torch.Tensor | None = None,
) -> Choice:
    """The assignments of a routing map (bool). `assignments_per_token`, where it is the same for all, or the most that
    a token may have, keeps a GPU's list short. `turns_T`: in the order of these tokens."""
    if turns_T is not None:
        choice = choose(routing_map_TE.index_select(0, turns_T), assignments_per_token, most_per_token)
        tokens_P = turns_T.index_select(0, choice.tokens.clamp(max=choice.num_tokens - 1))
        flat_P = choice.experts.add(tokens_P, alpha=routing_map_TE.size(1)).clamp(max=routing_map_TE.numel() - 1)
        return replace(choice, flat=flat_P, turns_T=turns_T)
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
    """Indices that sort small non-negative integers (all at most `limit`), equal ones in their order.

    On the host by numpy, whose sort of 8 and 16 bit integers is a radix sort: 32768 keys of a byte take 0.05 ms,
    torch's sort of int64 0.8 ms.
    """
    if keys.device.type != "cpu" or limit > MAX_SHORT:
        return keys.argsort(stable=True)
    narrow = keys.to(torch.uint8 if limit <= MAX_BYTE else torch.int16)
    return torch.from_numpy(narrow.numpy().argsort(kind="stable"))


def sort_keys(keys: torch.Tensor, limit: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(sorted, order) of small non-negative integers (all at most `limit`), equal ones in their order."""
    if keys.device.type != "cpu":
        in_order, order = keys.sort(stable=True)
        return in_order, order
    order = stable_argsort(keys, limit)
    return keys[order], order


def starts_of(values: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Where each of `numbers`, which follow one another, begins in the sorted `values`, all of which are among them."""
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
    """All chunks of a pass: one sort, whatever their number.

    `rows_Q` count from the first row of an assignment's chunk; `slices` say where each chunk's assignments stand in the
    list, in the order of their rows. `of_chunk_Q` [2, Q], with several chunks: `chunk_bases` of each assignment's.
    """
    numbers = torch.arange(max(len(rows_Q), num_slots * len(num_rows), *num_rows), device=rows_Q.device)
    keys = slots_Q if of_chunk_Q is None else slots_Q + of_chunk_Q[0]
    in_order, ids_Q = sort_keys(keys, num_slots * len(num_rows))
    sorted_rows_Q = rows_Q.index_select(0, ids_Q)
    by_row_Q = torch.empty_like(ids_Q)
    by_row_Q[ids_Q] = numbers[: len(ids_Q)]
    if of_chunk_Q is not None:
        by_row_Q -= of_chunk_Q[1]
    row_order = [part for parts in slices for part in parts]
    by_row_Q, rows_Q = cut_list(by_row_Q, row_order), cut_list(rows_Q, row_order)
    chunks: list[Chunk] = []
    first = first_row = 0
    for i, (rows, parts) in enumerate(zip(num_rows, slices, strict=True)):
        part = slice(first, first + sum(each.stop - each.start for each in parts))
        slots = numbers[i * num_slots : (i + 1) * num_slots]
        ends = torch.searchsorted(in_order[part], slots, right=True, out_int32=True)
        sums = Sum(by_row_Q[part], starts_of(rows_Q[part], numbers[:rows]))
        chunks.append(Chunk(parts, part, first_row, rows, ids_Q[part], sorted_rows_Q[part], ends, sums))
        first, first_row = part.stop, first_row + rows
    return Chunks(chunks, ids_Q)


def chunk_bases(num_assignments: Sequence[int], num_slots: int) -> tuple[list[int], list[int]]:
    """For each chunk its number * `num_slots`, and where its assignments begin in a list of all chunks'."""
    firsts = accumulate(num_assignments[:-1], initial=0)
    return [i * num_slots for i in range(len(num_assignments))], list(firsts)


def read_ends(chunks: Sequence[Chunk]) -> None:
    """Tell the host where the slots' assignments end, of all these chunks in one copy."""
    ends = torch.cat([chunk.ends for chunk in chunks]) if len(chunks) > 1 else chunks[0].ends
    numbers = ends.tolist()
    for i, chunk in enumerate(chunks):
        chunk.host_ends = numbers[i * len(chunk.ends) : (i + 1) * len(chunk.ends)]


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


def dispatch_order(choice: Choice, places: Places, degrees: Sequence[int], apart: bool = False) -> DispatchOrder:
    """Sort the assignments by the rank that computes them, find the unique rows, and count them by chunks, of so many
    degrees. `apart`: each assignment is a row, so that what is added up of them knows nothing of ranks."""
    num_tokens, num_ranks, num_slots = choice.num_tokens, places.num_ranks, places.num_slots
    ranks_P, slots_P = places.ranks, places.slots
    if ranks_P.device.type == "cpu":
        order = stable_argsort(ranks_P, num_ranks)
        ranks_P, slots_P, tokens_P = ranks_P[order], slots_P[order], choice.tokens[order]
        keys_P = tokens_P.add(ranks_P, alpha=num_tokens)  # one for each row, ascending
    else:  # one number says it all: it is sorted, and taken apart
        codes_P = slots_P.add(choice.tokens.add(ranks_P, alpha=num_tokens), alpha=num_slots)
        if choice.may_be_padded:
            codes_P = codes_P.masked_fill(choice.tokens == num_tokens, num_ranks * num_tokens * num_slots)
        codes_P, order = codes_P.sort()
        keys_P = codes_P // num_slots
        ranks_P, slots_P = keys_P // max(num_tokens, 1), codes_P.sub(keys_P, alpha=num_slots)
        tokens_P = keys_P.sub(ranks_P, alpha=num_tokens)
    # Rows numbered one after the other; at the end, their number.
    is_new = torch.zeros(len(keys_P) + 1, dtype=torch.bool, device=keys_P.device)
    if len(keys_P):
        is_new[1:].fill_(True)
        if not apart:
            torch.ne(keys_P[1:], keys_P[:-1], out=is_new[1:-1])
    rows_P = is_new.cumsum(0)
    # The first and last keys of each rank's part of each chunk.
    cuts = [boundaries(num_tokens, degree) for degree in degrees]
    ends = [
        [[rank * num_tokens + token for cut in cuts for token in cut[side : len(cut) - 1 + side]] for side in (0, 1)]
        for rank in range(num_ranks)
    ]
    bounds = torch.searchsorted(keys_P, to_device(torch.tensor(ends), keys_P.device))  # [ranks, 2 ends, chunks]
    counted = [rows_P.take(bounds), bounds]
    if places.num_home < num_slots:
        counted.append(F.pad((slots_P < places.num_home).cumsum(0), (1, 0)).take(bounds))
    bounded = torch.stack(counted, dim=2)  # [ranks, 2 ends, kinds, chunks]
    first_rows = bounded[:, 0, 0, 0]
    if choice.may_be_padded:
        ranks_P = ranks_P.clamp(max=num_ranks - 1)
    rows_P = rows_P[:-1]
    packed_P = slots_P.add(rows_P - first_rows.index_select(0, ranks_P), alpha=num_slots)
    return DispatchOrder(order, tokens_P, rows_P, packed_P, num_slots, bounded[:, 1] - bounded[:, 0], apart)


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


def received_shifts(cut: ChunkOffsets) -> list[int]:
    """What to add to a received row's number in its rank for its number in its chunk, sorted by rank and token: by rank
    and chunk."""
    before, shifts = [0] * cut.degree, []
    for rows in cut.rows:
        for chunk in range(cut.degree):
            shifts.append(before[chunk] - sum(rows[:chunk]))
            before[chunk] += rows[chunk]
    return shifts


def sent_shifts(cut: ChunkOffsets) -> list[int]:
    """The same for a row's number among all that are sent."""
    firsts = accumulate((sum(rows) for rows in cut.rows[:-1]), initial=0)
    of_cells = [first for first in firsts for _ in range(cut.degree)]
    return [shift - first for shift, first in zip(received_shifts(cut), of_cells, strict=True)]


def combine_sums(
    row_tokens_U: torch.Tensor,
    num_tokens: int,
    cut: ChunkOffsets,
    shifts_U: torch.Tensor | None,
    turns_U: torch.Tensor | None = None,
) -> list[Sum]:
    """How each chunk's returned rows, in the order sent, are added up per token: in that order, or by `turns_U`, a
    permutation that keeps tokens in order. `shifts_U`, with several chunks: `sent_shifts` of each row's."""
    numbers = torch.arange(max(num_tokens, len(row_tokens_U)), device=row_tokens_U.device)
    if turns_U is None:
        in_order, index_U = sort_keys(row_tokens_U, num_tokens)
    else:
        index_U = torch.empty_like(turns_U)
        index_U[turns_U] = numbers[: len(turns_U)]
        in_order = row_tokens_U.index_select(0, index_U)
    if shifts_U is not None:
        index_U = (numbers[: len(row_tokens_U)] + shifts_U).index_select(0, index_U)
    tokens, sums, first = boundaries(num_tokens, cut.degree), [], 0
    for i, rows in enumerate(cut.total_rows()):
        part = slice(first, first + rows)
        sums.append(Sum(index_U[part], starts_of(in_order[part], numbers[tokens[i] : tokens[i + 1]])))
        first += rows
    return sums
