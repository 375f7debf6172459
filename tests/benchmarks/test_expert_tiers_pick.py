"""What the measurement of the planner's places for experts asks, and how it judges them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.kit.expert_tiers_rig import VOCABULARY
from benchmarks.speed.expert_tiers_pick import GROUPS, RESIDENT, Case, Group, Row, planned, rates_of, words
from configs.job import Job
from simulator.clock.predict import predict_step

pytestmark = pytest.mark.fast
CASES = [(group, case) for group in GROUPS for case in group.cases]


def test_there_are_sixteen_cases_of_all_kinds() -> None:
    assert len(CASES) == 16 and {case.fits for _, case in CASES} == {"device", "host", "disk"}
    assert {group.shape.micro_batches for group in GROUPS} == {1, 2, 4}
    assert {group.shape.precision for group in GROUPS} == {"bf16", "fp32"} and {g.ranks for g in GROUPS} == {1, 2}


@pytest.mark.parametrize(("group", "case"), CASES)
def test_a_case_has_a_pick_and_rivals(group: Group, case: Case) -> None:
    found = planned(group, case, 1.0)
    assert found.pick in found.predicted and len(found.predicted) > 1
    assert (RESIDENT in found.predicted) == (case.fits == "device")
    assert any(way[0] == "host" for way in found.predicted) == (case.fits != "disk")
    assert found.hardware["host.up"] == found.rates.link and found.hardware["products.half"] == found.rates.flops


@pytest.mark.parametrize("group", [group for group in GROUPS if group.shape.micro_batches > 3])
def test_few_micro_batches_stand_for_all(group: Group) -> None:
    for case in group.cases:
        found = planned(group, case, 1.0)
        for way, seconds in found.predicted.items():
            config = group.config(way)
            every = predict_step(Job(config, group.ranks, VOCABULARY, "cpu"), found.hardware, with_spans=True)
            assert every.seconds == pytest.approx(seconds, rel=1e-3), (case, way)


def test_a_case_takes_its_seconds() -> None:
    group, case = CASES[0]
    rates, slower = (rates_of(group, case, scale) for scale in (1.0, 2.0))
    assert (rates.flops, rates.link, rates.disk) == (2 * slower.flops, 2 * slower.link, 2 * slower.disk)
    assert group.shape.operations / rates.flops == case.computing


def test_a_pick_holds_within_the_bar_or_two_errors() -> None:
    row = Row("", CASES[0][1], RESIDENT, ("host", "by_layer"), {}, {}, 1.0, 1.0, 1.0, 0.0, {})
    assert row.holds and replace(row, ratio=1.05).holds and not replace(row, ratio=1.06).holds
    assert replace(row, ratio=1.06, error=0.03).holds and not replace(row, ratio=1.06, error=0.02).holds
    assert words(row.pick) == "resident" and words(row.rival) == "host by_layer" and words(None) == "none"
