"""What the search asks of a clock: two functions, so that tests can use simple ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from configs.schema import Config
from simulator.clock.hardware import Hardware
from simulator.clock.prediction import Prediction


@dataclass(frozen=True)
class LayoutTimer:
    """Both functions take a config, the number of ranks, the vocabulary's size and the hardware.

    `predict`: the step. `least`: seconds that a step takes at least, also with any other training.recompute,
    training.activation_offload, moe.pipeline_degree, moe.memory_strategy, optimizer.state_device and optimizer.engine
    than the config's, in less time than `predict` takes.

    The search counts on this of `predict`, where all else is equal: to keep something is never slower than to compute,
    send or fetch it again, and state off the device saves no more than the device's update takes.
    """

    predict: Callable[[Config, int, int, Hardware], Prediction]
    least: Callable[[Config, int, int, Hardware], float]
