"""Comparison of the possible sizes of `parallel.context`: bytes exchanged for attention, FLOPs, and a rank's memory."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

from configs import derived
from configs.derived import rank_sequence_rows
from configs.job import Job
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
    """A size of context parallelism, with a rank's costs of one layer's attention for one micro-batch, in both passes.

    `sent`: bytes that a rank sends; `flops`: that a rank executes; `memory`: device bytes of the fullest rank.
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
        """Bytes sent per thousand FLOPs."""
        return 1000 * self.sent / self.flops


def layer_exchange(config: Config, shared: SharedRows) -> dict[str, float]:
    """Return the bytes that a rank sends for one layer's attention per micro-batch: for "heads" and for "rounds"."""
    return context_bytes(config, blueprint.layer(config, False).operations, shared)


def attention_flops(config: Config, attended_share: float | None = None) -> float:
    """Return a rank's FLOPs for one layer's attention per micro-batch; only pairs of tokens that attend count."""
    share = derived.attended_share(config) if attended_share is None else attended_share
    pairs = share / 2 if config.model.family == "gpt" else 1.0
    times = sum(
        (forwards + BACKWARD) * operation.flops
        for operation, forwards in walk(blueprint.layer(config, False).operations)
        if operation.kind in ATTENTION
    )
    return times * pairs * rank_sequence_rows(config) / config.parallel.tensor


def context_sizes(
    job: Job, attended_share: float | None = None, documents: Sequence[Lengths] | None = None
) -> list[ContextSize]:
    """Compare all sizes of `parallel.context` that this number of ranks allows, smallest first.

    Sizes other than the config's use the default number of ranks that exchange heads.
    """
    rates, found = measured_rates(job.config, job.device), list[ContextSize]()
    for changed in layouts(job.config, job.world_size):
        shared = shared_rows(changed, documents)
        sent, flops = sum(layer_exchange(changed, shared).values()), attention_flops(changed, attended_share)
        most = max(rank.total for rank in rank_memory(replace(job, config=changed)))
        seconds = None if rates is None else (sent / rates[0], flops / rates[1])
        found.append(ContextSize(shared.context, shared.heads, shared.rows, sent, flops, most, seconds))
    return found


def layouts(config: Config, world_size: int) -> list[Config]:
    """Return copies of the config with each allowed size of parallel.context that gives all ranks equally many rows."""
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
