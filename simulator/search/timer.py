"""What the search asks of a clock, so that tests can use simple ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from configs.schema import Config
from optim.arrangement.arrange import Arrangement
from simulator.clock.hardware import Hardware
from simulator.clock.prediction import Prediction

LayerKind = tuple[int, int]  # whether it has experts, and whether it has the sliding window


@dataclass(frozen=True)
class RowSeconds:
    """Seconds that a row of a rank takes in both passes, of a micro-batch as large as the config's: of a layer of each
    kind, and of what is before and behind the layers."""

    layers: Mapping[LayerKind, float]
    before: float
    behind: float


@dataclass(frozen=True)
class LayoutTimer:
    """All functions take a config, the number of ranks, the vocabulary's size and the hardware.

    `predict`: the step; it also takes the arrangements of optimizer state in tiers, of a rank of each stage, None where
    there are none. `least`: seconds below which `predict` of the same config is not, wherever optimizer state lies.
    `rows`: the same for a row, whatever parallel.pipeline and virtual_pipeline are; a row of a larger micro-batch takes
    no more. Where it is known, `least` is not asked.

    The search counts on this of `predict`, where all else is equal: to keep something of the layers is never slower
    than to compute, send or fetch it again, with optimizer state in the same tier; auto is the device where all state
    is there. Nothing is assumed of tiers and engines: an update beside the passes may be faster than one on the device.
    """

    predict: Callable[[Config, int, int, Hardware, Sequence[Arrangement | None] | None], Prediction]
    least: Callable[[Config, int, int, Hardware], float]
    rows: Callable[[Config, int, int, Hardware], RowSeconds] | None = None
