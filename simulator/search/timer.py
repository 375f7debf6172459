"""Interface between the layout search and the step prediction, and its implementation with simulator/clock.

Tests use simpler implementations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from configs import derived
from configs.job import Job
from configs.schema import Config
from optim.arrangement.buckets import Arrangement
from simulator.clock.hardware import Hardware
from simulator.clock.predict import StepClock, least_seconds, predict_step
from simulator.clock.prediction import Prediction
from simulator.search.space import with_keys

LayerKind = tuple[int, int]  # 1 if it has experts else 0, 1 if it has the sliding window else 0


@dataclass(frozen=True)
class RowSeconds:
    """Seconds of both passes per sequence row of a rank, with the config's micro-batch size.

    `layers`: of a layer of each kind. `before`, `after`: of the modules before and after the layers.
    """

    layers: Mapping[LayerKind, float]
    before: float
    after: float


@dataclass(frozen=True)
class LayoutTimer:
    """Functions that predict the step of a layout. All take a job and its hardware.

    `predict`: the step; its last argument is the arrangement of offloaded optimizer state on one rank of each stage.
    `least`: a lower bound of `predict`'s seconds for any device of the optimizer state. `row_seconds`: such a bound per
    sequence row, for any parallel.pipeline and virtual_pipeline; a larger micro-batch takes no more time per row. If it
    is given, `least` is not called.

    The search relies on two properties of `predict`, all else being equal. With optimizer state on the same device,
    keeping activations is never slower than computing, sending or fetching them again. If all state fits on the device,
    state_device=auto equals device. Nothing is assumed about devices and engines: an update during the passes may be
    faster than one on the device.
    """

    predict: Callable[[Job, Hardware, Sequence[Arrangement | None] | None], Prediction]
    least: Callable[[Job, Hardware], float]
    row_seconds: Callable[[Job, Hardware], RowSeconds] | None = None


def clock_timer(attended_share: float | None = None) -> LayoutTimer:
    """Return the functions with which a layout search predicts steps by simulation.

    `attended_share`: token pairs whose attention is computed, divided by those of samples that are one document and
    have no sliding window. None: predicted from the config.
    """

    def row_seconds(job: Job, hardware: Hardware) -> RowSeconds:
        """Derive the seconds per sequence row from predictions of models with one and with two layers."""
        config, number = job.config, derived.rank_sequence_rows(job.config)

        def stages(layers: list[LayerKind], count: int) -> list[float]:
            small = replace(job, config=_small_model(config, layers, count), world_size=count * job.world_size)
            clock = StepClock(small, hardware, attended_share=attended_share)
            chunks = [of_stage[0] for of_stage in clock.chunks()]
            return [(sum(each.forward.values()) + sum(each.backward.values())) / number for each in chunks]

        kinds = sorted(set(zip(derived.moe_layer_pattern(config), derived.window_pattern(config))))
        (whole,) = stages(kinds[:1], 1)
        first, last = stages([kinds[0], kinds[0]], 2)
        layer = first + last - whole
        others = {kind: stages([kinds[0], kind], 1)[0] - whole for kind in kinds[1:]}
        return RowSeconds({kinds[0]: layer, **others}, first - layer, last - layer)

    return LayoutTimer(
        lambda job, hardware, state: predict_step(job, hardware, attended_share=attended_share, arrangements=state),
        least_seconds,
        row_seconds,
    )


def _small_model(config: Config, layers: list[LayerKind], stages: int) -> Config:
    """Return the config with only these layers, in `stages` pipeline stages."""
    number, slides = len(layers), sum(each[1] for each in layers)
    model = replace(config.model, num_layers=number)
    if config.model.sliding_window is not None:  # layers with the window are the last ones
        layers = sorted(layers, key=lambda each: each[1])
        model = replace(model, sliding_window_from=number - slides)
    moe = {"moe.layers": [each[0] for each in layers]} if derived.is_moe(config) else {}
    return with_keys(
        replace(config, model=model), {**moe, "parallel.pipeline": stages, "parallel.virtual_pipeline": None}
    )
