"""Bytes of a blueprint's tensors on one rank."""

from __future__ import annotations

from configs import derived
from configs.derived import context_heads, rows_of_rank
from configs.schema import Config
from models.blueprint.operation import (
    BOOLEAN,
    FLOAT32,
    MODEL,
    OWN_PREDICTED,
    OWN_TOKENS,
    PEER_TOKENS,
    PLACE_TOKENS,
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
    """Rows and numbers of a config's tensors on one rank. Raises ValueError for rows, an axis or numbers that it does
    not know."""

    def __init__(self, config: Config, tile: int | None = None) -> None:
        """`tile`: so many of a rank's own rows alone; None: all."""
        parallel = config.parallel
        self.samples, self.length = config.training.micro_batch_size, config.model.sequence_length
        self.tokens = rows_of_rank(config)  # of all its tensor ranks
        if tile is not None:
            self.tokens = tile * (parallel.tensor if parallel.sequence else 1)
        self.place_tokens = self.tokens * context_heads(config)
        self.own_tokens = self.tokens // parallel.tensor if parallel.sequence else self.tokens
        self.element = derived.element_size(config)
        self.ranks = axis_sizes(config)
        peers = self.own_tokens * derived.expert_tensor_size(config)
        share = derived.predicted_share(config)
        self.predicted, self.own_predicted = int(self.tokens * share), int(self.own_tokens * share)
        self._rows = {
            TOKENS: self.tokens,
            PREDICTED: self.predicted,
            OWN_PREDICTED: self.own_predicted,
            OWN_TOKENS: self.own_tokens,
            PEER_TOKENS: peers,
            SAMPLES: self.samples,
            SCALAR: 1,
            PLACE_TOKENS: self.place_tokens,
        }
        self._bytes = {MODEL: self.element, FLOAT32: FP32, BOOLEAN: 1}

    def numbers(self, tensor: Tensor) -> int:
        """How many this rank has of it."""
        if tensor.rows not in self._rows:
            unknown("Sizes", f"rows of {tensor.name}", tensor.rows)
        if tensor.axis is not None and tensor.axis not in self.ranks:
            unknown("Sizes", f"axis of {tensor.name}", tensor.axis)
        return self._rows[tensor.rows] * (
            tensor.width if tensor.axis is None else tensor.width // self.ranks[tensor.axis]
        )

    def bytes(self, tensor: Tensor) -> int:
        """How much memory this rank needs for it."""
        if tensor.dtype not in self._bytes:
            unknown("Sizes", f"numbers of {tensor.name}", tensor.dtype)
        return self.numbers(tensor) * self._bytes[tensor.dtype]
