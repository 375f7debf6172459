"""How many tokens make a tile of the loss. Neither torch nor Megatron-core is imported here: the simulator reads it."""

from __future__ import annotations

# Up to here all tokens are one tile, whose arithmetic is Megatron-core's, number by number.
FEW_TOKENS = 512
LEAST_TILE = 128  # tokens: fewer make slow matrix products
MOST_TILES = 64
# Tiles that share a product for the weight's gradient, whose buffer it reads and writes: in fp32, in half precision.
WIDE_GROUP, HALF_GROUP = 2, 4
BLOCK_NUMBERS = 2**20  # of a half-precision weight's gradient that are made at once


def token_tile(tokens: int, chosen: int | None = None) -> int:
    """Tokens of a tile where a micro-batch has `tokens`, of all tensor ranks; `chosen` is `training.token_tile`."""
    if chosen is not None:
        return min(chosen, tokens)
    return tokens if tokens <= FEW_TOKENS else max(LEAST_TILE, tokens // MOST_TILES)
