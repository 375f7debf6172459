"""A rank that is slower than the others is named, one that only has other work is not."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from configs.schema import Config
from tests import distributed
from tests.training.helpers import make_config
from tests.waits import LONG
from training.callbacks.stragglers import MOST_SIZE, PROBE_SECONDS, WINDOW, choose_products, find_slow
from training.resilience import events
from training.run import Callback, Metrics, Run


@pytest.mark.parametrize(
    ("seconds", "stages", "slow"),
    [
        ([1.0, 1.0, 1.0, 1.0], [0, 0, 0, 0], []),
        ([1.0, 1.7, 1.0, 1.1], [0, 0, 0, 0], [1]),
        ([1.0, 1.4, 1.0, 1.1], [0, 0, 0, 0], []),
        ([1.0, 1.0, 3.0, 3.1], [0, 0, 1, 1], []),  # the other stage has other layers
        ([1.0, 1.0, 3.0, 5.0], [0, 0, 1, 1], [3]),
        ([1.0, 2.0], [0, 1], []),  # nobody to compare with
        ([0.0001, 0.0003], [0, 0], []),  # too little to matter
    ],
)
def test_find_slow(seconds: list[float], stages: list[int], slow: list[int]) -> None:
    assert list(find_slow(seconds, stages, 1.5)) == slow


@pytest.mark.parametrize("flops_per_second", [1e8, 1e9, 1e11, 1e13, 1e14, 6e14, 1e16])
@pytest.mark.parametrize("launch_seconds", [0.0, 1e-5, 2e-4])
def test_the_probe_takes_a_short_time_on_any_device(flops_per_second: float, launch_seconds: float) -> None:
    """On a processor without fp16 products too, which computes where a device is pretended."""
    spent = 0.0

    def seconds_of(size: int) -> float:
        nonlocal spent
        seconds = launch_seconds + 2.0 * size**3 / flops_per_second
        spent += seconds
        return seconds

    size, repeats = choose_products(seconds_of)
    assert spent <= 2 * PROBE_SECONDS
    assert PROBE_SECONDS / 16 <= repeats * seconds_of(size) <= 2 * PROBE_SECONDS
    assert size == MOST_SIZE or flops_per_second < 1e14  # where it is large, it shows the device and not the launches


def train_slowly(config: Config, slow_rank: int) -> None:
    """Train while `slow_rank` pauses in every step, for twice what the others need: so it is slow on a busy machine
    too."""
    import torch.distributed as dist

    from training import step
    from training.trainer import Trainer

    own_seconds = [0.01] * dist.get_world_size()

    class Watch(Callback):
        def after_step(self, run: Run, metrics: Metrics) -> None:
            assert run.result is not None
            if run.progress.step == 1:
                return  # it holds the start
            own_seconds[:] = run.result.sums["own_seconds"].tolist()

    trainer = Trainer(config)
    trainer.callbacks.append(Watch())
    passes = step._run

    def slowed(*arguments: Any, **keywords: Any) -> Any:
        if dist.get_rank() == slow_rank:
            time.sleep(2 * max(seconds for rank, seconds in enumerate(own_seconds) if rank != slow_rank))
        return passes(*arguments, **keywords)

    step._run = slowed
    try:
        trainer.fit()
    finally:
        step._run = passes


def test_slow_rank_is_named(data: list[str], tmp_path: Path) -> None:
    sizes = [
        f"training.steps={WINDOW}",
        "training.micro_batch_size=2",
        "checkpoint=off",
        "training.straggler_factor=1.5",
    ]
    config = make_config(["experiment=gpt_tiny", *data, *sizes, f"run_dir={tmp_path}"], 2)
    distributed.run(train_slowly, 2, config, 1, timeout=LONG)
    (event,) = [event for event in events.read(tmp_path) if event["kind"] == "straggler"]
    assert event["slow_rank"] == 1 and event["step"] == WINDOW and "is slow" in event["text"]
