"""Cost models: fitting, measuring on one rank, the cache. No timings are asserted, except of calls that only
sleep."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from parallel.costs import measure as measuring
from parallel.costs.cache import cached, hardware_key, layout_key
from parallel.costs.cache_files import cache_path
from parallel.costs.measure import measure, measure_copies, measure_curve, measure_line, measure_slowdown
from parallel.costs.models import Curve, Line, fit_curve, fit_line

pytestmark = pytest.mark.fast

CPU = torch.device("cpu")

# ---------------------------------------------------------------------------------------------------------------------
# Models
# ---------------------------------------------------------------------------------------------------------------------


def test_fit_recovers_a_line() -> None:
    sizes = [2.0**i for i in range(10, 26)]
    line = fit_line(sizes, [1e-4 + 4e-9 * n for n in sizes])
    assert line.alpha == pytest.approx(1e-4) and line.beta == pytest.approx(4e-9) and line.r2 == pytest.approx(1.0)
    # Noise of 5% of each time: the smallest sizes still fix the startup, as all count alike.
    rng = random.Random(0)
    noisy = fit_line(sizes * 20, [(1e-4 + 4e-9 * n) * rng.uniform(0.95, 1.05) for n in sizes * 20])
    assert noisy.alpha == pytest.approx(1e-4, rel=0.02) and noisy.beta == pytest.approx(4e-9, rel=0.02)
    assert 0.99 < noisy.r2 < 1.0


def test_fit_is_never_negative() -> None:
    falling = fit_line([1, 2, 3], [3.0, 2.0, 1.0])
    assert falling.beta == 0.0 and 1.0 <= falling.alpha <= 3.0
    convex = fit_line([1, 2, 4, 8], [0.1, 0.4, 1.6, 6.4])
    assert convex.alpha == 0.0 and convex.beta > 0.0
    assert fit_line([5], [2.0]) == Line(2.0, 0.0)
    assert fit_line([1, 2], [0.0, 0.0]) == Line(0.0, 0.0)
    for sizes, seconds in (([], []), ([1], [1.0, 2.0])):
        with pytest.raises(ValueError, match="at least one size and a time for each"):
            fit_line(sizes, seconds)


def test_a_line_starts_nothing_for_nothing() -> None:
    assert Line(1.0, 2.0)(0) == 0.0 and Line(1.0, 2.0)(3) == 7.0


def test_a_curve_keeps_its_knee() -> None:
    curve = fit_curve([10, 100, 1000], [1.0, 1.1, 11.0])
    assert curve(1) == curve(0) == curve(10) == 1.0
    assert curve(55) == pytest.approx(1.05) and curve(100) == pytest.approx(1.1) and curve(550) == pytest.approx(6.05)
    assert curve(1900) == pytest.approx(20.9)  # on with the last slope
    # A line through these times would be far off at the knee.
    assert fit_line([10, 100, 1000], [1.0, 1.1, 11.0])(100) > 1.3
    # Never falling, whatever was measured, nor more than twice as long for twice as much.
    assert fit_curve([1, 2, 4], [2.0, 1.0, 2.0]) == Curve((1.0, 2.0, 4.0), (2.0, 2.0, 2.0))
    assert fit_curve([1, 2, 4], [1.0, 2.0, 6.0]) == Curve((1.0, 2.0, 4.0), (7 / 6, 14 / 6, 28 / 6))
    rng = random.Random(0)
    for _ in range(100):
        sizes = [2.0**i for i in range(6)]
        curve = fit_curve(sizes, [n * rng.uniform(0.5, 1.5) for n in sizes])
        for n in (1.5, 3.0, 10.0, 31.0):
            assert curve(n) <= curve(2 * n) * (1 + 1e-9) and curve(2 * n) <= 2 * curve(n) * (1 + 1e-9)
    assert fit_curve([7], [2.0])(100) == 2.0
    for bad, seconds in (([], []), ([2, 1], [1.0, 1.0]), ([1, 1], [1.0, 1.0]), ([1], []), ([0, 1], [1.0, 1.0])):
        with pytest.raises(ValueError, match="needs positive, increasing sizes, and one time for each"):
            fit_curve(bad, seconds)


# ---------------------------------------------------------------------------------------------------------------------
# Measuring
# ---------------------------------------------------------------------------------------------------------------------


class Clock:
    """A clock that only `sleep` moves, so that measurements of sleeping are exact."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[int] = []

    def perf_counter(self) -> float:
        return self.now

    def sleeper(self, seconds: Callable[[int], float]) -> Callable[[int], Callable[[], None]]:
        def make(size: int) -> Callable[[], None]:
            def call() -> None:
                self.calls.append(size)
                self.now += seconds(size)

            return call

        return make


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(measuring, "time", clock)
    return clock


def test_measuring_recovers_what_is_slept(clock: Clock) -> None:
    line = measure_line(clock.sleeper(lambda n: 0.001 + 1e-6 * n), [100, 1000, 10000], CPU, budget=1.0)
    assert line.alpha == pytest.approx(0.001) and line.beta == pytest.approx(1e-6)
    curve = measure_curve(clock.sleeper(lambda n: max(0.01, 1e-4 * n)), [10, 100, 1000], CPU, budget=1.0)
    assert curve.seconds == pytest.approx((0.01, 0.01, 0.1))


