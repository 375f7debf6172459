"""Report fp16 steps without an update because their gradients overflowed, and end the run if no step makes an update
any more."""

from __future__ import annotations

from checkpoint import start
from optim import state as optimizer_state
from parallel.megatron.optimizer import loss_scale
from training.resilience.health import UnhealthyRun
from training.run import Callback, Metrics, Run

MOST_IN_A_ROW = 50  # steps without an update: gradients that overflow at 2**-50 of the scale will not fit later either


class LossScale(Callback):
    """Logs each step that made no update because its fp16 gradients overflowed. A few such steps in a row are normal
    while the loss scale falls."""

    follows = ("MetricsFile",)

    def after_step(self, run: Run, metrics: Metrics) -> None:
        if metrics["updated"]:
            return
        health = run.health
        step, in_a_row = run.progress.step, health.without_update_in_a_row
        scale, lowest = loss_scale(run.engine.optimizer)
        text = (
            f"step {step} made no update: its fp16 gradients overflowed. The loss scale is now {scale:g}; "
            f"{health.without_update} of {step} steps made no update so far"
        )
        run.log_event("no_update", text, loss_scale=scale, in_all=health.without_update, in_a_row=in_a_row)
        left = run.config.training.steps - step
        why = hopeless(scale, lowest, in_a_row, left, optimizer_state.steps_taken(run.engine.optimizer))
        if why is not None:
            folder = start.in_new_folder(run.config)  # a checkpoint here keeps its precision and its loss scale
            raise UnhealthyRun(
                f"after step {step}: {why}, because fp16 gradients overflowed; the loss scale fell to {scale:g}. Try "
                f"training.precision=bf16 {folder}, or in that folder a lower optimizer.lr or "
                "training.initial_loss_scale."
            )


def hopeless(scale: float, lowest: float, in_a_row: int, steps_left: int, updates: int) -> str | None:
    """Return why a run must end if its last `in_a_row` steps made no update, or None if the run may continue. `scale`
    and `lowest`: the current and the lowest possible loss scale. `updates`: the steps with an update."""
    if steps_left == 0 and updates == 0:
        return "no step made an update"
    if scale <= lowest or in_a_row >= MOST_IN_A_ROW:
        return f"the last {in_a_row} steps made no update"
    return None
