"""What a step's numbers mean: model FLOPs utilisation, and how even the experts' load was."""

from __future__ import annotations

from simulator.flops import training_flops_per_token
from training.report.metrics import expert_load, peak_flops
from training.run import Callback, Metrics, Run


class StepNumbers(Callback):
    """Adds `mfu`, where the device's peak is known, and `tokens_per_expert`, for an MoE model."""

    def on_start(self, run: Run) -> None:
        self._flops_per_token = training_flops_per_token(run.config, run.vocab_size)
        self._peak_flops = peak_flops(run.config, run.topology.device)

    def after_step(self, run: Run, metrics: Metrics) -> None:
        if self._peak_flops is not None:
            metrics["mfu"] = (
                self._flops_per_token * metrics["tokens_per_second"] / (self._peak_flops * run.topology.world_size)
            )
        assert run.result is not None
        if run.result.tokens_per_expert is not None:
            metrics["tokens_per_expert"] = expert_load(run.result.tokens_per_expert)
