"""The load-balancing loss over the global batch: report its value, and pass a step's expert choices to the next
step."""

from __future__ import annotations

from typing import Any

import torch

from configs import derived
from moe.balance import GlobalBalance, values
from training.run import Callback, Metrics, Run


class GlobalAuxLoss(Callback):
    """Adds the load-balancing loss over the global batch: `global_aux_loss`, the mean over the MoE layers, and the loss
    of each layer in `moe_layers`."""

    name = "global_aux_loss"

    def __init__(self) -> None:
        self._choices: torch.Tensor | None = None  # [L, E] in the last update: MoE layers, experts

    def state_dict(self) -> dict[str, Any]:
        return {} if self._choices is None else {"choices": self._choices.long().tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._choices = torch.tensor(state["choices"], dtype=torch.float64)

    def on_start(self, run: Run) -> None:
        layers = [number for number, is_moe in enumerate(derived.moe_layer_pattern(run.config)) if is_moe]
        experts = run.config.moe.num_experts
        assert experts is not None
        self._balance = GlobalBalance(run.engine.bare_chunks, layers, experts, run.topology.device)
        self._balance.follow(self._choices)
        run.engine.sums.register(self.name, self._balance.take)

    def before_step(self, run: Run) -> None:
        self._balance.begin()

    def after_step(self, run: Run, metrics: Metrics) -> None:
        assert run.result is not None
        sums = run.result.sums[self.name]
        by_layer = values(sums)
        metrics[self.name] = float(by_layer.mean())
        run.result.per_layer[self.name] = by_layer.tolist()
        if run.result.updated:  # else fp16 gradients overflowed, and the choices may come from non-finite numbers
            self._choices = sums[0]
            self._balance.follow(self._choices)

    def on_rollback(self, run: Run) -> None:
        if self.name not in run.progress.callbacks:  # a checkpoint from before the first update with this loss
            self._choices = None
        self._balance.follow(self._choices)
