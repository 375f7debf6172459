"""The rung of the longest context: the last row of benchmarks/speed/longest_context.py, for Mixtrain and DeepSpeed's
ALST."""

from __future__ import annotations

import argparse
import importlib.util
import time
from typing import Any

from benchmarks.card.ladder import Task

SYSTEMS = ("mixtrain", "alst")
CAP_GIB = 16.0


def measure(task: Task) -> None:
    """Show what the last row of each system predicts and confirms; each has its share of the seconds."""
    from benchmarks.speed.longest_context import MODELS, SMALL, Ladder, MeteredDevice, llama_sizes
    from benchmarks.speed.mixtrain_side import MixtrainSide, training_flops

    sizes = MODELS["gpt_1b"] | (SMALL if task.is_small else {})
    meter = MeteredDevice(task.is_small)
    systems = [name for name in SYSTEMS if name != "alst" or importlib.util.find_spec("deepspeed") is not None]
    if systems != list(SYSTEMS):
        task.show({"system": "alst", "note": "not measured: the package deepspeed is not installed"})
    for number, system in enumerate(systems):
        left = (task.end - time.monotonic()) / (len(systems) - number)
        arguments = argparse.Namespace(
            cap_gib=CAP_GIB,
            small=task.is_small,
            json=False,
            system=system,
            model="gpt_1b",
            began=time.monotonic(),
            seconds=left,
        )
        side: Any
        if system == "mixtrain":
            side = MixtrainSide(sizes, meter.device)
        else:
            from benchmarks.speed.alst import AlstSide

            side = AlstSide(llama_sizes(sizes, 2**24), meter.device, weights_on_host=True)
        try:
            ladder = Ladder(side, meter, lambda length: training_flops(sizes, length), arguments)
            ladder.log = lambda what, **found: task.show({"system": system, "what": what, **found})  # type: ignore[method-assign]  # noqa: B023
            last = len(side.features) - 1
            ladder.fit(last)
            if last in ladder.fits and meter.has_cap:
                ladder.confirm(last, over=True)
        finally:
            side.close()
            meter.cap(meter.total)
