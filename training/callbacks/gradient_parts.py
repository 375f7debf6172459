"""The gradient norm of each part of the model: embedding, attention, experts, router and so on."""

from __future__ import annotations

from training.run import Callback, Metrics, Run


class GradientParts(Callback):
    """Adds `grad_norm_by_part`, before clipping; the squares of the parts add up to that of `grad_norm`."""

    def after_step(self, run: Run, metrics: Metrics) -> None:
        # A step whose gradients overflowed (fp16) is skipped before its norm is known.
        metrics["grad_norm_by_part"] = run.engine.norms.by_part if metrics["updated"] else {}
