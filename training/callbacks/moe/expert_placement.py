"""What the placement of experts comes to, step by step."""

from __future__ import annotations

import torch

from memory.transfer import to_device
from moe.layer import layers_of
from moe.placement.live import TALLY
from training.run import Callback, Metrics, Run
from training.step import StepResult

NAME = "placement"


class ExpertPlacement(Callback):
    """Adds `placement`: the busiest rank's assignments by the mean rank's, a mean over the calls of all MoE layers,
    `at_home` without placement and `placed` with it; and the `copies` of experts whose weights travelled."""

    def __init__(self) -> None:
        self._numbers: dict[str, float] = {}

    def on_start(self, run: Run) -> None:
        layers, device = layers_of(run.engine.bare_chunks), run.topology.device
        tallies = [layer.placement.tally for layer in layers.values() if layer.placement is not None]

        def summed() -> torch.Tensor:
            own = torch.zeros(len(TALLY), dtype=torch.float64)
            for tally in tallies:
                own += torch.from_numpy(tally)
            return to_device(own, device)

        run.engine.sums.register(NAME, summed)

    def before_update(self, run: Run, result: StepResult) -> None:
        calls, at_home, placed, copies = result.sums[NAME].tolist()
        calls = max(calls, 1.0)
        self._numbers = {"at_home": at_home / calls, "placed": placed / calls, "copies": int(copies)}

    def after_step(self, run: Run, metrics: Metrics) -> None:
        metrics[NAME] = self._numbers
