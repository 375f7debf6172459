"""What the placement of experts comes to, step by step."""

from __future__ import annotations

from typing import Any

import torch

from configs import derived
from memory.transfer import to_device
from moe.layer import layers_of
from moe.placement.live import TALLY
from training.run import Callback, Metrics, Run
from training.step import StepResult

NAME = "placement"


class ExpertPlacement(Callback):
    """Adds `placement`, of a step's calls of all MoE layers; null where none was planned:

    * `at_home` and `placed`: the busiest rank's assignments by the mean rank's, a mean over calls, without copies and
      with them; `ranks_at_home` and `ranks_placed`: those of each rank of an expert group;
    * `predicted_gain`: the busiest rank's time without copies by that with them, as the planner reckons, with what
      copies cost; `measured_gain`: its assignments without by those with them;
    * `copies`: of experts, whose weights travelled; `returned`: gradients of copies that went home, once a copy and
      step, or block by block in each call; `sent_bytes`: what ranks sent of both, and `charged_bytes`: what the planner
      charged for them;
    * with `moe.placement.max_load`: `over_calls`, calls whose busiest rank was over it, and `over_worst`, that of the
      worst one by the mean rank's; null where there was none.

    `at_home`, `placed` and `copies` of each layer stand in `moe_layers`.
    """

    follows = ("MoELayers",)

    def __init__(self) -> None:
        self._numbers: dict[str, Any] = {}

    def on_start(self, run: Run) -> None:
        layers, device, size = layers_of(run.engine.bare_chunks), run.topology.device, run.config.parallel.expert
        placements = {number: layer.placement for number, layer in layers.items() if layer.placement is not None}
        self._layers = [number for number, is_moe in enumerate(derived.moe_layer_pattern(run.config)) if is_moe]
        table = torch.zeros(run.config.model.num_layers, len(TALLY) + 5 * size, dtype=torch.float64)

        def summed() -> torch.Tensor:
            for number, placement in placements.items():
                table[number] = torch.from_numpy(placement.counted)
            return to_device(table.clone(), device)

        run.engine.sums.register(NAME, summed)
        # Every rank of a group counts a call, with expert tensor parallelism several groups do.
        self._counted = size * derived.expert_tensor_size(run.config)
        self._has_limit = run.config.moe.placement.max_load is not None
        worst = torch.zeros(run.topology.world_size, dtype=torch.float64)

        def gathered() -> torch.Tensor:
            worst[run.topology.rank] = max((each.worst for each in placements.values()), default=0.0)
            return to_device(worst.clone(), device)

        if self._has_limit:
            run.engine.sums.register(f"{NAME}_worst", gathered)

    def before_update(self, run: Run, result: StepResult) -> None:
        of_layers = result.sums[NAME][self._layers]
        tally = dict(zip(TALLY, of_layers[:, : len(TALLY)].sum(0).tolist(), strict=True))
        calls, at_home, placed = tally["calls"], tally["at_home"], tally["placed"]
        ranks = of_layers[:, len(TALLY) :].sum(0).view(5, -1)
        self._numbers = {
            "at_home": at_home / calls if calls else None,
            "placed": placed / calls if calls else None,
            "predicted_gain": tally["time_at_home"] / tally["time_placed"] if calls else None,
            "measured_gain": at_home / placed if calls else None,
            **{name: int(tally[name]) for name in ("copies", "returned", "sent_bytes", "charged_bytes")},
            "ranks_at_home": (ranks[0] / calls).tolist() if calls else None,
            "ranks_placed": (ranks[1] / calls).tolist() if calls else None,
        }
        if self._has_limit:
            worst = float(result.sums[f"{NAME}_worst"].max())
            over = round(tally["over"] / self._counted)
            self._numbers |= {"over_calls": over, "over_worst": worst if over else None}
        self._by_layer: dict[str, list[float | None]] = {
            "at_home": [row[1] / row[0] if row[0] else None for row in of_layers.tolist()],
            "placed": [row[2] / row[0] if row[0] else None for row in of_layers.tolist()],
            "copies": [row[TALLY.index("copies")] for row in of_layers.tolist()],
        }

    def after_step(self, run: Run, metrics: Metrics) -> None:
        metrics[NAME] = self._numbers
        metrics["moe_layers"] |= self._by_layer
