"""Operations of a step with separate documents: those that the plan has for its pairs, and those that torch counts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.speed.plan_accuracy import _formulas
from configs.schema import Config
from data.document_lengths import attended_pairs, share_of
from simulator.flops import executed_flops_per_token
from tests import distributed
from tests.training.helpers import make_config

LENGTH, VOCAB_SIZE = 256, 512
SIZES = [
    "experiment=gpt_tiny",
    "data.documents=separate",
    "model.num_layers=2",
    f"model.sequence_length={LENGTH}",
    "training.global_batch_size=2",
    "training.micro_batch_size=2",
    "training.device=cpu",
    "checkpoint=off",
]


def positions_of(mean: int) -> torch.Tensor:
    """Return positions int64 [2, LENGTH] of documents of all lengths with this mean."""
    lengths = np.random.default_rng(mean).geometric(1 / mean, 2 * LENGTH)
    token_numbers = np.arange(lengths.sum())
    in_document = token_numbers - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return torch.from_numpy(np.minimum(in_document, token_numbers % LENGTH)[: 2 * LENGTH].reshape(2, LENGTH))


def counted(config: Config, means: list[int]) -> list[float]:
    """Operations a token that torch counts in a step, for each mean length."""
    from torch.utils.flop_counter import FlopCounterMode

    from parallel import topology
    from training.engine import Engine
    from training.starting.dry_run import made_up_batches
    from training.step import train_step

    model = Engine(config, topology.initialize(config), VOCAB_SIZE)
    (batch,) = made_up_batches(config, 1, VOCAB_SIZE)
    train_step(model, [batch], 1)
    found = []
    for mean in means:
        batch["positions"] = positions_of(mean)
        with FlopCounterMode(display=False, custom_mapping=_formulas()) as counter:
            train_step(model, [batch], 2)
        found.append(counter.get_total_flops() / (2 * LENGTH))
    model.close()
    return found


def test_operations_are_those_of_the_pairs() -> None:
    config, means = make_config(SIZES), [10, 40, 100_000]
    shares = [share_of(config, attended_pairs(config, positions_of(mean))) for mean in means]
    assert shares[0] < 0.2 < shares[1] < 0.6 and shares[2] == 1.0
    measured = distributed.run(counted, 1, config, means)[0]
    for share, flops in zip(shares, measured, strict=True):
        planned = executed_flops_per_token(config, VOCAB_SIZE, "cpu", share)
        assert planned == pytest.approx(flops, rel=0.01), share
    assert measured[0] < 0.95 * measured[2]
