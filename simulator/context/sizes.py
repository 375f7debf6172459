"""Which size of `parallel.context` pays: what each that fits the layout exchanges for its attention, and what memory it
leaves a rank with."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

from configs import derived
from configs.derived import rows_of_rank
from configs.rules import first_problem
from configs.schema import Config
from models import blueprint
from models.blueprint.operation import walk
from simulator.clock.measured import measured_rates
from simulator.communication import of_context
from simulator.context.rows import Lengths, SharedRows, shared_rows
from simulator.flops import ATTENTION
from simulator.memory import rank_memory

BACKWARD = 2.5  # times its forward pass, with the scores made again


@dataclass(frozen=True)
class ContextSize:
    """A size, with what one rank has of a layer's attention and a micro-batch, forward and backward pass: bytes that
    it sends, operations that it carries out; and the bytes that the fullest rank needs."""

    context: int
    heads: int
    rows: int
    sent: float
    flops: float
    memory: int
    seconds: tuple[float, float] | None = None  # of the exchange and of the attention, by measured costs

    @property
    def ratio(self) -> float:
        """Bytes for a thousand operations."""
        return 1000 * self.sent / self.flops


def layer_exchange(config: Config, shared: SharedRows) -> dict[str, float]:
    """Bytes that a rank sends for a layer's attention and a micro-batch: of "heads" and of "rounds"."""
    return of_context(config, blueprint.layer(config, False).operations, shared)


def attention_flops(config: Config, attended_share: float | None = None) -> float:
    """Operations of one rank for a layer's attention and a micro-batch: of the pairs that attend alone."""
    share = derived.attended_share(config) if attended_share is None else attended_share
    pairs = share / 2 if config.model.family == "gpt" else 1.0
    times = sum(
        (forwards + BACKWARD) * operation.flops
        for operation, forwards in walk(blueprint.layer(config, False).operations)
        if operation.kind in ATTENTION
    )
    return times * pairs * rows_of_rank(config) / config.parallel.tensor


def context_sizes(
    config: Config,
    vocab_size: int,
    world_size: int,
    device: str,
    attended_share: float | None = None,
    documents: Sequence[Lengths] | None = None,
) -> list[ContextSize]:
    """Every size that fits the layout of these ranks, the smallest first; those of other sizes than the config's with
    heads as they are chosen."""
    rates, found = measured_rates(config, device), list[ContextSize]()
    for changed in layouts(config, world_size):
        shared = shared_rows(changed, documents)
        sent, flops = sum(layer_exchange(changed, shared).values()), attention_flops(changed, attended_share)
        most = max(rank.total for rank in rank_memory(changed, vocab_size, world_size, device))
        seconds = None if rates is None else (sent / rates[0], flops / rates[1])
        found.append(ContextSize(shared.context, shared.heads, shared.rows, sent, flops, most, seconds))
    return found


def layouts(config: Config, world_size: int) -> list[Config]:
    """The config with each size of context that is legal on so many ranks, and gives them equal rows."""
    most, found = world_size // (config.parallel.tensor * config.parallel.pipeline), []
    tokens = config.training.micro_batch_size * config.model.sequence_length
    for context in range(1, most + 1):
        changed = copy.deepcopy(config)
        changed.parallel.context = context
        if context != config.parallel.context:
            changed.parallel.context_heads = None
        parts = context * (config.parallel.tensor if config.parallel.sequence else 1)
        if most % context == 0 and tokens % parts == 0 and first_problem(changed, world_size) is None:
            found.append(changed)
    return found
