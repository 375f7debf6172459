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

    `predict`: the step. `least`: seconds below which `predict` is of no config that differs in nothing but a larger
    training.micro_batch_size, another parallel.context_heads, and what saves memory: more training.recompute, another
    training.activation_offload, moe.pipeline_degree, moe.backward_pipeline_degree, moe.memory_strategy,
    optimizer.state_device or optimizer.engine. It takes a small part of `predict`'s time.

    The search counts on this of `predict`, where all else is equal: to keep something is never slower than to compute,
    send or fetch it again; optimizer.engine=auto is never slower than another; the host is never slower than the disk;
    and state off the device saves no more than the reason "update" of state on it.
    """

    predict: Callable[[Config, int, int, Hardware], Prediction]
    least: Callable[[Config, int, int, Hardware], float]
