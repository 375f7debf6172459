"""Ways of buckets and the seconds of a step, by hand."""

from __future__ import annotations

import dataclasses

import pytest

from optim.arrangement.engines import ENGINES, Bandwidths, ElementBytes, Passes, choose, predict, predictions, work

pytestmark = pytest.mark.fast

BF16 = ElementBytes(record=12, weight=2, has_master=True)
FP32 = ElementBytes(record=8, weight=4, has_master=False)
# A link of 1 GB/s each way, a host that updates 10 GB/s, a device that takes no time.
RATES = Bandwidths(up=1e9, down=1e9, host=10e9, device=1e15)
MILLION = 10**6


def test_a_streamed_bucket_goes_up_and_down_whole() -> None:
    seconds = work("device_stream", False, MILLION, BF16, RATES)
    assert seconds.up == seconds.down == pytest.approx(0.012)
    assert seconds.host == seconds.disk == 0
    early = work("device_stream", False, MILLION, BF16, RATES, early=True)
    assert early.up == early.down == pytest.approx(0.014)  # the new weights wait for the norm on the host


def test_the_host_s_bucket_sends_gradients_and_takes_weights() -> None:
    seconds = work("host", False, MILLION, BF16, RATES)
    assert (seconds.up, seconds.down) == (pytest.approx(0.002), pytest.approx(0.004))
    assert seconds.host == pytest.approx((24 + 4 + 2) / 10e9 * MILLION)
    assert work("host", False, MILLION, FP32, RATES).down == pytest.approx(0.008)  # with the weights


def test_a_bucket_of_the_device_moves_nothing() -> None:
    seconds = work("device", False, MILLION, BF16, dataclasses.replace(RATES, device=30e9))
    assert seconds.longest == seconds.device == pytest.approx(0.001)
    assert seconds.filling == 0


def test_the_disk_reads_and_writes_one_after_the_other() -> None:
    rates = dataclasses.replace(RATES, read=2e9, write=1e9)
    assert work("host", True, MILLION, BF16, rates).disk == pytest.approx(0.018)
    assert work("host", False, MILLION, BF16, rates).disk == 0


def test_a_step_is_its_passes_where_they_hide_all() -> None:
    engines = choose("device_stream", [MILLION] * 10, ["host"] * 10, BF16, RATES)
    waiting = predict(engines, [MILLION] * 10, ["host"] * 10, BF16, RATES, Passes(1.0, 2.0))
    assert waiting == pytest.approx(3.012)  # the first bucket's way there
    early = predict(engines, [MILLION] * 10, ["host"] * 10, BF16, RATES, Passes(1.0, 2.0, early=True))
    assert early == pytest.approx(3.014)


def test_a_step_is_what_takes_longest() -> None:
    numels, tiers = [MILLION] * 10, ["host"] * 10
    engines = choose("device_stream", numels, tiers, BF16, RATES)
    assert predict(engines, numels, tiers, BF16, RATES, Passes(0.05, 0.1)) == pytest.approx(
        0.1 + 0.12 + 0.012, rel=1e-3
    )
    early = Passes(0.05, 0.05, early=True)
    assert predict(engines, numels, tiers, BF16, RATES, early) == pytest.approx(0.14 + 0.014, rel=1e-3)
    slow = dataclasses.replace(RATES, memory=1e9)
    assert predict(engines, numels, tiers, BF16, slow, Passes(0.05, 0.1)) == pytest.approx(0.1 + 0.24 + 0.012, rel=1e-3)


def test_an_engine_alone_has_all_buckets_off_the_device() -> None:
    tiers = ["host", "device", "disk", "host"]
    assert choose("host", [5, 5, 5, 1], tiers, BF16, RATES) == ["host", "device", "host", "host"]
    streamed = ["device_stream", "device", "device_stream", "device_stream"]
    assert choose("device_stream", [5, 5, 5, 1], tiers, BF16, RATES) == streamed


def test_both_engines_are_busy_all_along_the_order() -> None:
    # The device streams 12 bytes at 1 GB/s; the host reads and writes 30 at 5 GB/s: 2 of 3 buckets are for the host.
    rates = dataclasses.replace(RATES, host=2.5e9)
    engines = choose("split", [MILLION] * 30, ["host"] * 30, BF16, rates)
    for start in range(0, 30, 6):
        assert 2 <= engines[start : start + 6].count("host") <= 4
    seconds = predictions([MILLION] * 30, ["host"] * 30, BF16, rates)
    assert seconds["split"] < 0.75 * min(seconds["device_stream"], seconds["host"])


@pytest.mark.parametrize(
    ("rates", "best"),
    [
        (RATES, "host"),
        (dataclasses.replace(RATES, host=1e7), "device_stream"),
        (dataclasses.replace(RATES, host=2.5e9), "split"),
    ],
)
def test_auto_is_the_engine_with_the_shortest_step(rates: Bandwidths, best: str) -> None:
    numels, tiers = [MILLION] * 30, ["host"] * 30
    seconds = predictions(numels, tiers, BF16, rates)
    assert min(ENGINES, key=seconds.__getitem__) == best
    assert choose("auto", numels, tiers, BF16, rates) == choose(best, numels, tiers, BF16, rates)


def test_split_of_one_bucket_is_one_way() -> None:
    assert len(choose("split", [MILLION], ["host"], BF16, RATES)) == 1
    assert choose("auto", [], [], BF16, RATES) == []
