"""What a step's numbers mean: model FLOPs utilisation, and how even the experts' load was."""

from __future__ import annotations

from configs import derived
from simulator.flops import training_flops_per_token
from training.report.metrics import expert_load, peak_flops
from training.run import Callback, Metrics, Run


class StepNumbers(Callback):
    """Adds `mfu`, where the device's peak is known, `attended_share`, where documents are separate, and
    `tokens_per_expert`, for an MoE model."""

    def on_start(self, run: Run) -> None:
        # Operations per token are a line over the share of pairs that attend, which separate documents change in every
        # step.
        nothing, everything = (training_flops_per_token(run.config, run.vocab_size, share) for share in (0.0, 1.0))
        self._flops_beside, self._flops_of_pairs = nothing, everything - nothing
        self._share = derived.attended_share(run.config)
        self._peak_flops = peak_flops(run.config, run.topology.device)

    def after_step(self, run: Run, metrics: Metrics) -> None:
        assert run.result is not None
        share = run.result.attended_share
        if share is not None:
            metrics["attended_share"] = share
        if self._peak_flops is not None:
            flops = self._flops_beside + self._flops_of_pairs * (self._share if share is None else share)
            metrics["mfu"] = flops * metrics["tokens_per_second"] / (self._peak_flops * run.topology.world_size)
        if run.result.tokens_per_expert is not None:
            metrics["tokens_per_expert"] = expert_load(run.result.tokens_per_expert)
