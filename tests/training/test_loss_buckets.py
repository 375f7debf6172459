"""Evaluation losses by position and by the length of a document's piece, against sums that are taken token by token."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from data.document_lengths import SEGMENT_LENGTHS, bucket_name, segment_lengths
from data.samples import GPTSamples
from tests.data.test_samples import numbered
from training.loss_buckets import BY, LossBuckets, bucket_sums, mean_losses

pytestmark = pytest.mark.fast


def test_names_are_ranges_of_powers_of_two() -> None:
    assert [bucket_name(i) for i in range(6)] == ["0", "1", "2-3", "4-7", "8-15", "16-31"]


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 1000])
def test_every_value_has_its_bucket(length: int) -> None:
    count = length.bit_length() + 1
    values = torch.arange(length + 1)[None]
    sums = bucket_sums(torch.ones(1, length + 1), torch.ones(1, length + 1), values, count)
    wanted = [0] * count
    for value in range(length + 1):
        wanted[value.bit_length()] += 1
    assert sums[0].tolist() == sums[1].tolist() == wanted and wanted[-1] > 0


@pytest.mark.parametrize("separate", [True, False])
def test_means_are_those_of_single_tokens(tmp_path: Path, separate: bool) -> None:
    lengths = [1, 1, 30, 7, 100, 2, 60, 16]
    samples = GPTSamples([numbered(tmp_path / "a", lengths)], 32, seed=0, separate=separate)
    generator = torch.Generator().manual_seed(0)
    table = LossBuckets(32, torch.device("cpu"))
    by_hand: dict[tuple[str, str], list[float]] = {}
    for first in (0, 3):
        batch = {name: torch.from_numpy(array) for name, array in samples.batch(range(first, first + 3)).items()}
        batch["loss_mask"][2, 20:] = 0.0
        losses = torch.rand(3, 32, generator=generator)
        losses[2, 25] = torch.nan  # of a token that nobody predicts
        if separate:
            batch[SEGMENT_LENGTHS] = torch.from_numpy(segment_lengths(batch["positions"]))
        table.add(losses, batch)
        for row in range(3):
            for column in range(32):
                if not batch["loss_mask"][row, column]:
                    continue
                position = int(batch["positions"][row, column]) if separate else column
                found = {"position": position}
                if separate:
                    stops = np.flatnonzero(batch["positions"][row, column + 1 :].numpy() == 0)
                    found["length"] = position + 1 + (int(stops[0]) if len(stops) else 31 - column)
                for by, value in found.items():
                    by_hand.setdefault((by, bucket_name(value.bit_length())), []).append(float(losses[row, column]))
    means = mean_losses(table.sums)
    assert list(means) == (list(BY) if separate else ["position"])
    assert {(by, name) for by, each in means.items() for name in each} == set(by_hand)
    for (by, name), losses_of in by_hand.items():
        assert math.isclose(means[by][name], sum(losses_of) / len(losses_of), rel_tol=1e-12)
