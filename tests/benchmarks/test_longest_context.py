"""Predictions of benchmarks/speed/longest_context.py from two peaks, and its rows on tiny sizes."""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from base.units import GIB
from benchmarks.speed import longest_context, mixtrain_side
from benchmarks.speed.longest_context import MODELS, SMALL, Ladder, MeteredDevice, PeakLine, of_host
from tests import distributed

FIXED, PER_TOKEN = 2 * GIB, 65_536  # of the device below


class LinearSide:
    """A side whose memory is a line, and that runs out of memory if a step would take more than the cap."""

    features = ("one", "two")
    num_parameters = 1

    def __init__(self, meter: LinearDevice, extra: float) -> None:
        self.meter, self.extra = meter, extra
        self.started = list[tuple[int, int]]()

    def begin(self, feature: int, length: int) -> Callable[[], float]:
        self.started.append((feature, length))
        bend = 20_000  # tokens from which each takes more than the short lengths tell
        peak = FIXED + PER_TOKEN * (length + self.extra * max(0, length - bend)) / (1 + feature)

        def step() -> float:
            if peak > self.meter.limit:
                raise torch.OutOfMemoryError("CUDA out of memory")
            self.meter.peak = int(peak)
            return 1.0

        return step

    def end(self) -> None:
        pass

    def host_bytes(self, feature: int, length: int) -> float:
        return feature * 1000.0 * length


class LinearDevice(MeteredDevice):
    """No device: the side sets its peak."""

    def __init__(self) -> None:
        self.device, self.has_cap, self.total = torch.device("cpu"), True, 64 * GIB
        self.limit, self.peak = float(self.total), 0

    def cap(self, num_bytes: float) -> None:
        self.limit = num_bytes

    def clear(self) -> None:
        self.peak = 0

    def peaks(self) -> tuple[int, int]:
        return self.peak, self.peak


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def arguments(**values: Any) -> argparse.Namespace:
    given = {"system": "mixtrain", "model": "gpt_1b", "cap_gib": 4.0, "seconds": 600.0, "small": True, "json": True}
    return argparse.Namespace(**{**given, "began": time.monotonic(), **values})


def test_a_line_says_how_many_tokens_fit() -> None:
    line = PeakLine.through((1000, 3000.0), (2000, 5000.0))
    assert (line.fixed, line.per_token) == (1000.0, 2.0)
    assert line.longest(1000.0 + 2.0 * 1030) == 1024  # a multiple of 256
    assert line.longest(500.0) == 0
    assert PeakLine(1.0, 0.0).longest(10.0) is None
    with pytest.raises(ValueError, match="two lengths"):
        PeakLine.through((5, 1.0), (5, 2.0))
    assert (of_host(1000.0, 200.0, 8.0), of_host(100.0, 200.0, 8.0), of_host(1.0, 0.0, 0.0)) == (100, 0, None)


def test_what_is_predicted_is_confirmed_and_more_runs_out(capsys: pytest.CaptureFixture[str]) -> None:
    meter = LinearDevice()
    Ladder(LinearSide(meter, 0.0), meter, lambda length: 1.0 * length, arguments()).climb()
    said = lines(capsys)
    predicted = {line["row"]: line for line in said if line["what"] == "predicted"}
    assert predicted["one"]["longest_under_cap"] == 2 * GIB // PER_TOKEN == 32_768
    assert predicted["two"]["longest_under_cap"] == 65_536
    assert predicted["two"]["longest_with_this_host"] == min(
        predicted["two"]["host_has_memory_for"], predicted["two"]["longest_whole_device"]
    )
    confirmed = [(line["row"], line["length"]) for line in said if line["what"] == "confirmed"]
    assert confirmed == [("two", 63_488), ("one", 31_744)]  # 0.97 of it
    (over,) = [line for line in said if line["what"].startswith("over")]
    assert (over["what"], over["length"]) == ("over: did not fit", 68_608) and "out_of_memory" in over


def test_a_prediction_that_does_not_hold_is_made_again(capsys: pytest.CaptureFixture[str]) -> None:
    meter = LinearDevice()
    Ladder(LinearSide(meter, 0.1), meter, lambda length: 1.0 * length, arguments()).climb()
    said = [line for line in lines(capsys) if line["row"] == "two"]
    order = [key for key, _ in itertools.groupby(line["what"] for line in said)]
    assert order == [
        *("measured", "predicted", "ran out below the prediction", "confirmed"),
        *("predicted from the confirmed peak", "over: did not fit"),
    ]
    confirmed, again = (next(line for line in said if line["what"] == what) for what in (order[3], order[4]))
    assert confirmed["length"] < again["longest_under_cap"] < 65_536


def test_nothing_is_started_for_which_no_time_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    meter = LinearDevice()
    side = LinearSide(meter, 0.0)
    Ladder(side, meter, lambda length: 1e20, arguments(small=False)).climb()
    assert [length for _, length in side.started] == [4096, 8192] * 2
    assert [line["what"] for line in lines(capsys)][-2:] == ["not begun"] * 2


def test_sizes_are_those_of_the_published_model() -> None:
    assert mixtrain_side._count(MODELS["gpt_1b"]) == 1_235_814_400  # as its card on Hugging Face says
    assert mixtrain_side._count(MODELS["moe_small"]) == 1_292_264_448
    # Three times the products of the weights, and attention's scores: half of the square, four operations a channel.
    products = 6 * (1_235_814_400 - 33 * 2048)
    assert mixtrain_side.training_flops(MODELS["gpt_1b"], 8192) == 8192 * (products + 3 * 2 * 16 * 8192 * 2048)


def tiny_rows(model: dict[str, int]) -> list[tuple[str, float]]:
    side = mixtrain_side.MixtrainSide(model, torch.device("cpu"))
    meter, found = MeteredDevice(is_small=True), []
    for feature, name in enumerate(side.features):
        row = longest_context.attempt(side, meter, feature, 1280, steps=1)
        assert longest_context.went_well(row) and row["peak"] > 0, row
        found.append((name, row["loss"]))
    return found


def test_all_parts_compute_the_same_loss() -> None:
    (rows_found,) = distributed.run(tiny_rows, 1, SMALL | {"num_experts": 4, "top_k": 2})
    names = [*mixtrain_side.FEATURES, *mixtrain_side.OF_EXPERTS]
    assert [name for name, _ in rows_found] == names
    # Weights are drawn anew for each row: all near those of chance.
    assert all(abs(loss - 6.24) < 0.1 for _, loss in rows_found), rows_found
