"""The ranks' parts of a sequence, without processes: together they are the whole, and work is even under a causal
mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from configs import derived
from configs.schema import Config, ModelConfig, MoEConfig, ParallelConfig, TrainingConfig
from parallel.context import cut_batch, position_ids, positions
from parallel.topology import Axis

NO_GROUP: Any = None  # nothing here communicates


def axes(size: int) -> list[Axis]:
    return [Axis(rank, size, NO_GROUP) for rank in range(size)]


def test_one_rank_has_it_all() -> None:
    (alone,) = axes(1)
    batch = {"tokens": torch.arange(12).view(2, 6), "sentence_label": torch.zeros(2)}
    assert cut_batch(batch, alone) is batch
    assert position_ids(batch["tokens"], alone).tolist() == [[0, 1, 2, 3, 4, 5]] * 2


@pytest.mark.parametrize("size", [2, 3])
def test_parts_are_the_whole_and_equal_work(size: int) -> None:
    length = 12
    parts = [positions(length, axis) for axis in axes(size)]
    assert torch.cat(parts).sort().values.tolist() == list(range(length))
    # Under a causal mask position i attends to i + 1 tokens.
    assert len({int((part + 1).sum()) for part in parts}) == 1


def test_a_cut_batch_knows_its_positions() -> None:
    tokens = 100 + torch.arange(8).repeat(3, 1)
    batch = {
        "tokens": tokens,
        "labels": tokens + 1,
        "loss_mask": tokens.float(),
        "padding_mask": torch.ones(3, 8, dtype=torch.bool),
        "sentence_label": torch.arange(3),
    }
    for axis, here in zip(axes(2), ([0, 1, 6, 7], [2, 3, 4, 5]), strict=True):
        cut = cut_batch(batch, axis)
        assert position_ids(cut["tokens"], axis).tolist() == [here] * 3
        assert cut["tokens"].tolist() == [[100 + i for i in here]] * 3 and torch.equal(cut["labels"], cut["tokens"] + 1)
        assert cut["loss_mask"].shape == (3, 4)
        assert cut["padding_mask"] is batch["padding_mask"] and cut["sentence_label"] is batch["sentence_label"]


@pytest.mark.parametrize(
    ("layout", "tokens"),
    [
        ({}, 192),
        # without expert parallelism each expert is split over the same ranks: they gather their tokens
        ({"tensor": 2}, 192),
        ({"tensor": 2, "expert": 2}, 96),
        ({"tensor": 2, "expert": 2, "expert_tensor": 2}, 192),
        ({"tensor": 2, "expert": 2, "context": 2}, 48),
    ],
)
def test_tokens_of_a_call(layout: dict[str, int], tokens: int) -> None:
    config = Config(
        model=ModelConfig(sequence_length=64),
        moe=MoEConfig(num_experts=4),
        parallel=ParallelConfig(**layout),  # type: ignore[arg-type]
        training=TrainingConfig(micro_batch_size=3),
    )
    assert derived.tokens_per_call(config) == tokens