def test_measuring_keeps_to_its_budget(clock: Clock) -> None:
    sizes, seconds = measure(clock.sleeper(lambda n: 1e-3 * n), [1, 10, 100, 1000, 10000], CPU, None, 2.0)
    assert sizes == [1, 10, 100] and seconds == pytest.approx([1e-3, 1e-2, 1e-1])  # 1000 would take a second each time
    assert clock.now < 4.0
    # Two sizes stay whatever they take; rounds are few then, and many where they are cheap.
    clock.calls.clear()
    assert measure(clock.sleeper(lambda n: 10.0 * n), [1, 2, 3], CPU, None, 1.0)[0] == [1, 2]
    assert clock.calls.count(2) == 1 + measuring.MIN_ROUNDS
    clock.calls.clear()
    measure(clock.sleeper(lambda n: 1e-9), [1, 2, 3], CPU, None, 1.0)
    assert clock.calls.count(3) == 1 + measuring.MAX_ROUNDS
    # They take turns.
    assert clock.calls[-6:] == [1, 2, 3, 1, 2, 3]


@pytest.mark.parametrize("compute_seconds,exchange_seconds", [(1.0, 0.1), (1.0, 1.0), (0.1, 5.0)])
def test_slowdown_of_a_known_machine(clock: Clock, compute_seconds: float, exchange_seconds: float) -> None:
    """A link that is slowed 1.5 times by computation, which it slows 1.25 times."""
    backlog = 0.0

    def compute() -> None:
        nonlocal backlog
        assert backlog == 0.0 or backlog * 1.5 > compute_seconds * 1.25, "the exchanges end before the computation does"
        slowed = compute_seconds * 1.25 if backlog > 0.0 else compute_seconds
        backlog = max(0.0, backlog - slowed / 1.5)
        clock.now += slowed

    def communicate() -> Callable[[], None]:
        nonlocal backlog
        backlog += exchange_seconds
        mine = exchange_seconds

        def wait() -> None:
            nonlocal backlog
            left = min(mine, backlog)
            backlog -= left
            clock.now += left

        return wait

    assert measure_slowdown(compute, communicate, CPU) == pytest.approx((1.25, 1.5))


def test_slowdown_stays_between_none_and_the_most(clock: Clock) -> None:
    # Computation that is faster beside an exchange is a disturbed measurement, not a gain.
    times = iter([1.0] * 5 + [0.5, 1.0, 2.0] * 100)

    def compute() -> None:
        clock.now += next(times)

    def communicate() -> Callable[[], None]:
        def wait() -> None:
            clock.now += 1.0

        return wait

    for factor in measure_slowdown(compute, communicate, CPU):
        assert 1.0 <= factor <= measuring.MAX_SLOWDOWN


def test_copies_on_the_host() -> None:
    out, back = measure_copies([2**12, 2**20], CPU, budget=0.05)
    assert out(2**20) > 0.0 and back(2**20) > 0.0


# ---------------------------------------------------------------------------------------------------------------------
# The cache
# ---------------------------------------------------------------------------------------------------------------------

KEY = {"device": "cpu", "shape": (2, 3), "torch": "2"}


def _made(folder: Path | None, values: dict[str, Any], **options: Any) -> tuple[dict[str, Any], bool]:
    """(what `cached` gives, whether it made it)."""
    made = []

    def make() -> dict[str, Any]:
        made.append(True)
        return values

    return cached(folder, KEY, make, CPU, **options), bool(made)


def test_cache_round_trip(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    values = {"alpha": 0.1 + 0.2, "sizes": [1.0, 1e-300, 3.0]}
    assert _made(folder, values) == (values, True)
    assert _made(folder, {"other": 1}) == (values, False)
    assert [path.name for path in folder.iterdir()] == [cache_path(folder, KEY).name]  # no temporary file is left
    assert _made(None, {"other": 1}) == ({"other": 1}, True)
    # Another key is another file.
    assert cached(folder, {**KEY, "torch": "3"}, lambda: {"other": 1}, CPU) == {"other": 1}
    assert len(list(folder.iterdir())) == 2


def _truncate(path: Path) -> None:
    path.write_text(path.read_text()[:-20])


def _change_version(path: Path) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 0}))


def _change_value(path: Path) -> None:
    path.write_text(path.read_text().replace("0.25", "0.26"))


def _change_key(path: Path) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), "key": {}}))


def _make_binary(path: Path) -> None:
    path.write_bytes(b"\xff\xfe\x00\x01")


def _make_list(path: Path) -> None:
    path.write_text("[1, 2]")


def _make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    "damage", [_truncate, _change_version, _change_value, _change_key, _make_binary, _make_list, _make_folder]
)
def test_a_damaged_file_is_measured_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None]
) -> None:
    _made(tmp_path, {"beta": 0.25})
    path = cache_path(tmp_path, KEY)
    damage(path)
    with caplog.at_level(logging.WARNING, "parallel.costs"):
        assert _made(tmp_path, {"beta": 0.5}) == ({"beta": 0.5}, True)
    assert str(path) in caplog.messages[0] and "measuring again" in caplog.messages[0]
    if path.is_file():  # a folder in its place stays, with a second line
        assert len(caplog.messages) == 1
        assert _made(tmp_path, {}) == ({"beta": 0.5}, False)
    else:
        assert len(caplog.messages) == 2 and "the next run measures again" in caplog.messages[1]


def test_what_no_longer_holds_is_measured_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _made(tmp_path, {"beta": 1})
    assert _made(tmp_path, {"beta": 2}, still_true=lambda values: values["beta"] == 1) == ({"beta": 1}, False)
    assert _made(tmp_path, {"beta": 2}, still_true=lambda values: values["beta"] == 3) == ({"beta": 2}, True)
    assert "are no longer valid on this machine" in caplog.text
    assert _made(tmp_path, {"beta": 4}) == ({"beta": 2}, False)


def test_keys_distinguish_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    key = hardware_key(CPU)
    assert key["torch"] == torch.__version__ and key["threads"] == torch.get_num_threads() and key["processor"]
    assert layout_key(None) == {"group_size": 1}
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert cache_path(".", hardware_key(CPU)) != cache_path(".", key)
