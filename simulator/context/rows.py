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
from configs.schema import Config
from models.blueprint.sharing import context_heads, context_places, rows_of_rank

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
    squares: float  # what is computed of the documents' full squares, for queries before whose rows no key is skipped
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
    received, computed, whole = np.zeros(places), 0.0, 0.0
    most = 0
    for lengths in micro_batches:
        of_documents = np.asarray(lengths, np.int64)
        runs = deal(of_documents, places)
        of_places = exchanged_rows(runs, of_documents, is_causal, places)
        received += of_places
        most = max(most, int(of_places.max()))
        begins = np.cumsum(of_documents) - of_documents
        document = np.searchsorted(begins, runs.first, side="right") - 1
        # pairs of a run: with the rows before it, and its own square
        earlier = runs.first - begins[document] if is_causal else of_documents[document] - runs.length
        computed += float((runs.length * (runs.length + earlier)).sum())
        whole += float((of_documents**2).sum())
    rounds = 1 + math.ceil(most / (rows * heads))
    means = tuple(float(number) for number in received / len(micro_batches))
    return SharedRows(context, heads, places, rows, means, rounds, computed / whole, is_known)


# ---------------------------------------------------------------------------------------------------------------------
# Dealing: every document zig-zag over all places
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Runs:
    """Runs of rows, int64 `[n]` each: whose they are, the first row of the micro-batch, and how many."""

    place: np.ndarray
    first: np.ndarray
    length: np.ndarray


def deal(lengths: np.ndarray, places: int) -> Runs:
    """Rows of documents that lie one after the other."""
    found: list[tuple[int, int, int]] = []
    begin = 0
    for length in lengths.tolist():
        cuts = [begin + length * number // (2 * places) for number in range(2 * places + 1)]
        for number, (first, end) in enumerate(zip(cuts, cuts[1:])):
            if end > first:
                found.append((min(number, 2 * places - 1 - number), first, end - first))
        begin += length
    columns = np.array(found, dtype=np.int64).reshape(-1, 3).T
    return Runs(*(np.ascontiguousarray(column) for column in columns))


def exchanged_rows(runs: Runs, lengths: np.ndarray, is_causal: bool, places: int) -> np.ndarray:
    """Key and value rows that each place is sent, int64 `[places]`: those that some query of its attends to and that
    are not its own."""
    ends = np.cumsum(lengths)
    document = np.searchsorted(ends, runs.first, side="right")
    begins = ends - lengths
    last = np.zeros((places, len(lengths)), np.int64)  # of the keys of each document that a place asks for
    own = np.zeros((places, len(lengths)), np.int64)
    reach = runs.first + runs.length - begins[document] if is_causal else lengths[document]
    np.maximum.at(last, (runs.place, document), reach)
    np.add.at(own, (runs.place, document), runs.length)
    return (last - own).sum(1)


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
