"""Sizes of a blueprint's tensors on one rank."""

from __future__ import annotations

from collections.abc import Sequence

from configs import derived
from configs.derived import context_heads, rank_sequence_rows
from configs.schema import Config
from models.blueprint.operation import (
    BOOLEAN,
    EXCHANGED_TOKENS,
    FLOAT32,
    MODEL,
    OWN_PREDICTED,
    OWN_TOKENS,
    PEER_TOKENS,
    PREDICTED,
    SAMPLES,
    SCALAR,
    TOKENS,
    Tensor,
    axis_sizes,
    unknown,
)

FP32, INT64 = 4, 8


class Sizes:
    """Counts elements and bytes of a config's tensors on one rank. Methods raise ValueError for an unknown kind of
    rows, axis or dtype."""

    def __init__(self, config: Config, tile: int | None = None) -> None:
        """`tile`: count only this many of the rank's sequence rows; None: count all."""
        parallel = config.parallel
        self.samples, self.length = config.training.micro_batch_size, config.model.sequence_length
        self.tokens = rank_sequence_rows(config)  # of all tensor ranks of one context rank
        if tile is not None:
            self.tokens = tile * (parallel.tensor if parallel.sequence else 1)
        self.exchanged_tokens = self.tokens * context_heads(config)
        self.own_tokens = self.tokens // parallel.tensor if parallel.sequence else self.tokens
        self.element = derived.element_size(config)
        self.ranks = axis_sizes(config)
        peers = self.own_tokens * derived.expert_tensor_size(config)
        share = derived.predicted_share(config)
        self.predicted, self.own_predicted = int(self.tokens * share), int(self.own_tokens * share)
        self._rows_by_kind = {
            TOKENS: self.tokens,
            PREDICTED: self.predicted,
            OWN_PREDICTED: self.own_predicted,
            OWN_TOKENS: self.own_tokens,
            PEER_TOKENS: peers,
            SAMPLES: self.samples,
            SCALAR: 1,
            EXCHANGED_TOKENS: self.exchanged_tokens,
        }
        self._bytes = {MODEL: self.element, FLOAT32: FP32, BOOLEAN: 1}

    def numbers(self, tensor: Tensor) -> int:
        """Return the number of elements of a tensor on this rank."""
        if tensor.row_kind not in self._rows_by_kind:
            unknown("Sizes", f"rows of {tensor.name}", tensor.row_kind)
        if tensor.axis is not None and tensor.axis not in self.ranks:
            unknown("Sizes", f"axis of {tensor.name}", tensor.axis)
        return self._rows_by_kind[tensor.row_kind] * (
            tensor.width if tensor.axis is None else tensor.width // self.ranks[tensor.axis]
        )

    def bytes(self, tensor: Tensor) -> int:
        """Return the bytes of a tensor on this rank."""
        if tensor.dtype not in self._bytes:
            unknown("Sizes", f"numbers of {tensor.name}", tensor.dtype)
        return self.numbers(tensor) * self._bytes[tensor.dtype]


def format_bytes(num_bytes: float) -> str:
    """Return a number of bytes as text: in GiB from 0.1 GiB on, else in MiB."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 / 10 else f"{num_bytes / 2**20:.1f} MiB"


def format_size(num_bytes: float) -> str:
    """Return a number of bytes as text, in the largest unit from B to TiB of which there is at least one."""
    for unit, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.2f} {name}"
    return f"{num_bytes:.0f} B"


def format_count(number: float) -> str:
    """Return a number with three digits and its SI prefix, such as "1.23 G", for a unit to follow."""
    for unit, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= unit:
            return f"{number / unit:.3g} {letter}"
    return f"{number:.3g} "


def format_table(headings: Sequence[str], table_rows: Sequence[Sequence[str]]) -> str:
    """Return the lines of a table with right-aligned columns."""
    widths = [max(len(row[i]) for row in [headings, *table_rows]) for i in range(len(headings))]
    lines = [
        "  " + "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [headings, *table_rows]
    ]
    return "\n".join(lines)
