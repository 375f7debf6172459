"""Expert capacity: select the assignments that each expert keeps, with the same result in every parallel layout.

The selection is over all tokens of a micro-batch. Under sequence parallelism the tensor ranks hold the tokens in the
order of their ranks. Context parallel ranks hold them in any order; then each token has a turn, its position in the
micro-batch. A decision depends only on the values and on the order of the tokens, never on which of several equal
values a kernel finds first, so it is the same on every device.

Shapes: T this rank's tokens, E experts, R ranks, K the most assignments that one rank can add to an expert's capacity.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

MAGNITUDE = 0x7FFFFFFF  # of an fp32 number: all bits but the sign
TURN_BITS = 31  # bits of a token's turn: with the 31 bits of its probability they fit an int64
LAST_TURN = 2**TURN_BITS - 1


def keep(
    probs_TE: torch.Tensor,
    chosen_TE: torch.Tensor,
    capacity: int,
    policy: str,
    group: dist.ProcessGroup | None = None,
    positions_T: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return bool [T, E]: the assignments of `chosen_TE` that their experts keep, at most `capacity` per expert.

    With `policy` "position" an expert keeps its first tokens, with "probs" those with the greatest `probs_TE` [T, E]
    (fp32, not negative), the first ones among equals. `group`: the ranks that hold the micro-batch's tokens, the same
    number each; None if this rank holds them all. `positions_T`, int64 [T], unique over all ranks and below 2**31: the
    position of each token, if it does not follow from rank and row.
    """
    size, rank = (1, 0) if group is None else (group.size(), group.rank())
    if capacity >= size * len(chosen_TE):
        return chosen_TE
    if positions_T is not None:
        # One key per assignment, the greatest are kept: ordered by the policy's value, then by earlier turns.
        keys_TE = (LAST_TURN - positions_T)[:, None].expand_as(chosen_TE)
        if policy == "probs":
            keys_TE = keys_TE + (_bits(probs_TE).long() << TURN_BITS)
        keys_TE = keys_TE.masked_fill(~chosen_TE, -1)
        best_KE = keys_TE.topk(min(capacity, len(keys_TE)), dim=0, sorted=False).values
        least_E = _gather(best_KE, size, group).flatten(0, 1).topk(capacity, dim=0, sorted=False).values.amin(dim=0)
        return chosen_TE & (keys_TE >= least_E)
    if policy == "position":
        counts_RE = _gather(chosen_TE.sum(dim=0, dtype=torch.int32), size, group)
        return _first(chosen_TE, capacity - counts_RE[:rank].sum(dim=0))
    bits_TE = _bits(probs_TE).masked_fill(~chosen_TE, -1)
    best_KE = bits_TE.topk(min(capacity, len(bits_TE)), dim=0, sorted=False).values
    best_RKE = _gather(best_KE, size, group)
    least_E = best_RKE.flatten(0, 1).topk(capacity, dim=0, sorted=False).values.amin(dim=0)
    capacity_left_E = capacity - (best_RKE > least_E).sum(dim=(0, 1)) - (best_RKE[:rank] == least_E).sum(dim=(0, 1))
    return (bits_TE > least_E) | _first(chosen_TE & (bits_TE == least_E), capacity_left_E)


def _bits(probs_TE: torch.Tensor) -> torch.Tensor:
    """Return int32 numbers that sort like the non-negative `probs_TE`; NaN is the greatest, so it is never dropped."""
    return probs_TE.detach().view(torch.int32) & MAGNITUDE


def _first(chosen_TE: torch.Tensor, count_E: torch.Tensor) -> torch.Tensor:
    return chosen_TE & (chosen_TE.cumsum(dim=0, dtype=torch.int32) <= count_E)


def _gather(own: torch.Tensor, size: int, group: dist.ProcessGroup | None) -> torch.Tensor:
    """All-gather a tensor over the group: [R, ...], with R = 1 without a group."""
    if group is None:
        return own[None]
    everywhere = own.new_empty(size * len(own), *own.shape[1:])
    dist.all_gather_into_tensor(everywhere, own.contiguous(), group=group)
    return everywhere.view(size, *own.shape)
