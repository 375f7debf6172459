"""Comparison of sizes of `parallel.context` that fit the layout: bytes exchanged for attention, operations, and a
rank's memory."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

from configs import derived
from configs.derived import rank_sequence_rows
from configs.rules import first_problem
from configs.schema import Config
from models import blueprint
from models.blueprint.operation import walk
from simulator.clock.experts import measured_rates
from simulator.communication import context_bytes
from simulator.context.shared_rows import Lengths, SharedRows, shared_rows
from simulator.flops import ATTENTION
from simulator.memory import rank_memory

BACKWARD = 2.5  # operations of the backward pass, with recomputed scores, divided by those of the forward pass


@dataclass(frozen=True)
class ContextSize:
    """A size of context parallelism and its costs for one rank, one layer's attention and one micro-batch, forward and
    backward pass.

    sent: bytes that it sends. flops: operations that it executes. memory: bytes that the fullest rank needs.
    """

    context: int
    heads: int
    rank_rows: int
    sent: float
    flops: float
    memory: int
    seconds: tuple[float, float] | None = None  # of the exchange and of the attention, from measured rates

    @property
    def ratio(self) -> float:
        """Bytes sent per thousand operations."""
        return 1000 * self.sent / self.flops


def layer_exchange(config: Config, shared: SharedRows) -> dict[str, float]:
    """Return the bytes that a rank sends for a layer's attention and a micro-batch: of "heads" and of "rounds"."""
    return context_bytes(config, blueprint.layer(config, False).operations, shared)


def attention_flops(config: Config, attended_share: float | None = None) -> float:
    """Return a rank's operations for a layer's attention and a micro-batch, counting only the pairs that attend."""
    share = derived.attended_share(config) if attended_share is None else attended_share
    pairs = share / 2 if config.model.family == "gpt" else 1.0
    times = sum(
        (forwards + BACKWARD) * operation.flops
        for operation, forwards in walk(blueprint.layer(config, False).operations)
        if operation.kind in ATTENTION
    )
    return times * pairs * rank_sequence_rows(config) / config.parallel.tensor


def context_sizes(
    config: Config,
    vocab_size: int,
    world_size: int,
    device: str,
    attended_share: float | None = None,
    documents: Sequence[Lengths] | None = None,
) -> list[ContextSize]:
    """Return every size that fits the layout of these ranks, the smallest first; sizes other than the config's have
    their default heads."""
    rates, found = measured_rates(config, device), list[ContextSize]()
    for changed in layouts(config, world_size):
        shared = shared_rows(changed, documents)
        sent, flops = sum(layer_exchange(changed, shared).values()), attention_flops(changed, attended_share)
        most = max(rank.total for rank in rank_memory(changed, vocab_size, world_size, device))
        seconds = None if rates is None else (sent / rates[0], flops / rates[1])
        found.append(ContextSize(shared.context, shared.heads, shared.rows, sent, flops, most, seconds))
    return found


def layouts(config: Config, world_size: int) -> list[Config]:
    """Return the config with each size of context that is legal on this many ranks and gives them equal rows."""
    most, found = world_size // (config.parallel.tensor * config.parallel.pipeline), []
    tokens = config.training.micro_batch_size * config.model.sequence_length
    for context in range(1, most + 1):
        changed = copy.deepcopy(config)
        changed.parallel.context = context
        if context != config.parallel.context:
            changed.parallel.context_heads = None
        divisor = context * (config.parallel.tensor if config.parallel.sequence else 1)
        if most % context == 0 and tokens % divisor == 0 and first_problem(changed, world_size) is None:
            found.append(changed)
    return found
