"""The size of the loss's tiles in tokens. Imports neither torch nor Megatron-core, because the simulator imports it."""

from __future__ import annotations

# Up to here all tokens are one tile, whose arithmetic is Megatron-core's, number by number.
FEW_TOKENS = 512
LEAST_TILE = 128  # tokens: fewer make slow matrix products
MOST_TILES = 64
# Tiles per product for the weight's gradient, which reads and writes its whole buffer: in fp32, in half precision.
WIDE_GROUP, HALF_GROUP = 2, 4
BLOCK_NUMBERS = 2**20  # elements of a half-precision weight's gradient that are computed at once


def token_tile(tokens: int, chosen: int | None = None) -> int:
    """Return the number of tokens in a tile of the loss, over all tensor ranks, for a micro-batch of `tokens` tokens.
    `chosen`: training.token_tile."""
    if chosen is not None:
        return min(chosen, tokens)
    return tokens if tokens <= FEW_TOKENS else max(LEAST_TILE, tokens // MOST_TILES)
