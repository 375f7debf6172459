"""Record the simulator's predictions: the layout that a search chose, and the predicted and the measured step time."""

from __future__ import annotations

import statistics

from base.checksums import write_summed
from data.document_lengths import planned_segments, planned_share
from simulator.clock.hardware import Hardware
from simulator.clock.prediction import Prediction, describe_back_tests, reason_shares
from simulator.run_plan import make_plan
from simulator.text import write_timeline
from training.resilience import events
from training.run import Callback, Metrics, Run
from training.starting.choices import LAYOUT_CHOSEN, LayoutChoice
from training.starting.machine import machine_of

STEPS = 20  # steps of this process after which the times are compared; the first step includes one-time work
TOLERATED = 0.15  # share of the predicted seconds; a larger difference is explained
NAMED = 3  # components of a predicted step that an explanation names


class ChosenLayout(Callback):
    """Writes `layout_chosen.json`, which the next start reads, and records the chosen layout as an event."""

    def __init__(self, choice: LayoutChoice) -> None:
        self._choice = choice

    def on_start(self, run: Run) -> None:
        if not run.is_main:
            return
        choice = self._choice
        kind = "layout_kept" if choice.is_kept else "layout_chosen"
        events.record(run.run_dir, kind, choice.lines[0], step=run.progress.step, world_size=choice.world_size)
        if not choice.is_kept:
            write_summed(run.run_dir / LAYOUT_CHOSEN, choice.record)


class PredictedStep(Callback):
    """Compares the predicted step time once with the measured one: the median of this process's first STEPS steps
    without the very first. Only for runs with `hardware`. Also writes the predicted timeline for the report. If the
    times differ by more than TOLERATED, the logged event also names likely causes."""

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
        share, documents = planned_share(config), planned_segments(config)
        plan = make_plan(run.engine.job, attended_share=share, documents=documents, hardware=self._machine)
        self._prediction = plan.step
        write_timeline(plan)

    def after_step(self, run: Run, metrics: Metrics) -> None:
        if self._prediction is None or len(self._taken) == STEPS:
            return
        self._taken.append(dict(metrics))
        if len(self._taken) < STEPS:
            return
        assert self._machine is not None
        predicted, taken = self._prediction.seconds, self._taken[1:]
        measured = statistics.median(line["step_seconds"] for line in taken)
        off = measured / predicted - 1
        text = (
            f"step time: {measured:.3g} s measured (median of {len(taken)} steps), {predicted:.3g} s predicted on "
            f"{self._machine.name} (back-test: {describe_back_tests(self._machine.errors)}): {off:+.0%}"
        )
        if abs(off) > TOLERATED:
            text += f". {explained(self._prediction, taken, measured)}"
        run.log_event("predicted_step", text, predicted_seconds=predicted, measured_seconds=measured)


def explained(prediction: Prediction, taken: list[Metrics], measured: float) -> str:
    """Return a sentence about what may explain that a step takes `measured` seconds. The sentence names waits and times
    that the run measured. For each of the largest predicted components, it names the factor by which this component
    alone would have to be slower."""
    gap, found = measured - prediction.seconds, []
    waited = statistics.median(line.get("data_wait_seconds", 0.0) for line in taken)
    if waited > 0.01 * measured:
        found.append(f"{waited / measured:.0%} of the step waits for data, which the prediction leaves out")
    layers = taken[-1].get("moe_layers", {})
    own = [*layers.get("measured_forward_seconds", []), *layers.get("measured_backward_seconds", [])]
    planned = [*layers.get("predicted_forward_seconds", []), *layers.get("predicted_backward_seconds", [])]
    if own and None not in own:
        expected = f", where the planner expected {sum(planned):.3g} s" if planned and None not in planned else ""
        found.append(f"a call of the MoE layers took {sum(own):.3g} s, forward and backward{expected}")
    ratios = [(1 + gap / (share * prediction.seconds), name) for share, name in reason_shares(prediction)[:NAMED]]
    alone = [
        f"{name}: {ratio:.2g} times as long as predicted would explain it alone" for ratio, name in ratios if ratio > 0
    ]
    factor = f"{measured / prediction.seconds:.2g} times as long as predicted"
    found += alone or [f"no component alone explains it; the step took {factor}"]
    return f"Where to look: {'; '.join(found)}. training.profile.steps shows both timelines in the report."
