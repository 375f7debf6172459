"""Sequences that several ranks share: which rows each place gets, and which keys and values it is sent, for the
documents that a micro-batch has.

`parallel.context` ranks make places of `context_heads` ranks each. A place's ranks exchange heads for rows, so that
each has all rows of the place for some of the heads; places exchange key and value rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from configs import derived
from configs.derived import context_heads, context_places, rows_of_rank
from configs.schema import Config
from models.attention.dealing import Deal, deal, exchanged_rows

Lengths = Sequence[int] | np.ndarray


@dataclass(frozen=True)
class SharedRows:
    """What context ranks do with a micro-batch, a mean over those that were dealt."""

    context: int
    heads: int  # ranks of a place, which exchange heads for rows
    places: int
    rows: int  # of one rank
    received: tuple[float, ...]  # key and value rows that are sent to each place for one attention
    rounds: int  # of attention, the place's own rows included: the most
    squares: float  # of the documents' full squares, what kernels compute: they take their runs' squares whole
    is_known: bool = True  # whether by documents' lengths; else by samples of one document, which exchange most

    @property
    def mean_received(self) -> float:
        """Key and value rows that are sent to a place in the mean: what a place sends as well."""
        return sum(self.received) / len(self.received)


def shared_rows(config: Config, micro_batches: Sequence[Lengths] | None = None) -> SharedRows:
    """Deal micro-batches with documents of these lengths; None: each sample is one document."""
    context, heads, places = config.parallel.context, context_heads(config), context_places(config)
    rows, is_causal = rows_of_rank(config), config.model.family == "gpt"
    is_known = micro_batches is not None or config.data.documents != "separate"
    if micro_batches is None:
        micro_batches = [[config.model.sequence_length] * config.training.micro_batch_size]
    if places == 1:
        return SharedRows(context, heads, 1, rows, (0.0,), 1, 1.0, is_known)
    received, squares, whole, most = np.zeros(places), 0.0, 0.0, 0
    for lengths in micro_batches:
        pieces = np.asarray(lengths, np.int64)
        keys = None if is_causal else pieces
        found = deal(pieces, places, keys=keys)
        of_places = exchanged_rows(found, pieces, keys)
        received += of_places
        most = max(most, int(of_places.max()))
        squares += _squares(found, pieces, is_causal)
        whole += float((pieces**2).sum())
    rounds = 1 + math.ceil(most / (rows * heads))
    means = tuple(float(number) for number in received / len(micro_batches))
    return SharedRows(context, heads, places, rows, means, rounds, squares / whole, is_known)


def _squares(found: Deal, pieces: np.ndarray, is_causal: bool) -> float:
    """Pairs that kernels compute: of each run the square, and all pairs with the rows of its piece before it."""
    ends = np.cumsum(pieces)
    cuts = np.union1d(found.first, ends - pieces)  # runs go over pieces' ends
    run = np.argsort(found.first)
    owner = np.searchsorted(found.first[run], cuts, side="right") - 1
    last = (found.first + found.length)[run][owner]
    piece = np.searchsorted(ends, cuts, side="right")
    length = np.minimum(np.append(cuts[1:], ends[-1]), last) - cuts
    before = cuts - (ends - pieces)[piece] if is_causal else pieces[piece] - length
    return float((length * (length + before)).sum())


# ---------------------------------------------------------------------------------------------------------------------
# Bytes
# ---------------------------------------------------------------------------------------------------------------------


def key_value_bytes(config: Config) -> int:
    """Bytes of one key and value row, of the heads that a rank attends with."""
    model, ranks = config.model, config.parallel.tensor * context_heads(config)
    groups = max(1, derived.num_query_groups(config) // ranks)
    if model.attention == "latent":
        groups = model.num_attention_heads // ranks
    return groups * sum(head_channels(config)) * derived.element_size(config)


def head_channels(config: Config) -> tuple[int, int]:
    """Channels of a key's and of a value's head."""
    head = derived.head_dim(config)
    if config.model.attention == "latent":
        return head + config.model.rotary_head_dim, config.model.value_head_dim
    return head, head
