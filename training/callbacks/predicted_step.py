"""What the clock predicted for a step, beside what the first steps took."""

from __future__ import annotations

import statistics

from data.pieces import planned_pieces, planned_share
from simulator.clock.hardware import Hardware
from simulator.clock.output.words import held_to, shares
from simulator.clock.prediction import Prediction
from simulator.run_plan import make_plan
from simulator.text import write_timeline
from training.resilience import events
from training.run import Callback, Metrics, Run
from training.starting.machine import machine_of

STEPS = 20  # of this process, after which it is said; the first pays for what is made once
TOLERATED = 0.15  # of the predicted seconds, above which a resource is named
NAMED = 3  # parts of a step


class PredictedStep(Callback):
    """Says once, after STEPS steps, how far the median of all but the first is from the prediction; for a run with
    `hardware`.

    Beyond TOLERATED it says where to look: what the run measured itself, and for the largest parts of the prediction
    how far each alone would have to be from its figure. It writes the prediction's timeline for the report.
    """

    follows = ("MoELayers",)

    def __init__(self) -> None:
        self._taken: list[Metrics] = []
        self._prediction: Prediction | None = None
        self._machine: Hardware | None = None

    def on_start(self, run: Run) -> None:
        if not run.is_main:
            return
        self._taken, config = [], run.config
        self._machine, _ = machine_of(config)
        plan = make_plan(
            config,
            run.topology.world_size,
            run.vocab_size,
            run.topology.device.type,
            attended_share=planned_share(config),
            documents=planned_pieces(config),
            hardware=self._machine,
        )
        self._prediction = plan.step
        write_timeline(plan)

    def after_step(self, run: Run, metrics: Metrics) -> None:
        if self._prediction is None or len(self._taken) == STEPS:
            return
        self._taken.append(dict(metrics))
        if len(self._taken) == STEPS:
            self._say(run)

    def _say(self, run: Run) -> None:
        assert self._prediction is not None and self._machine is not None
        predicted, taken = self._prediction.seconds, self._taken[1:]
        measured = statistics.median(line["step_seconds"] for line in taken)
        off = measured / predicted - 1
        text = (
            f"step time: {measured:.3g} s measured (median of {len(taken)} steps), {predicted:.3g} s predicted on "
            f"{self._machine.name} (back-test: {held_to(self._machine.errors)}): {off:+.0%}"
        )
        where = explained(self._prediction, taken, measured) if abs(off) > TOLERATED else ""
        events.say(
            run.run_dir,
            "predicted_step",
            f"{text}{'. ' * bool(where)}{where}",
            step=run.progress.step,
            predicted_seconds=predicted,
            measured_seconds=measured,
        )


def explained(prediction: Prediction, taken: list[Metrics], measured: float) -> str:
    """Where the difference may lie, in words: what the run measured itself, then what each of the largest parts of the
    prediction would have to be. `measured`: seconds of a step."""
    gap, found = measured - prediction.seconds, []
    waited = statistics.median(line.get("data_wait_seconds", 0.0) for line in taken)
    if waited > 0.01 * measured:
        found.append(f"{waited / measured:.0%} of the step waits for data, which no prediction has")
    calls = _moe_calls(taken[-1])
    if calls is not None:
        own, planned = calls
        found.append(
            f"a call of the MoE layers took {own:.3g} s, forward and backward"
            + ("" if planned is None else f", where the planner expected {planned:.3g} s")
        )
    alone = [(1 + gap / (share * prediction.seconds), words) for share, words in shares(prediction)[:NAMED]]
    found += [
        f"{words}: {ratio:.2g} times as long as predicted would explain it alone" for ratio, words in alone if ratio > 0
    ]
    if not any(ratio > 0 for ratio, _ in alone):
        found.append(
            f"no part alone explains it; all took {measured / prediction.seconds:.2g} times as long as predicted"
        )
    return f"Where to look: {'; '.join(found)}. training.profile.steps shows both timelines in the report."


def _moe_calls(line: Metrics) -> tuple[float, float | None] | None:
    """Seconds of one call of all MoE layers together, measured and as the planner expected; None without them."""
    layers = line.get("moe_layers", {})
    measured = [*layers.get("measured_forward_seconds", []), *layers.get("measured_backward_seconds", [])]
    predicted = [*layers.get("predicted_forward_seconds", []), *layers.get("predicted_backward_seconds", [])]
    if not measured or None in measured:
        return None
    return sum(measured), None if not predicted or None in predicted else sum(predicted)
