"""Report how expert placement spreads the load in each step, and react when no plan keeps the load limit."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from configs import derived
from configs.schema import KEYS, Config
from memory.transfer import to_device
from moe.layer import layers_of
from moe.placement.live import TALLY
from training.resilience import events
from training.resilience.health import RejectedRun
from training.run import Callback, Metrics, Run
from training.step import StepResult

NAME = "placement"


class ExpertPlacement(Callback):
    """Adds `placement` to the metrics, from a step's calls of all MoE layers; numbers are null if no call was planned:

    * `at_home` and `placed`: the busiest rank's token assignments divided by the mean rank's, without and with
      replicas, as a mean over calls; `ranks_at_home` and `ranks_placed`: this ratio for each rank of an expert
      parallel group;
    * `predicted_gain`: the planner's estimate of the busiest rank's time without replicas, divided by the time with
      replicas and their cost; `measured_gain`: `at_home` divided by `placed`;
    * `copies`: replicas whose weights were sent; `returned`: gradients of replicas that were sent back, once per
      replica and step, or block by block in each call; `sent_bytes`: bytes that ranks sent for both;
      `charged_bytes`: the planner's estimate of these bytes;
    * with `moe.placement.max_load`: `over_calls`, the calls whose busiest rank was above the limit, and `over_worst`,
      the largest load in these calls divided by the mean rank's, or null without such calls.

    Adds `at_home`, `placed` and `copies` of each layer to `moe_layers`.
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
        # Every rank of a group counts a call; with expert tensor parallelism several groups do.
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


MOST_SLOTS = int(KEYS["moe.placement.extra_slots"].high or 0)


class LoadLimit(Callback):
    """Logs once per run that calls of a step exceeded the load limit, moe.placement.max_load. With
    `moe.placement.over_limit=stop`, saves and ends the run on all ranks instead, and refuses later starts with
    unchanged settings. `save_now` writes a checkpoint."""

    follows = ("ExpertPlacement", "MetricsFile")

    name = "load_limit"

    def __init__(self, save_now: Callable[[Run], None]) -> None:
        self._save_now = save_now
        self._reported: float | None = None  # the limit that was reported
        self._stopped: dict[str, Any] = {}  # settings with which the run was stopped, and the reason

    def state_dict(self) -> dict[str, Any]:
        return {} if self._reported is None else {"said": self._reported, "stopped": self._stopped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._reported, self._stopped = state["said"], state.get("stopped", {})

    def on_start(self, run: Run) -> None:
        """Raise RejectedRun if the run was stopped with these settings before. Otherwise a launcher that restarts
        failed runs would take one step per restart."""
        if run.config.moe.placement.over_limit == "stop" and self._stopped.get("asked") == _settings(run.config):
            raise RejectedRun(f"{self._stopped['text']}. {self._stopped['advice']}", run.progress.step)

    def after_step(self, run: Run, metrics: Metrics) -> None:
        """Log that calls exceeded the limit; if the config says stop, save the run and raise RejectedRun."""
        found, asked, step = metrics["placement"], run.config.moe.placement, run.progress.step
        if not found["over_calls"]:
            return
        stops = asked.over_limit == "stop" and not run.is_last_step
        if self._reported == asked.max_load and not stops:
            return
        self._reported = asked.max_load
        worst = math.ceil(100 * found["over_worst"]) / 100
        text = (
            f"moe.placement.max_load ({asked.max_load}) was exceeded: in step {step} the planner found no plan with "
            f"moe.placement.extra_slots={asked.extra_slots} that keeps the limit in {found['over_calls']} calls; in "
            f"the worst call, one rank had {worst} times the mean rank's token assignments"
        )
        advice = f"moe.placement.max_load={worst}"
        if (most := min(derived.experts_of_other_ranks(run.config), MOST_SLOTS)) > asked.extra_slots:
            advice += f", or more moe.placement.extra_slots (at most {most})"
        if stops:
            advice = f"To continue, set {advice}, or moe.placement.over_limit=warn."
            self._stopped = {"asked": _settings(run.config), "text": text, "advice": advice}
            if derived.may_save(run.config):
                self._save_now(run)
                saved = f"The run is saved after step {step}"
            else:
                saved = "NOTHING WAS SAVED: checkpoint.interval=0 and checkpoint.at_end=false allow no checkpoint"
            text += f". {saved}. {advice}"
        else:
            text += ". This was the last step" if run.is_last_step else ". The run continues"
            text += (
                f"; this is logged once, and counted as over_calls in metrics.jsonl. To keep the limit, set {advice}"
            )
            run.log(text)
        if run.is_main:
            events.record(run.run_dir, "over_limit", text, step=step)
        if stops:
            raise RejectedRun(text, step)


def _settings(config: Config) -> dict[str, Any]:
    """Return the settings that decide whether a placement plan can stay within the load limit."""
    names = ("max_load", "extra_slots", "policy", "bitwise", "block_rows")
    return {**{name: getattr(config.moe.placement, name) for name in names}, "expert": config.parallel.expert}
