"""The planner against a simulator of its own, written the plain way: exchanges one by one, many cost models at once."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from benchmarks.speed.predicted_gains import closed_form_degree, closed_form_seconds
from moe.chunk_plan import STRATEGIES, LayerLoad, Plan
from moe.planning import footprint
from moe.planning.costs import DEGREES, LayerCosts, Limits
from moe.planning.footprint import memory_bytes
from moe.planning.planner import Planner, allowed_degrees, best_plan, predict, rounded_up, weight_lags
from moe.planning.timing import backward_seconds, forward_seconds
from parallel.costs.models import NOTHING, Curve, Line

pytestmark = pytest.mark.fast

MARGIN, NO_SLACK = 0.02, 0.05  # what the planner documents
DEPTH = 2  # what the schedule documents
Case = tuple[LayerCosts, LayerLoad]

# ---------------------------------------------------------------------------------------------------------------------
# The reference: arrays over cases
# ---------------------------------------------------------------------------------------------------------------------


class Machine:
    """A program, a link with a queue of exchanges, and a copy engine, for many cases at once."""

    def __init__(self, cases: list[Case]) -> None:
        self.now = np.zeros(len(cases))
        self.slow_program = np.array([costs.compute_slowdown for costs, _ in cases])
        self.slow_link = np.array([costs.exchange_slowdown for costs, _ in cases])
        self.queue: list[np.ndarray] = []  # what is left of each exchange, in the order sent
        self.first = 0  # exchanges before this one are over in all cases
        self.copies_end = np.zeros(len(cases))

    def _live(self, end: int) -> range:
        while self.first < end and not self.queue[self.first].any():
            self.first += 1
        return range(self.first, end)

    def compute(self, work: np.ndarray) -> None:
        for i in self._live(len(self.queue)):
            # Both run side by side until this exchange or the work is done, whichever is first.
            left, needed = self.queue[i] * self.slow_link, work * self.slow_program
            link_first = left <= needed
            self.now = self.now + np.where(link_first, left, needed)
            self.queue[i] = np.where(link_first, 0.0, self.queue[i] - needed / self.slow_link)
            work = np.where(link_first, work - left / self.slow_program, 0.0)
        self.now = self.now + work

    def send(self, seconds: np.ndarray) -> int:
        self.queue.append(seconds)
        return len(self.queue)

    def wait(self, exchange: int) -> None:
        for i in self._live(exchange):
            self.now = self.now + self.queue[i]
            self.queue[i] = np.zeros_like(self.now)

    def copy_host(self, seconds: np.ndarray) -> np.ndarray:
        self.copies_end = np.where(seconds > 0, np.maximum(self.copies_end, self.now) + seconds, self.copies_end)
        return self.copies_end

    def wait_for_copy(self, end: np.ndarray) -> None:
        idle = np.maximum(end - self.now, 0.0)
        self.now = self.now + idle
        for i in self._live(len(self.queue)):
            done = np.minimum(idle, self.queue[i])
            self.queue[i] = self.queue[i] - done
            idle = idle - done


class Reference:
    """Both passes of many cases, as the schedule runs them."""

    def __init__(self, cases: list[Case]) -> None:
        self.cases = cases
        self._known: dict[tuple[str, int], np.ndarray] = {}

    def times(self, name: str, degree: int) -> np.ndarray:
        if (name, degree) not in self._known:
            self._known[name, degree] = np.array([_seconds(costs, load, name, degree) for costs, load in self.cases])
        return self._known[name, degree]

    def _operation(self, degree: int) -> Callable[[str], np.ndarray]:
        return lambda name: self.times(name, degree)

    def forward(self, name: str, degree: int, backward_degree: int) -> np.ndarray:
        of, strategy, machine = self._operation(degree), STRATEGIES[name], Machine(self.cases)
        out = of("rows out") * (strategy.token_rows == "offload") + of("hidden out") * (
            strategy.preactivations == "offload"
        )
        by_program = of("copies by program")
        machine.now = of("counts")
        assignments = machine.send(of("pairs"))
        dispatches: list[int] = []
        combines: list[int] = []

        def dispatch() -> None:
            machine.compute(of("gather"))
            dispatches.append(machine.send(of("exchange")))
            machine.compute(of("post"))

        def add_up(i: int) -> None:
            machine.wait(combines[i])
            machine.compute(of("home sum"))

        for _ in range(min(DEPTH, degree)):
            dispatch()
        machine.compute(of("shared forward"))
        machine.wait(assignments)
        for cut in {degree, backward_degree}:
            for _ in range(cut):
                machine.compute(self.times("prepare", cut))
        for i in range(degree):
            if i + DEPTH < degree:
                dispatch()
            machine.wait(dispatches[i])
            machine.compute(of("forward"))
            combines.append(machine.send(of("exchange")))
            machine.compute(of("post"))
            machine.compute(out * by_program)
            machine.copy_host(out * (1 - by_program))
            if i >= DEPTH:
                add_up(i - DEPTH)
        for i in range(max(0, degree - DEPTH), degree):
            add_up(i)
        mixed = of("mixed rest") if degree != backward_degree else 0.0
        return np.maximum(np.maximum(machine.now, machine.copies_end) + of("forward rest") + mixed, 0.0)

    def backward(self, name: str, degree: int, lag: int, same: bool) -> np.ndarray:
        of, strategy, machine = self._operation(degree), STRATEGIES[name], Machine(self.cases)
        token_rows, preactivations = strategy.token_rows == "offload", strategy.preactivations == "offload"
        copied_in = of("rows in") * token_rows + of("hidden in") * preactivations
        by_program = of("copies by program")
        dispatches: list[int] = []
        combines: list[int] = []
        host_copies: list[np.ndarray] = []
        weights_done = 0

        def dispatch() -> None:
            for _ in range(1 + (strategy.token_rows == "communicate")):
                machine.compute(of("gather"))
                last = machine.send(of("exchange"))
                machine.compute(of("post"))
            dispatches.append(last)

        def fetch() -> None:
            machine.compute(copied_in * by_program)
            host_copies.append(machine.copy_host(copied_in * (1 - by_program)))

        def add_up(i: int) -> None:
            machine.wait(combines[i])
            machine.compute(of("home sum"))

        for _ in range(min(DEPTH, degree)):
            dispatch()
        fetch()
        machine.compute(of("shared backward"))
        for i in range(degree):
            if i + DEPTH < degree:
                dispatch()
            if i + 1 < degree:
                fetch()
            machine.wait(dispatches[i])
            machine.wait_for_copy(host_copies[i])
            if strategy.preactivations == "recompute":
                machine.compute(of("recompute"))
            if strategy.preactivations == "keep" and not same:
                machine.compute(of("regroup"))
            machine.compute(of("input gradients"))
            combines.append(machine.send(of("exchange")))
            machine.compute(of("post"))
            if i == degree - 1:
                assignments = machine.send(of("pair gradients"))
            while weights_done <= i - lag:
                machine.compute(of("weight gradients"))
                weights_done += 1
            if i >= DEPTH:
                add_up(i - DEPTH)
        for _ in range(weights_done, degree):
            machine.compute(of("weight gradients"))
        for i in range(max(0, degree - DEPTH), degree):
            add_up(i)
        machine.wait(assignments)
        return np.maximum(machine.now + of("backward rest"), 0.0)


def _seconds(costs: LayerCosts, load: LayerLoad, name: str, degree: int) -> float:
    token_rows, assignments, size = load.token_rows / degree, load.assignments / degree, load.element_size
    row_bytes, hidden_bytes = token_rows * load.hidden_size * size, assignments * load.hidden_columns * size
    away_pairs = load.assignments * load.away_rows / max(load.token_rows, 1)
    return {
        "exchange": lambda: costs.exchange(load.away_rows / degree * load.hidden_size * size),
        "pairs": lambda: costs.exchange(8 * away_pairs),
        "pair gradients": lambda: costs.exchange(4 * away_pairs),
        "gather": lambda: costs.gather(token_rows),
        "post": lambda: costs.post(token_rows),
        "home sum": lambda: costs.combine_sum(token_rows),
        "prepare": lambda: costs.prepare(assignments),
        "regroup": lambda: costs.regroup(assignments),
        "forward": lambda: costs.forward(assignments),
        "recompute": lambda: costs.recompute(assignments),
        "input gradients": lambda: costs.input_gradients(assignments),
        "weight gradients": lambda: costs.weight_gradients(assignments),
        "rows out": lambda: costs.copy_out(row_bytes),
        "hidden out": lambda: costs.copy_out(hidden_bytes),
        "rows in": lambda: costs.copy_in(row_bytes),
        "hidden in": lambda: costs.copy_in(hidden_bytes),
        "copies by program": lambda: float(costs.copies_by_program),
        "counts": lambda: costs.count_exchange,
        "shared forward": lambda: costs.shared_forward,
        "shared backward": lambda: costs.shared_backward,
        "forward rest": lambda: costs.forward_rest(degree),
        "backward rest": lambda: costs.backward_rest(degree),
        "mixed rest": lambda: costs.mixed_rest,
    }[name]()


def reference_scores(cases: list[Case]) -> Iterator[tuple[Plan, np.ndarray, np.ndarray]]:
    """Every plan with its forward and backward seconds [cases]."""
    reference = Reference(cases)
    for name, strategy in STRATEGIES.items():
        offloads = "offload" in (strategy.token_rows, strategy.preactivations)
        forwards = {
            (degree, other): reference.forward(name, degree, other)
            for degree, other in itertools.product(DEGREES, repeat=2)
            if degree == other or not offloads
        }
        for same, other in itertools.product((True, False), DEGREES):
            for lag in range(min(other, 2)):
                backward = reference.backward(name, other, lag, same)
                for degree in DEGREES:
                    if (degree == other) is same and (degree, other) in forwards:
                        yield Plan(degree, other, name, lag), forwards[degree, other], backward


# ---------------------------------------------------------------------------------------------------------------------
# Random cases
# ---------------------------------------------------------------------------------------------------------------------


def random_case(rng: random.Random) -> Case:
    """From links that cost nothing to links that cost ten times the computation, with startups from none to much."""

    def some(low: float, high: float, nothing: float = 0.0) -> float:
        return 0.0 if rng.random() < nothing else 10 ** rng.uniform(low, high)

    def curve(rate: float, nothing: float = 0.0) -> Curve:
        knee, factor = some(1, 3), 0.0 if rng.random() < nothing else rate * some(-0.3, 0.3)
        sizes = (1.0, knee, 8 * knee, 64 * knee)
        return Curve(sizes, tuple(factor * max(size, knee * rng.uniform(0.2, 1.0)) for size in sizes))

    def rest(pair_time: float) -> Line | Curve:
        if rng.random() < 0.5:
            return NOTHING
        return Curve((1.0, 2.0, 4.0, 8.0), tuple(rng.uniform(-100, 400) * pair_time for _ in range(4)))

    tokens = rng.choice((0, 1, 2, 7, 300, 4096, 16384))
    token_rows = int(tokens * rng.uniform(0.5, 2.0))
    away, assignments = int(token_rows * rng.choice((0.0, 0.5, 0.75, 1.0))), int(token_rows * rng.uniform(1.0, 4.0))
    load = LayerLoad(
        tokens=tokens,
        token_rows=token_rows,
        away_rows=away,
        assignments=assignments,
        hidden_size=rng.choice((64, 512, 2048)),
        hidden_columns=rng.choice((128, 2048)),
        width=rng.choice((64, 1024)),
        element_size=rng.choice((2, 4)),
        block=rng.choice((1024, 2**62)),
    )
    pair_time = some(-8, -5)
    byte_time = pair_time / load.hidden_size / load.element_size * some(-1.5, 1.5)
    costs = LayerCosts(
        exchange=Line(some(-6, -2, 0.2), byte_time if rng.random() < 0.9 else 0.0),
        gather=Line(some(-6, -3, 0.3), pair_time * some(-3, -1, 0.3)),
        combine_sum=Line(some(-6, -3, 0.3), pair_time * some(-3, -1, 0.3)),
        forward=curve(pair_time),
        recompute=curve(0.5 * pair_time, 0.2),
        input_gradients=curve(pair_time),
        weight_gradients=curve(pair_time, 0.1),
        post=Line(some(-6, -3, 0.3), pair_time * some(-3, -1, 0.3)),
        prepare=Line(some(-6, -3, 0.3), pair_time * some(-3, -1, 0.3)),
        regroup=Line(some(-6, -3, 0.3), pair_time * some(-3, -1, 0.3)),
        copy_out=Line(some(-6, -4, 0.3), byte_time * some(-1, 1)),
        copy_in=Line(some(-6, -4, 0.3), byte_time * some(-1, 1)),
        compute_slowdown=rng.choice((1.0, rng.uniform(1.0, 2.0))),
        exchange_slowdown=rng.choice((1.0, rng.uniform(1.0, 2.0))),
        count_exchange=some(-5, -3, 0.5),
        shared_forward=some(-4, -2, 0.5),
        shared_backward=some(-4, -2, 0.5),
        copies_by_program=rng.random() < 0.3,
        forward_rest=rest(pair_time),
        backward_rest=rest(pair_time),
        mixed_rest=some(-4, -2, 0.5),
    )
    return costs, load


def random_budget(load: LayerLoad, rng: random.Random) -> int | None:
    if rng.random() < 0.2:
        return None
    least = min(memory_bytes(load, Plan(degree, degree, name)) for name in STRATEGIES for degree in (1, 16))
    most = memory_bytes(load, Plan())
    return int(least + rng.random() * (1.2 * most - least))


# ---------------------------------------------------------------------------------------------------------------------
# Tests
# ---------------------------------------------------------------------------------------------------------------------


def score(plan: Plan, forward: Any, backward: Any) -> Any:
    """What is compared: seconds, more for passes in several chunks, and more again without a lag."""
    no_slack = NO_SLACK * (plan.backward_degree > 1 and plan.weight_lag == 0)
    return forward * (1 + MARGIN * (plan.degree > 1)) + backward * (1 + MARGIN * (plan.backward_degree > 1) + no_slack)


def check_solver(num_cases: int, num_budgets: int, seed: int) -> tuple[set[Plan], int]:
    """Fail unless the solver's plan is the best of all in each of `num_cases` random cases; the first `num_budgets`
    have budgets.

    Returns the plans that were the best of some case, and in how many nothing fitted and the solver said so.
    """
    rng = random.Random(seed)
    cases = [random_case(rng) for _ in range(num_cases)]
    budgets = [random_budget(load, rng) if i < num_budgets else None for i, (_, load) in enumerate(cases)]
    best: np.ndarray = np.full(num_cases, np.inf)
    allowed_tokens = np.array([max(load.tokens, 1) for _, load in cases])
    limit: np.ndarray = np.array([np.inf if budget is None else budget for budget in budgets])
    memory = _Memory([load for _, load in cases[:num_budgets]])
    passes: dict[Plan, tuple[np.ndarray, np.ndarray]] = {}
    for plan, forward, backward in reference_scores(cases):
        total = score(plan, forward, backward)
        fits = (np.pad(memory.bytes(plan), (0, num_cases - num_budgets)) <= limit) & (
            allowed_tokens >= max(plan.degree, plan.backward_degree)
        )
        best = np.where(fits, np.minimum(best, total), best)
        passes[plan] = forward, backward
    seen: set[Plan] = set()
    refused = 0
    for i, (costs, load) in enumerate(cases):
        limits = Limits(memory_budget=budgets[i])
        if not np.isfinite(best[i]):
            with pytest.raises(ValueError, match="moe.memory_budget"):
                best_plan(costs, load, limits)
            refused += 1
            continue
        decision = best_plan(costs, load, limits)
        plan, prediction = decision.plan, decision.prediction
        one, other = (float(seconds[i]) for seconds in passes[plan])
        assert prediction.forward == pytest.approx(one, rel=1e-9, abs=1e-15)
        assert prediction.backward == pytest.approx(other, rel=1e-9, abs=1e-15)
        assert score(plan, one, other) == pytest.approx(best[i], rel=1e-9, abs=1e-15), (costs, load, limits, plan)
        assert prediction.memory == memory_bytes(load, plan) <= limit[i]
        seen.add(plan)
    return seen, refused


def test_solver_equals_brute_force_over_all_plans() -> None:
    seen, refused = check_solver(700, 250, seed=3)  # 10,000: python -m benchmarks.checks.solver_check
    # The cases are worth something: many different plans are the best of some.
    assert {plan.degree for plan in seen} == {plan.backward_degree for plan in seen} == set(DEGREES)
    assert {plan.memory_strategy for plan in seen} == set(STRATEGIES)
    assert {plan.weight_lag for plan in seen} == {0, 1}
    assert 0 < refused < 250 // 4


class _Memory:
    """`memory_bytes` of many loads at once, from the function itself: given a strategy, a pass at a time."""

    def __init__(self, loads: list[LayerLoad]) -> None:
        self.loads = loads
        self._known: dict[tuple[int | str | bool, ...], np.ndarray] = {}

    def bytes(self, plan: Plan) -> np.ndarray:
        strategy, same = STRATEGIES[plan.memory_strategy], plan.degree == plan.backward_degree
        name, lag = plan.memory_strategy, plan.weight_lag
        kept = self._numbers((name,), lambda load: footprint.kept_bytes(load, strategy))
        forward = self._numbers((name, plan.degree), lambda load: footprint.forward_bytes(load, strategy, plan.degree))
        backward = self._numbers(
            (name, plan.backward_degree, lag, same),
            lambda load: footprint.backward_bytes(load, strategy, plan.backward_degree, lag, same),
        )
        return kept + np.maximum(forward, backward)

    def _numbers(self, key: tuple[int | str | bool, ...], of: Callable[[LayerLoad], int]) -> np.ndarray:
        if key not in self._known:
            self._known[key] = np.array([of(load) for load in self.loads])
        return self._known[key]


def simple(exchange: Line = NOTHING, experts: float = 1e-6, **more: object) -> LayerCosts:
    """No costs but those of the exchange and, per assignment, of the experts."""
    curve = Curve((0.0, 1.0), (0.0, experts))
    return LayerCosts(exchange, NOTHING, NOTHING, curve, curve, curve, curve, **more)  # type: ignore[arg-type]


def load_of(tokens: int = 1024, away: float = 1.0) -> LayerLoad:
    sizes: dict[str, Any] = {"hidden_size": 64, "hidden_columns": 256, "width": 128, "element_size": 4}
    return LayerLoad(tokens=tokens, token_rows=tokens, away_rows=int(away * tokens), assignments=2 * tokens, **sizes)


def test_hand_computed_schedules() -> None:
    # Two chunks; a chunk's exchange takes 3, its experts 2: D0 D1 C0 C1 fill the link to 12.
    load = load_of(2)
    costs = simple(Line(3.0, 0.0), 1.0)
    assignments = 3.0  # the packed ids and weights travel first, the gradients of the weights last
    assert forward_seconds(costs, load, Plan(1, 1)) == pytest.approx(assignments + 3 + 4 + 3)
    assert forward_seconds(costs, load, Plan(2, 2)) == pytest.approx(assignments + 12)
    # Backward in one chunk: the weight gradients hide the answer, and begin to hide what follows it.
    assert backward_seconds(costs, load, Plan(1, 1)) == pytest.approx(3 + 4 + 3 + assignments)
    # In two: D0 0-3, inputs 3-5, C0 6-9 behind D1 3-6, weights 5-7, inputs 7-9 (D1 is there), C1 9-12, weights 9-11,
    # assignments 12-15.
    assert backward_seconds(costs, load, Plan(2, 2)) == pytest.approx(12 + assignments)
    # Rows again: D0 I0 D1 I1 to 12, C0 behind them; inputs of 0 6-8, of 1 12-14, weights to 16; C1 15-18, assignments
    # 18-21.
    assert backward_seconds(costs, load, Plan(2, 2, "communicate")) == pytest.approx(18 + assignments)
    # Hidden activations computed again take 2 more per chunk: inputs 3-7, weights 7-9, 9-13, weights 13-15, C1 13-16.
    assert backward_seconds(costs, load, Plan(2, 2, "recompute")) == pytest.approx(16 + assignments)


def test_slowdown_while_both_are_busy() -> None:
    # One chunk in two: experts of chunk 0 (2 seconds) beside the dispatch of chunk 1 (1 second), which is slowed to 2
    # seconds in which the experts do 1 second's work.
    slow = {"compute_slowdown": 2.0, "exchange_slowdown": 2.0}
    costs = simple(Line(1.0, 0.0), 1.0, **slow)
    load = load_of(2)
    # Assignments 0-1, D0 1-2; experts 0 beside D1 to 4, alone to 5; C0 beside experts 1: C0 to 7, experts to 8; C1 to
    # 9.
    assert forward_seconds(costs, load, Plan(2, 2)) == pytest.approx(9.0)


def test_ties_and_small_gains_stay_in_one_chunk() -> None:
    nothing = simple(experts=0.0)
    assert best_plan(nothing, load_of()).plan == Plan()
    # Without a link there is nothing to hide; nor is there where no row travels.
    assert best_plan(simple(), load_of()).plan == Plan()
    assert best_plan(simple(Line(1e-3, 1e-9)), load_of(away=0.0)).plan == Plan()
    # An exchange that takes a share of the computation: hiding it gains about as much, with two chunks half of it.
    load = load_of()
    experts_seconds, row_bytes = 1e-6 * load.assignments, load.away_rows * 64 * 4
    for share, expected in ((0.002, False), (0.1, True)):
        plan = best_plan(
            simple(Line(0.0, share * experts_seconds / row_bytes)), load, Limits(strategies=("keep",))
        ).plan
        assert (plan.degree > 1) is expected and (plan.backward_degree > 1) is expected


@pytest.mark.parametrize("tokens", [0, 1, 2, 3])
def test_degenerate_loads(tokens: int) -> None:
    costs = simple(Line(1e-9, 1e-3), 1e-3)
    decision = best_plan(costs, load_of(tokens))
    assert max(decision.plan.degree, decision.plan.backward_degree) <= max(tokens, 1)
    assert decision.prediction.memory == memory_bytes(load_of(tokens), decision.plan)
    # A degree that was set by hand is kept, whatever the tokens.
    assert best_plan(costs, load_of(tokens), Limits(degrees=(4,), backward_degrees=(2,))).plan.degree == 4


def test_limits_are_kept() -> None:
    costs, load = simple(Line(1e-5, 1e-8)), load_of()
    free = best_plan(costs, load)
    assert free.plan.degree > 1
    plan = best_plan(costs, load, Limits(degrees=(3,), backward_degrees=(5,), strategies=("communicate",))).plan
    assert (plan.degree, plan.backward_degree, plan.memory_strategy) == (3, 5, "communicate")
    plan = best_plan(costs, load, Limits(degrees=(1, 4), backward_degrees=(2, 4), strategies=("offload",))).plan
    assert (plan.degree, plan.backward_degree) == (4, 4)
    for limits, message in (
        (Limits(degrees=()), "must be one or more numbers of chunks"),
        (Limits(backward_degrees=(0, 1)), "backward_degrees"),
        (Limits(strategies=("keep", "save")), "communicate_recompute"),
        (Limits(strategies=()), "strategies"),
        (Limits(degrees=(1,), backward_degrees=(2,), strategies=("offload",)), "must have a number of chunks in"),
    ):
        with pytest.raises(ValueError, match=message):
            best_plan(costs, load, limits)


def test_budgets_from_everything_to_nothing() -> None:
    costs, load = simple(Line(1e-5, 1e-8), copy_out=Line(0.0, 1e-8), copy_in=Line(0.0, 1e-8)), load_of()
    everything = best_plan(costs, load)
    plans = [Plan(degree, degree, name) for degree in DEGREES for name in STRATEGIES]
    least = min(memory_bytes(load, plan) for plan in plans)
    before = score(everything.plan, everything.prediction.forward, everything.prediction.backward)
    for budget in np.linspace(everything.prediction.memory, least, 20).astype(int).tolist():
        decision = best_plan(costs, load, Limits(memory_budget=budget))
        assert decision.prediction.memory <= budget
        assert decision.prediction == predict(costs, load, decision.plan)
        now = score(decision.plan, decision.prediction.forward, decision.prediction.backward)
        assert now >= before
        before = now
    # Refused with the least that fits, which is then accepted.
    with pytest.raises(ValueError, match=rf"the least is {least} bytes, with memory_strategy=") as refused:
        best_plan(costs, load, Limits(memory_budget=least - 1))
    assert best_plan(costs, load, Limits(memory_budget=least)).prediction.memory == least
    advice = float(str(refused.value).rpartition("moe.memory_budget=")[2].rstrip("."))  # in MiB, as in the config
    assert least <= int(advice * 2**20) <= least + 2000
    assert best_plan(costs, load, Limits(memory_budget=int(advice * 2**20))).prediction.memory >= least


def test_memory_of_strategies() -> None:
    load = load_of(4096)
    memory = {name: memory_bytes(load, Plan(8, 8, name)) for name in STRATEGIES}
    assert memory["keep"] > memory["recompute"] > memory["communicate_recompute"]
    assert memory["keep"] > memory["communicate"] > memory["communicate_offload"]
    assert memory_bytes(load, Plan(8, 8, "keep", 0)) < memory_bytes(load, Plan(8, 8, "keep", 7))
    assert memory_bytes(load, Plan(8, 8, "offload")) < memory_bytes(load, Plan(2, 2, "offload"))
    # Without assignments and rows only the output is left.
    empty = LayerLoad(
        tokens=3, token_rows=0, away_rows=0, assignments=0, hidden_size=5, hidden_columns=8, width=4, element_size=2
    )
    assert memory_bytes(empty, Plan()) == 3 * 5 * 2


def test_memory_of_many_calls_at_once() -> None:
    load = load_of(4096)
    kept = 4096 * 64 * 4 + 8192 * 256 * 4 + 8192 * footprint.INDEX_BYTES  # rows, hidden activations, indices
    for live_calls in (1, 3):
        assert memory_bytes(load, Plan(), live_calls) == memory_bytes(load, Plan()) + (live_calls - 1) * kept
    costs = simple(Line(1e-5, 1e-8))
    one = best_plan(costs, load)
    budget = 2 * one.prediction.memory
    assert best_plan(costs, load, Limits(memory_budget=budget)) == one
    twelve = best_plan(costs, load, Limits(memory_budget=budget, live_calls=12))
    assert twelve.plan.memory_strategy != "keep" and twelve.prediction.memory <= budget
    assert twelve.prediction.memory == memory_bytes(load, twelve.plan, 12)


def test_planner_decides_again_when_the_load_drifts() -> None:
    planner = Planner(simple(Line(1e-4, 1e-8)))
    first = planner.decide(load_of(4001))
    assert planner.decide(load_of(4030)) is first  # the same step of 1/32
    assert (planner.num_decisions, planner.num_solved) == (2, 1)
    small = planner.decide(load_of(16))
    assert planner.num_solved == 2 and small.plan.degree < first.plan.degree
    # What was decided earlier makes no difference: ranks that joined later decide alike.
    again = Planner(simple(Line(1e-4, 1e-8)))
    assert again.decide(load_of(16)) == small and again.decide(load_of(4030)) == first


def test_rounding_up_costs_at_most_a_step() -> None:
    for tokens in [*range(70), 1000, 4095, 4096, 4097, 10**6 + 1]:
        rounded = rounded_up(load_of(tokens))
        for before, after in (
            (tokens, rounded.tokens),
            (tokens, rounded.token_rows),
            (tokens, rounded.away_rows),
            (2 * tokens, rounded.assignments),
        ):
            assert before <= after <= before * (1 + 1 / 32)
        assert rounded_up(rounded) == rounded
    # So what fits a budget rounded up fits it as it is.
    budget = memory_bytes(load_of(4000), Plan(4, 4, "communicate_recompute"))
    plan = Planner(simple(Line(1e-5, 1e-8)), Limits(memory_budget=budget)).decide(load_of(3000)).plan
    assert memory_bytes(load_of(3000), plan) <= budget


def test_costs_survive_json() -> None:
    rng = random.Random(1)
    for _ in range(50):
        costs, _ = random_case(rng)
        assert LayerCosts.from_dict(json.loads(json.dumps(costs.as_dict()))) == costs
    with pytest.raises(KeyError):
        LayerCosts.from_dict({})


# ---------------------------------------------------------------------------------------------------------------------
# PipeMoE's closed form
# ---------------------------------------------------------------------------------------------------------------------


def pipemoe_by_simulation(send: float, experts: float, degree: int) -> float:
    """All dispatches, then all combines, each as soon as the link is free and its chunk is computed."""
    arrived = [(i + 1) * send for i in range(degree)]
    link, computed = arrived[-1], 0.0
    for i in range(degree):
        computed = max(computed, arrived[i]) + experts
        link = max(link, computed) + send
    return link


def test_closed_form_equals_simulation() -> None:
    rng = random.Random(2)
    picked = set()
    for _ in range(5000):
        exchange = Line(rng.choice((0.0, 10 ** rng.uniform(-5, -2))), 10 ** rng.uniform(-10, -8))
        compute = Line(rng.choice((0.0, exchange.alpha, 10 ** rng.uniform(-5, -2))), 10 ** rng.uniform(-10, -8))
        size, work = 10 ** rng.uniform(5, 8), 10 ** rng.uniform(5, 8)
        max_degree = rng.choice((1, 2, 5, 16, 32))
        times = []
        for degree in range(1, max_degree + 1):
            send, experts = exchange(size / degree), compute(work / degree)
            simulated = pipemoe_by_simulation(send, experts, degree)
            assert closed_form_seconds(exchange, compute, size, work, degree) == pytest.approx(simulated, rel=1e-12)
            times.append(simulated)
        degree = closed_form_degree(exchange, compute, size, work, max_degree)
        assert times[degree - 1] == pytest.approx(min(times), rel=1e-12)
        picked.add(degree)
    assert len(picked) > 20


def test_own_order_is_never_far_from_pipemoes() -> None:
    # Where nothing but the exchange and the experts costs anything, PipeMoE's order is the best there is; ours, which
    # needs only a few chunks of memory, is at most 12.5% behind.
    rng = random.Random(3)
    for _ in range(500):
        exchange = Line(10 ** rng.uniform(-5, -3), 10 ** rng.uniform(-10, -8))
        load, rate = load_of(4096), 10 ** rng.uniform(-8, -5)
        costs = simple(exchange, rate)
        free_pairs = exchange(8 * load.assignments)
        for degree in allowed_degrees(DEGREES, load.tokens):
            theirs = closed_form_seconds(exchange, Line(0.0, rate), load.away_rows * 64 * 4, load.assignments, degree)
            ours = forward_seconds(costs, load, Plan(degree, degree))
            assert theirs * (1 - 1e-12) <= ours <= 1.125 * theirs + free_pairs


def test_weight_lags() -> None:
    assert [weight_lags(degree) for degree in (1, 2, 3, 8)] == [[0], [0, 1], [0, 1], [0, 1]]
