"""Experts off the device on the pretended one, against the same training with all experts on it."""

from __future__ import annotations

import dataclasses

import pytest

from tests.cuda import cases, sync_points
from tests.cuda.cases import CASES

pytestmark = [pytest.mark.cuda_pretended]

OFF_DEVICE = ("moe.weights_device", "moe.shard_weights")
NAME = "experts' parts on the disk by layer"
MUTANTS = [
    "a slot for weights that is free",
    "weights of experts",
    "weights of experts that are updated",
    "a slot for gradients that is free",
]


def test_experts_off_the_device_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses of two steps and an evaluation, without a fault, or a wait that the table does not have."""
    outcomes = cases.run(NAME, "cuda")
    found = cases.faults(outcomes) + cases.wrong_waits(NAME, outcomes)
    assert not found, "\n".join(found)
    resident = [each for each in CASES[NAME].overrides if not each.startswith(OFF_DEVICE)]
    monkeypatch.setitem(CASES, NAME, dataclasses.replace(CASES[NAME], overrides=tuple(resident)))
    for ours, theirs in zip(outcomes, cases.run(NAME, "cuda"), strict=True):
        assert ours.losses == theirs.losses
        assert ours.grad_norms == pytest.approx(theirs.grad_norms, rel=1e-14)


@pytest.mark.parametrize("what", MUTANTS)
def test_what_experts_must_wait_for_is_missed(what: str) -> None:
    mutant, case = sync_points.MUTANTS[what]
    assert cases.noticed(case, mutant)
