"""Trials of plans that are predicted to be about as fast: each gets its turns, the fastest one wins."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter

import pytest

from moe.plan import Plan
from moe.planner import CLOSE, Decision, Limits, Planner, Prediction, best_plan, close_plans, memory_bytes, total
from moe.trial import MOST, TURNS, Choice, Trial
from parallel.costs import Line
from tests.moe.test_planner import load_of, simple


def _choice(degree: int, seconds: float, kind: str = "flat") -> Choice:
    return kind, Decision(Plan(degree, degree), Prediction(seconds, 0.0, 0))


def test_one_plan_needs_no_trial() -> None:
    alone = Trial([_choice(1, 1.0)], 2)
    assert alone.is_over and alone.factors("flat") == {}
    assert Trial([_choice(1, 1.0), _choice(2, 2.0)], 2).is_over  # the other one is far off


def test_only_a_few_of_the_closest_are_tried() -> None:
    choices = [_choice(degree, 1.0 + degree / 1000) for degree in range(9, 0, -1)]
    assert [decision.plan.degree for _, decision in Trial(choices, 1).choices] == list(range(1, MOST + 1))


@pytest.mark.parametrize("num_layers", [1, 2, 3, 4, 7])
def test_each_layer_runs_each_plan_as_often(num_layers: int) -> None:
    trial = Trial([_choice(1, 1.0), _choice(2, 1.01), _choice(4, 1.02)], num_layers)
    turns: list[list[int]] = []
    while not trial.is_over:
        turns.append([trial.choice(layer)[1].plan.degree for layer in range(num_layers)])
        trial.took([1.0] * num_layers)
    first = -(-3 // num_layers)  # until all have made their buffers
    assert {degree for step in turns[:first] for degree in step} == {1, 2, 4}
    for of_layer in zip(*turns[first:], strict=True):
        assert len(set(Counter(of_layer).values())) == 1 and set(of_layer) == {1, 2, 4}
    assert (len(turns) - first) * num_layers >= 3 * TURNS


def test_the_fastest_wins_whatever_the_layers_and_the_noise() -> None:
    rng = random.Random(0)
    for _ in range(50):
        num_layers = rng.randint(1, 5)
        layers = [rng.uniform(0.1, 10.0) for _ in range(num_layers)]  # some have more to do
        true = {degree: rng.uniform(0.9, 1.1) for degree in (1, 2, 4, 8)}
        trial = Trial([_choice(degree, 1.0 + 0.001 * degree) for degree in true], num_layers)
        while not trial.is_over:
            degrees = [trial.choice(layer)[1].plan.degree for layer in range(num_layers)]
            trial.took([scale * true[degree] * rng.uniform(0.999, 1.001) for scale, degree in zip(layers, degrees, strict=True)])
        factors = trial.factors("flat")
        expected = {plan.degree: factor * (1.0 + 0.001 * plan.degree) for plan, factor in factors.items()}
        assert true[min(expected, key=expected.__getitem__)] <= 1.005 * min(true.values())


def test_each_all_to_all_learns_its_own() -> None:
    trial = Trial([_choice(1, 1.0, "flat"), _choice(1, 1.0, "hierarchical")], 2)
    while not trial.is_over:
        trial.took([2.0 if trial.choice(layer)[0] == "flat" else 1.0 for layer in range(2)])
    assert trial.factors("flat")[Plan(1, 1)] == pytest.approx(2 * trial.factors("hierarchical")[Plan(1, 1)])


def test_a_trial_can_be_stopped() -> None:
    trial = Trial([_choice(1, 1.0), _choice(2, 1.0)], 1)
    trial.took([1.0])
    assert not trial.is_over
    trial.stop()
    assert trial.is_over


def test_what_fits_an_even_load_may_not_fit_another() -> None:
    costs, load = simple(Line(1e-4, 1e-8)), load_of(4096)
    plan = best_plan(costs, load).plan
    planner = Planner(costs, Limits(memory_budget=memory_bytes(load, plan)))
    assert planner.fits(plan, load) and not planner.fits(plan, load_of(8192))
    assert Planner(costs).fits(plan, load_of(8192))


def test_close_plans_begin_with_the_best_and_differ() -> None:
    costs, load = simple(Line(1e-4, 1e-8)), load_of(4096)
    plans = close_plans(costs, load)
    assert plans[0] == best_plan(costs, load) and len(plans) > 1
    assert all(total(decision) <= (1 + CLOSE) * total(plans[0]) * (1 + 1e-9) for decision in plans)
    assert len({decision.plan for decision in plans}) == len(plans)


def test_a_planner_goes_by_what_it_learned() -> None:
    costs, load = simple(Line(1e-4, 1e-8)), load_of(4096)
    planner = Planner(costs)
    first, second, *_ = planner.close(load)
    assert planner.decide(load) == first
    planner.learn({first.plan: 1.2, second.plan: 0.8})
    assert planner.decide(load) == second
    # It stays a prediction of the model, for whoever compares it with what is measured.
    assert dataclasses.asdict(planner.decide(load).prediction) == dataclasses.asdict(second.prediction)
