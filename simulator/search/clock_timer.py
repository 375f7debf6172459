"""The clock's answers to what the search asks: simulator/clock/predict.py, and bounds of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from configs import derived
from configs.schema import Config
from optim.arrangement.arrange import Arrangement
from simulator.clock.hardware import Hardware
from simulator.clock.predict import StepClock, least_seconds, predict_step
from simulator.clock.prediction import Prediction
from simulator.search.space import with_keys
from simulator.search.timer import LayerKind, LayoutTimer, RowSeconds


def clock_timer(attended_share: float | None = None) -> LayoutTimer:
    """`attended_share`: as in simulator/flops.py."""

    def predict(
        config: Config,
        world_size: int,
        vocab_size: int,
        hardware: Hardware,
        arrangements: Sequence[Arrangement | None] | None = None,
    ) -> Prediction:
        return predict_step(
            config, world_size, vocab_size, hardware, attended_share=attended_share, arrangements=arrangements
        )

    def least(config: Config, world_size: int, vocab_size: int, hardware: Hardware) -> float:
        return least_seconds(config, world_size, vocab_size, hardware)

    def rows(config: Config, world_size: int, vocab_size: int, hardware: Hardware) -> RowSeconds:
        """From models of one and of two layers."""
        number = derived.rows_of_rank(config)

        def stages(layers: list[LayerKind], count: int) -> list[float]:
            few = _model_of(config, layers, count)
            clock = StepClock(few, count * world_size, vocab_size, hardware, attended_share=attended_share)
            return [(_sum(of[0].forward) + _sum(of[0].backward)) / number for of in clock.chunks()]

        kinds = sorted(set(zip(derived.moe_layer_pattern(config), derived.window_pattern(config))))
        (whole,) = stages(kinds[:1], 1)
        first, last = stages([kinds[0], kinds[0]], 2)
        layer = first + last - whole
        others = {kind: stages([kinds[0], kind], 1)[0] - whole for kind in kinds[1:]}
        return RowSeconds({kinds[0]: layer, **others}, first - layer, last - layer)

    return LayoutTimer(predict, least, rows)


def _sum(reasons: Mapping[str, float]) -> float:
    return sum(reasons.values())


def _model_of(config: Config, layers: list[LayerKind], stages: int) -> Config:
    """The same model of these few layers."""
    number, slides = len(layers), sum(each[1] for each in layers)
    model = replace(config.model, num_layers=number)
    if config.model.sliding_window is not None:  # those with the window are the last ones
        layers = sorted(layers, key=lambda each: each[1])
        model = replace(model, sliding_window_from=number - slides)
    moe = {"moe.layers": [each[0] for each in layers]} if derived.is_moe(config) else {}
    return with_keys(
        replace(config, model=model), {**moe, "parallel.pipeline": stages, "parallel.virtual_pipeline": None}
    )
