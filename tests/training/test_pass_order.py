"""training.pass_order=by_layer: the same bits as by micro-batch where no table is shared, close ones where one is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from configs import derived
from tests import distributed
from tests.tolerances import FP32_LOSS
from tests.training.helpers import make_config

VOCAB_SIZE = 500
BY_LAYER = "training.pass_order=by_layer"
COMMON = (
    "training.recompute=full",
    "training.global_batch_size=12",
    "training.micro_batch_size=2",
    "model.num_layers=3",
    "model.sequence_length=32",
    "model.backend=portable",
    "model.tie_embeddings=false",
)
Numbers = list[tuple[Any, ...]]


def _steps(overrides: Sequence[str]) -> Numbers:
    """Losses and norms of three steps, with an evaluation and passes that are run again in between, and at the end sums of
    the weights."""
    import torch
    import torch.distributed as dist

    from parallel import topology
    from training.engine import Engine
    from training.starting.dry_run import made_up_batches
    from training.step import evaluate, run_again, train_step

    config = make_config(overrides, dist.get_world_size())
    place = topology.initialize(config)
    engine = Engine(config, place, VOCAB_SIZE)
    batches = made_up_batches(config, derived.num_micro_batches(config, place.world_size), VOCAB_SIZE, place.data.rank)
    numbers: Numbers = []
    for step in (1, 2, 3):
        if step == 3:
            numbers.append(evaluate(engine, iter([batches])))
            run_again(engine, batches)
        result = train_step(engine, batches, step)
        assert result.updated
        counts = None if result.tokens_per_expert is None else result.tokens_per_expert.tolist()
        numbers.append((result.loss, result.grad_norm, result.extra, counts, result.by_layer))
    engine.settle()
    weights = [parameter.detach().double().sum() for chunk in engine.bare_chunks for parameter in chunk.parameters()]
    numbers.append(tuple(torch.stack(weights).tolist()))
    engine.close()
    return numbers
