"""Record the simulator's predictions: the layout that was searched for, and the predicted next to the measured step
time."""

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

STEPS = 20  # of this process, after which the times are compared; the first step includes one-time work
TOLERATED = 0.15  # share of the predicted seconds; a larger difference is explained
NAMED = 3  # components of a predicted step


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
    """Compares the predicted step time once with the median of this process's first STEPS steps, leaving out the first;
    only for a run with `hardware`. Also writes the predicted timeline for the report. If the times differ by more than
    TOLERATED, the event also names likely causes."""

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
            run.engine.job,
            attended_share=planned_share(config),
            documents=planned_segments(config),
            hardware=self._machine,
        )
        self._prediction = plan.step
        write_timeline(plan)

    def after_step(self, run: Run, metrics: Metrics) -> None:
        if self._prediction is None or len(self._taken) == STEPS:
            return
        self._taken.append(dict(metrics))
        if len(self._taken) == STEPS:
            assert self._prediction is not None and self._machine is not None
            predicted, taken = self._prediction.seconds, self._taken[1:]
            measured = statistics.median(line["step_seconds"] for line in taken)
            off = measured / predicted - 1
            text = (
                f"step time: {measured:.3g} s measured (median of {len(taken)} steps), {predicted:.3g} s predicted on "
                f"{self._machine.name} (back-test: {describe_back_tests(self._machine.errors)}): {off:+.0%}"
            )
            where = explained(self._prediction, taken, measured) if abs(off) > TOLERATED else ""
            events.log(
                run.run_dir,
                "predicted_step",
                f"{text}{'. ' * bool(where)}{where}",
                step=run.progress.step,
                predicted_seconds=predicted,
                measured_seconds=measured,
            )


def explained(prediction: Prediction, taken: list[Metrics], measured: float) -> str:
    """Return a sentence on what may explain a step that takes `measured` seconds. It names waits and times that the run
    measured; then, for each of the largest predicted components, the factor by which that component alone would have to
    be slower."""
    gap, found = measured - prediction.seconds, []
    waited = statistics.median(line.get("data_wait_seconds", 0.0) for line in taken)
    if waited > 0.01 * measured:
        found.append(f"{waited / measured:.0%} of the step waits for data, which the prediction leaves out")
    layers = taken[-1].get("moe_layers", {})
    own = [*layers.get("measured_forward_seconds", []), *layers.get("measured_backward_seconds", [])]
    planned = [*layers.get("predicted_forward_seconds", []), *layers.get("predicted_backward_seconds", [])]
    if own and None not in own:
        is_planned = planned and None not in planned
        found.append(
            f"a call of the MoE layers took {sum(own):.3g} s, forward and backward"
            + (f", where the planner expected {sum(planned):.3g} s" if is_planned else "")
        )
    largest = reason_shares(prediction)[:NAMED]
    alone = [(1 + gap / (share * prediction.seconds), reason) for share, reason in largest]
    found += [
        f"{reason}: {ratio:.2g} times as long as predicted would explain it alone"
        for ratio, reason in alone
        if ratio > 0
    ]
    if not any(ratio > 0 for ratio, _ in alone):
        found.append(
            f"no component alone explains it; the step took {measured / prediction.seconds:.2g} times as long as "
            "predicted"
        )
    return f"Where to look: {'; '.join(found)}. training.profile.steps shows both timelines in the report."
