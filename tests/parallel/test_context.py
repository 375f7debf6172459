"""The rows that context ranks hold of a micro-batch: what they are cut out of it, and put together again."""

from __future__ import annotations

import pytest
import torch

from configs import derived
from configs.schema import Config, ModelConfig, MoEConfig, ParallelConfig, TrainingConfig
from models.attention.sequence_rows import ALONG_THE_SEQUENCE, cut_batch, gather_rows, position_ids
from parallel.topology import initialize
from tests.distributed import run

SAMPLES, LENGTH = 3, 8


def test_positions_of_whole_samples() -> None:
    tokens = torch.zeros(2, 5, dtype=torch.long)
    assert position_ids(tokens).tolist() == [[0, 1, 2, 3, 4]] * 2


def test_a_cut_batch_is_one_sample_of_its_rows() -> None:
    number = torch.arange(SAMPLES * LENGTH).view(SAMPLES, LENGTH)
    batch = {
        **{name: 100 * i + number for i, name in enumerate(ALONG_THE_SEQUENCE)},
        "sentence_label": torch.arange(SAMPLES),
    }
    sequence_rows = torch.tensor([1, 0, 9, 23])  # in their own order, of several samples
    cut = cut_batch(batch, sequence_rows)
    for i, name in enumerate(ALONG_THE_SEQUENCE):
        assert cut[name].tolist() == [[100 * i + row for row in sequence_rows.tolist()]], name
    assert cut["sentence_label"] is batch["sentence_label"] and cut.keys() == batch.keys()


def gathered(size: int, dtype: torch.dtype) -> tuple[torch.Tensor, list[int]]:
    """Return the values of all rows that a rank gathers, and its own rows."""
    context = initialize(Config(parallel=ParallelConfig(context=size))).context
    order = torch.randperm(SAMPLES * LENGTH, generator=torch.Generator().manual_seed(0))
    sequence_rows = order.chunk(size)[context.rank]
    return gather_rows(_row_values(sequence_rows).to(dtype), sequence_rows, context, SAMPLES), sequence_rows.tolist()


def _row_values(sequence_rows: torch.Tensor) -> torch.Tensor:
    """Return values that identify each row: `[r, 2]`."""
    return torch.stack([sequence_rows, -sequence_rows], dim=1)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_all_ranks_have_all_rows_in_the_order_of_the_micro_batch(size: int, dtype: torch.dtype) -> None:
    found = run(gathered, size, size, dtype)
    expected = _row_values(torch.arange(SAMPLES * LENGTH)).to(dtype).view(SAMPLES, LENGTH, 2)
    for whole, _ in found:
        assert whole.dtype == dtype and torch.equal(whole, expected)
    assert sorted(row for _, sequence_rows in found for row in sequence_rows) == list(range(SAMPLES * LENGTH))


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
