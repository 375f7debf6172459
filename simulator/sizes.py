"""Sizes of a blueprint's tensors on one rank."""

from __future__ import annotations

from collections.abc import Sequence

from configs import derived
from configs.schema import Config
from models.blueprint import operation
from models.blueprint.operation import Tensor, axis_sizes, unknown

FP32, INT64 = 4, 8


class Sizes:
    """Counts elements and bytes of tensors on one rank. Raises ValueError for an unknown kind of row, axis or dtype."""

    def __init__(self, config: Config, tile: int | None = None) -> None:
        """Derive the dimensions of one rank's tensors from a config. `tile`: count this many sequence rows, those of a
        tile; None: all rows."""
        parallel = config.parallel
        self.samples, self.length = config.training.micro_batch_size, config.model.sequence_length
        self.tokens = derived.rank_sequence_rows(config)  # of all tensor ranks of one context rank
        if tile is not None:
            self.tokens = tile * (parallel.tensor if parallel.sequence else 1)
        self.exchanged_tokens = self.tokens * derived.context_heads(config)
        self.own_tokens = self.tokens // parallel.tensor if parallel.sequence else self.tokens
        self.element = derived.element_size(config)
        self.ranks = axis_sizes(config)
        share = derived.predicted_share(config)
        self.predicted = int(self.tokens * share)
        self._rows_by_kind = {
            operation.TOKENS: self.tokens,
            operation.PREDICTED: self.predicted,
            operation.OWN_PREDICTED: int(self.own_tokens * share),
            operation.OWN_TOKENS: self.own_tokens,
            operation.PEER_TOKENS: self.own_tokens * derived.expert_tensor_size(config),
            operation.SAMPLES: self.samples,
            operation.SCALAR: 1,
            operation.EXCHANGED_TOKENS: self.exchanged_tokens,
        }
        self._bytes = {operation.MODEL: self.element, operation.FLOAT32: FP32, operation.BOOLEAN: 1}

    def numbers(self, tensor: Tensor) -> int:
        """Return the number of elements of a tensor on this rank."""
        if tensor.row_kind not in self._rows_by_kind:
            unknown("Sizes", f"rows of {tensor.name}", tensor.row_kind)
        if tensor.axis is not None and tensor.axis not in self.ranks:
            unknown("Sizes", f"axis of {tensor.name}", tensor.axis)
        width = tensor.width if tensor.axis is None else tensor.width // self.ranks[tensor.axis]
        return self._rows_by_kind[tensor.row_kind] * width

    def bytes(self, tensor: Tensor) -> int:
        """Return the bytes of a tensor on this rank."""
        if tensor.dtype not in self._bytes:
            unknown("Sizes", f"number type of {tensor.name}", tensor.dtype)
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
    lines = [headings, *table_rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  " + "  ".join(f"{cell:>{width}}" for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
