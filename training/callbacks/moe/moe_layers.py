"""Metrics of each MoE layer on all pipeline stages: router statistics, and predicted and measured times of calls."""

from __future__ import annotations

from typing import Any

import torch

from configs import derived
from moe.alltoall.hierarchical import HierarchicalAllToAll
from moe.chunk_plan import STRATEGIES
from moe.layer import layers_of
from training.callbacks.moe.expert_planning import ExpertPlanning
from training.run import Callback, Metrics, Run

MEASURE_EVERY = 50  # steps between measurements of layers without a planner
COLUMNS = (
    *("degree", "backward_degree", "memory_strategy", "all_to_all"),
    *("predicted_forward_seconds", "predicted_backward_seconds"),
    *("measured_forward_seconds", "measured_backward_seconds"),
)
KINDS = ("none", "flat", "hierarchical")  # of all-to-all; "none": this rank has all experts


class MoELayers(Callback):
    """Adds `moe_layers`: lists with one entry per MoE layer of the whole model. The list `layer` has the layer numbers,
    from 0. Plans and times belong to the step of the metrics. Predicted times are null unless the planner chose the
    plan. Measured times, in seconds per call of the layer, are null until they are measured."""

    follows = ("ExpertPlanning",)

    def __init__(self, planning: ExpertPlanning | None):
        self._planning = planning

    def on_start(self, run: Run) -> None:
        self._numbers = [number for number, is_moe in enumerate(derived.moe_layer_pattern(run.config)) if is_moe]
        # One rank of each layer fills its row; the sum over all ranks is the table of the whole model.
        self._layers = layers_of(run.engine.bare_chunks) if run.topology.speaks_for_stage else {}
        self._table_rows: dict[int, list[float]] = {}
        shape = (run.config.model.num_layers, len(COLUMNS))
        self._table = torch.zeros(shape, dtype=torch.float64, device=run.topology.device)
        self._measured: dict[int, dict[str, float]] = {}
        self._refresh()
        run.engine.sums.register("moe_plans", lambda: self._table)

    def after_step(self, run: Run, metrics: Metrics) -> None:
        assert run.result is not None
        layer_rows = run.result.sums["moe_plans"][self._numbers]
        lists: dict[str, list[Any]] = dict(zip(COLUMNS, layer_rows.t().tolist(), strict=True))
        for name in ("degree", "backward_degree"):
            lists[name] = [int(degree) for degree in lists[name]]
        lists["memory_strategy"] = [list(STRATEGIES)[int(i)] for i in lists["memory_strategy"]]
        lists["all_to_all"] = [KINDS[int(i)] for i in lists["all_to_all"]]
        for name in COLUMNS[4:]:
            lists[name] = [seconds or None for seconds in lists[name]]
        metrics["moe_layers"] = {"layer": self._numbers, **run.result.per_layer, **lists}
        if self._planning is None and (metrics["step"] % MEASURE_EVERY == 0 or not self._measured):
            self._measured = {number: layer.timer.take() for number, layer in self._layers.items()}
        self._refresh()

    def _refresh(self) -> None:
        """Update the metrics' table of plans and times, with one row per MoE layer, to the plans that the next step
        uses."""
        planning = self._planning
        for number, layer in self._layers.items():
            plan, decision = layer.plan, None if planning is None else planning.decisions.get(number)
            measured = (self._measured if planning is None else planning.measured).get(number, {})
            kind = 0 if layer.exchange is None else 2 if isinstance(layer.exchange, HierarchicalAllToAll) else 1
            row: list[float] = [plan.degree, plan.backward_degree, list(STRATEGIES).index(plan.memory_strategy), kind]
            row += [0.0, 0.0] if decision is None else [decision.prediction.forward, decision.prediction.backward]
            row += [measured.get("forward", 0.0), measured.get("backward", 0.0)]
            if self._table_rows.get(number) != row:
                self._table_rows[number] = row
                self._table[number] = torch.tensor(row, dtype=torch.float64)
