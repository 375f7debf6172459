"""Measured costs of placement: medians of rounds, used if they are plausible, and kept for later starts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from moe.placement.cost_measurement import LARGE, ROUNDS, SMALL, Measured, grade, implausible, peer_of
from moe.placement.policy import ASSUMED
from moe.placement.quotas import Costs
from training.callbacks.moe import expert_migration
from training.callbacks.moe.expert_migration import ExpertMigration

pytestmark = pytest.mark.fast

CPU = ASSUMED["cpu"]
US = 1e-6


def rounds(overhead: int, in_node: int, between: int) -> list[list[float]]:
    """Of a machine on which an assignment takes 2 us."""
    trips = in_node, between, 3 * in_node, 3 * between
    row = [2 * US * (overhead + SMALL), 2 * US * (overhead + LARGE), *(2 * US * trip for trip in trips)]
    return [list(row) for _ in range(ROUNDS)]


def test_a_busy_moment_changes_nothing() -> None:
    measured = rounds(10, 400, 900)
    for spoiled in measured[:4]:
        spoiled[:] = [1.0, 0.0, 30.0, 1e-9, 40.0, 1e-9]
    found = grade(measured, CPU)
    assert (
        found.costs == Costs(10, 400, 900, 1200, 2700)
        and found.assignment == pytest.approx(2 * US)
        and found.problem is None
    )


LONGER = "512 assignments of an expert took"


@pytest.mark.parametrize(
    ("measured", "said"),
    [
        (rounds(10, 273_080, 0), "a replica inside a node took as long as 1092320 assignments; expected 1 to 16384"),
        (rounds(10, 0, 273_080), "a replica between nodes took as long as 1092320 assignments"),
        (rounds(100_000, 400, 0), "the overhead per expert took as long as 100000 assignments; expected 0 to 512"),
        ([[5 * US, 5 * US, US, 0.0, US, 0.0]] * ROUNDS, f"{LONGER} 5e-06 s, no longer than 64 (5e-06 s)"),
        ([[5 * US, 4 * US, US, 0.0, US, 0.0]] * ROUNDS, f"{LONGER} 4e-06 s, no longer than 64 (5e-06 s)"),
        (rounds(0, 1, 0), None),
        (rounds(0, 400, 0), None),
    ],
)
def test_implausible_costs_are_not_used(measured: list[list[float]], said: str | None) -> None:
    found = grade(measured, CPU)
    assert found.problem is None if said is None else found.problem is not None and found.problem.startswith(said)


def test_a_replica_inside_a_node_stays_there() -> None:
    assert [peer_of(rank, 1, 2) for rank in range(4)] == [1, 0, 3, 2]
    assert [peer_of(rank, -2, 4) for rank in range(4)] == [2, 3, 0, 1]


def test_what_is_assumed_is_plausible() -> None:
    assert [implausible(costs, costs) for costs in ASSUMED.values()] == [None] * len(ASSUMED)


def test_costs_are_those_that_the_config_asks_for_at_each_start(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[Measured] = []
    monkeypatch.setattr(expert_migration, "measure", lambda *_: measured.pop())
    monkeypatch.setattr(expert_migration, "layers_of", lambda _: {})

    def start(asked: str, state: dict[str, Any] | None, ranks: int = 2) -> tuple[dict[str, Any], str]:
        said: list[str] = []
        callback = ExpertMigration()
        if state is not None:
            callback.load_state_dict(state)
        callback._ranks, callback._ranks_per_node = ranks, ranks
        config = SimpleNamespace(moe=SimpleNamespace(placement=SimpleNamespace(costs=asked)))
        device = SimpleNamespace(type="cpu")
        topology = SimpleNamespace(device=device, expert=SimpleNamespace(group=None))
        run: Any = SimpleNamespace(
            config=config, topology=topology, engine=SimpleNamespace(bare_chunks=[]), log=said.append
        )
        callback._set_costs(run)
        kept = {
            "expert_ranks": ranks,
            "costs": callback._costs.as_dict(),
            "costs_asked": callback._asked,
            "device": "cpu",
        }
        return kept, " ".join(said)

    first, second, noise = Costs(10, 400, 400), Costs(12, 500, 500), Costs(0, 1_092_322, 1_092_322)
    state, said = start("assumed", None)
    assert state["costs"] == CPU.as_dict() and said == ""
    measured.append(Measured(first, 2 * US, None))
    state, said = start("measured", state)  # though an earlier start assumed
    assert state["costs"] == first.as_dict()
    assert [state["costs"][name] for name in ("piece", "copy_in_node", "copy_between")] == [10, 400, 400]
    assert "10 assignments for the overhead per expert, 400 for a replica inside a node and 400 between nodes" in said
    state, said = start("measured", state)  # and keeps them
    assert state["costs"] == first.as_dict() and "measured at an earlier start" in said
    measured.append(Measured(second, 2 * US, None))
    state, said = start("measured", state, ranks=4)
    assert state["costs"] == second.as_dict() and not measured
    state, said = start("assumed", state, ranks=4)
    assert state["costs"] == CPU.as_dict() and "assumed, no longer those measured" in said
    measured.append(Measured(noise, 2 * US, "too much"))
    state, said = start("measured", state, ranks=4)
    assert state["costs"] == CPU.as_dict() and "not plausible: too much" in said
    state, said = start("measured", state, ranks=4)  # a run repeats, also with these
    assert state["costs"] == CPU.as_dict() and "assumed, as the measured ones were not plausible" in said
