"""How context ranks share a micro-batch's rows and the heads of attention."""

from __future__ import annotations

import math

from configs import derived
from configs.schema import Config


def context_heads(config: Config) -> int:
    """How many of the context ranks exchange heads for rows: chosen, as many as have key heads of their own."""
    if config.parallel.context_heads is not None:
        return config.parallel.context_heads
    if chosen := getattr(derived, "context_heads", None):
        number: int = chosen(config)
        return number
    heads = config.model.num_attention_heads if config.model.attention == "latent" else derived.num_query_groups(config)
    return math.gcd(config.parallel.context, heads // config.parallel.tensor)


def context_places(config: Config) -> int:
    """Groups of context ranks that exchange keys and values with each other."""
    return config.parallel.context // context_heads(config)


def rows_of_rank(config: Config) -> int:
    """A micro-batch's rows on one context rank, those of all its samples together; without context all of them."""
    return config.training.micro_batch_size * config.model.sequence_length // config.parallel.context
