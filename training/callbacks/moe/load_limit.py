"""What follows where no plan of placement keeps `moe.placement.max_load`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from configs import derived
from configs.schema import KEYS, Config
from training.resilience import events
from training.resilience.health import RefusedRun
from training.run import Callback, Metrics, Run

MOST_SLOTS = int(KEYS["moe.placement.extra_slots"].high or 0)


class LoadLimit(Callback):
    """Says once in a run that a step's calls are over the limit; with `moe.placement.over_limit=stop` saves and ends
    the run, on all ranks alike, and again at each start that asks for the same.

    save_now: writes a checkpoint of the run as it is.
    """

    follows = ("ExpertPlacement", "MetricsFile")

    name = "load_limit"

    def __init__(self, save_now: Callable[[Run], None]) -> None:
        self._save_now = save_now
        self._said: float | None = None  # the limit of which it was
        self._stopped: dict[str, Any] = {}  # for what the run was stopped, and why

    def state_dict(self) -> dict[str, Any]:
        return {} if self._said is None else {"said": self._said, "stopped": self._stopped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._said, self._stopped = state["said"], state.get("stopped", {})

    def on_start(self, run: Run) -> None:
        """Raises RefusedRun where the run was stopped, and would be again: a launcher that starts what has failed must
        not take it on step by step."""
        if run.config.moe.placement.over_limit == "stop" and self._stopped.get("asked") == _asked(run.config):
            raise RefusedRun(f"{self._stopped['text']}. {self._stopped['advice']}", run.progress.step)

    def after_step(self, run: Run, metrics: Metrics) -> None:
        """Raises RefusedRun."""
        found, asked, step = metrics["placement"], run.config.moe.placement, run.progress.step
        if not found["over_calls"]:
            return
        stops = asked.over_limit == "stop" and not run.is_last_step
        if self._said == asked.max_load and not stops:
            return
        self._said = asked.max_load
        worst = math.ceil(100 * found["over_worst"]) / 100
        text = (
            f"moe.placement.max_load ({asked.max_load}) is not kept: in step {step} no plan with "
            f"moe.placement.extra_slots={asked.extra_slots} was found that keeps it in {found['over_calls']} calls, "
            f"the worst with {worst} times the mean rank's assignments on one rank"
        )
        advice = f"moe.placement.max_load={worst}"
        if (most := min(derived.experts_of_other_ranks(run.config), MOST_SLOTS)) > asked.extra_slots:
            advice += f", or more moe.placement.extra_slots (at most {most})"
        if stops:
            advice = f"To go on, set {advice}, or moe.placement.over_limit=warn."
            self._stopped = {"asked": _asked(run.config), "text": text, "advice": advice}
            text += f". {self._saved(run)}. {advice}"
        else:
            goes_on = "This was the last step" if run.is_last_step else "The run goes on"
            text += f". {goes_on}; said once, and counted as over_calls in metrics.jsonl. To keep it: {advice}"
            run.say(text)
        if run.is_main:
            events.record(run.run_dir, "over_limit", text, step=step)
        if stops:
            raise RefusedRun(text, step)

    def _saved(self, run: Run) -> str:
        if derived.may_save(run.config):
            self._save_now(run)
            return f"The run is saved after step {run.progress.step}"
        return "NOTHING WAS SAVED: checkpoint.interval=0 and checkpoint.at_end=false allow no checkpoint"


def _asked(config: Config) -> dict[str, Any]:
    """What decides whether a limit can be kept."""
    placement = config.moe.placement
    return {
        "max_load": placement.max_load,
        "extra_slots": placement.extra_slots,
        "policy": placement.policy,
        "bitwise": placement.bitwise,
        "block_rows": placement.block_rows,
        "expert": config.parallel.expert,
    }
