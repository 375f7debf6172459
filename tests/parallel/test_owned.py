"""Parameters outside Megatron-core's buffers: a training comes to the same whether a weight is owned or not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import distributed
from tests.parallel.owned_user import (
    Training,
    build_with,
    checkpoint_of,
    differences,
    largest,
    layouts,
    train,
)
from tests.tolerances import BF16_LOSS, FP32_GRAD_NORM, FP32_LOSS
from tests.training.test_step import batches_of, small

STEPS = 4
FP16_SCALE = 2**18  # overflows in some of the first steps, which are not taken


def config_of(precision: str, micro: int, *overrides: str) -> Any:
    scale = f"training.initial_loss_scale={FP16_SCALE}"
    return small("gpt_tiny", f"training.precision={precision}", scale, *overrides, micro=micro)


def on_ranks(ranks: int, training: Training, first: int = 1, last: int = STEPS) -> Any:
    return distributed.run(train, ranks, training, first, last)[0]


@pytest.mark.parametrize(("precision", "ranks", "micro"), layouts(["fp32", "bf16", "fp16"]))
def test_an_owned_weight_is_trained_as_any_other(tmp_path: Path, precision: str, ranks: int, micro: int) -> None:
    config = config_of(precision, micro, "optimizer.clip_grad=0")
    plain = Training(config, "none", tmp_path / "none")
    expected = on_ranks(ranks, plain)
    updated = [step[2] for step in expected]
    assert all(updated) if precision != "fp16" else True in updated and False in updated
    for user in ("whole", "part"):
        ours = Training(config, user, tmp_path / user)
        found = on_ranks(ranks, ours)
        assert [step[2] for step in found] == updated
        assert largest(found, expected, 1) < FP32_GRAD_NORM
        # Where a part's micro-batches are added up over the ranks before they are added to each other, sums differ.
        same_order = user == "whole" or ranks == 1 or micro * ranks == 8
        if same_order:
            assert [step[0] for step in found] == [step[0] for step in expected]
            assert differences(checkpoint_of(ours, STEPS), checkpoint_of(plain, STEPS)) == []
        else:
            assert largest(found, expected, 0) < (FP32_LOSS if precision == "fp32" else BF16_LOSS)
