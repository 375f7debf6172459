"""Expert capacity: select the assignments that each expert keeps, with the same result in every parallel layout.

The selection is over all tokens of a micro-batch. Under sequence parallelism the tensor ranks hold the tokens in the
order of their ranks. Context parallel ranks hold them in any order; then each token has a turn, its position in the
micro-batch. A decision depends only on the values and on the order of the tokens, never on which of several equal
values a kernel finds first, so it is the same on every device.

Shapes: T this rank's tokens, E experts, R ranks, K the most assignments of one rank that an expert can keep.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

MAGNITUDE = 0x7FFFFFFF  # all bits of an fp32 number except the sign
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
    """Return a mask, bool [T, E], of those assignments in `chosen_TE` that experts keep: at most `capacity` per expert.

    With `policy` "position" an expert keeps its first tokens. With "probs" it keeps the tokens with the greatest
    `probs_TE` [T, E] (fp32, not negative), and among equals the first ones.

    `group`: the ranks that share the micro-batch's tokens evenly; None if this rank has them all. `positions_T`, int64
    [T]: each token's position in the micro-batch, unique over all ranks and below 2**31; None if it follows from rank
    and row.
    """
    size, rank = (1, 0) if group is None else (group.size(), group.rank())
    if capacity >= size * len(chosen_TE):
        return chosen_TE
    if positions_T is None and policy == "position":
        counts_RE = _gather(chosen_TE.sum(dim=0, dtype=torch.int32), size, group)
        return _first(chosen_TE, capacity - counts_RE[:rank].sum(dim=0))
    # One key per assignment, of which the greatest are kept: the policy's value, then the earlier turn if it is given.
    if positions_T is None:
        keys_TE = _bits(probs_TE)
    else:
        keys_TE = (LAST_TURN - positions_T)[:, None].expand_as(chosen_TE)
        if policy == "probs":
            keys_TE = keys_TE + (_bits(probs_TE).long() << TURN_BITS)
    keys_TE = keys_TE.masked_fill(~chosen_TE, -1)
    best_RKE = _gather(keys_TE.topk(min(capacity, len(keys_TE)), dim=0, sorted=False).values, size, group)
    least_E = best_RKE.flatten(0, 1).topk(capacity, dim=0, sorted=False).values.amin(dim=0)
    if positions_T is not None:
        return chosen_TE & (keys_TE >= least_E)
    capacity_left_E = capacity - (best_RKE > least_E).sum(dim=(0, 1)) - (best_RKE[:rank] == least_E).sum(dim=(0, 1))
    return (keys_TE > least_E) | _first(chosen_TE & (keys_TE == least_E), capacity_left_E)


def _bits(probs_TE: torch.Tensor) -> torch.Tensor:
    """Return int32 numbers that sort like the non-negative `probs_TE`. NaN is greatest, so that it is never dropped."""
    return probs_TE.detach().view(torch.int32) & MAGNITUDE


def _first(chosen_TE: torch.Tensor, count_E: torch.Tensor) -> torch.Tensor:
    return chosen_TE & (chosen_TE.cumsum(dim=0, dtype=torch.int32) <= count_E)


def _gather(own: torch.Tensor, size: int, group: dist.ProcessGroup | None) -> torch.Tensor:
    """All-gather a tensor over the group; return [R, ...]. Without a group R is 1."""
    if group is None:
        return own[None]
    everywhere = own.new_empty(size * len(own), *own.shape[1:])
    dist.all_gather_into_tensor(everywhere, own.contiguous(), group=group)
    return everywhere.view(size, *own.shape)
