"""Plan MoE layers: costs are measured once, then each layer's plan is chosen from its routing in the last step."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from base.errors import ConfigError
from base.files import SideLog
from moe.alltoall.hierarchical import exchange_kinds
from moe.chunk_plan import LayerLoad, Plan
from moe.layer import MixtrainMoELayer, layers_of
from moe.placement.live import ran
from moe.planning import inputs
from moe.planning.costs import Decision
from moe.planning.layer_measurement import measure_layer
from moe.planning.planner import Planner
from moe.planning.trial import PlanChoice, Trial
from parallel.costs import measure
from training.callbacks.moe.expert_placement import NAME as PLACEMENT
from training.run import Callback, Metrics, Run
from training.step import StepResult

MEASURE_AFTER = 5  # steps over which a chosen plan is measured


@dataclass
class _Pending:
    """A plan that a layer uses since step `since` and whose times are not measured yet."""

    layer: MixtrainMoELayer
    decision: Decision
    since: int


class ExpertPlanning(Callback):
    """Chooses each MoE layer's plan (number of chunks, memory strategy, all-to-all) where the config says auto, and
    writes all decisions to `plans.jsonl`.

    A decision is written with its predicted times, and later with the measured ones. The first steps try the plans that
    are predicted to be about equally fast. Later pipeline stages write `plans_stage1.jsonl` and so on.
    """

    def __init__(self) -> None:
        self._log: SideLog | None = None
        self._planners: dict[str, Planner] = {}  # by name of the all-to-all
        self._in_force: dict[int, tuple[str, Plan]] = {}  # by layer
        self.decisions: dict[int, Decision] = {}  # by layer: the decision in force
        self.measured: dict[int, dict[str, float]] = {}  # by layer: seconds of a call with the decision in force
        self._pending: dict[int, _Pending] = {}

    def on_start(self, run: Run) -> None:
        """Measure costs and choose each layer's first plan. Raises ConfigError if no plan fits the memory budget."""
        self._layers = layers_of(run.engine.bare_chunks)
        if not self._layers:
            return
        first = next(iter(self._layers.values()))
        config, device = run.config, run.topology.device.type
        self._shape, self._policy = inputs.layer_shape(config, device), inputs.trial_policy(config)
        folder, group = Path(config.data.cache_dir) / "costs", first.ep_group
        asked = config.moe.all_to_all
        kinds = exchange_kinds(group) if asked == "auto" and group.size() > 1 else [asked]
        limits = inputs.limits(config, device, run.topology.world_size, run.topology.pipeline.rank)
        measured = {}
        for kind in kinds:
            if len(kinds) > 1:
                first.use_plan(first.plan, kind)
            measured[kind] = measure_layer(first, self._shape, folder)
            self._planners[kind] = Planner(measured[kind], limits)
        if run.topology.speaks_for_stage:
            stage = run.topology.pipeline.rank
            self._log = SideLog(run.run_dir / ("plans.jsonl" if stage == 0 else f"plans_stage{stage}.jsonl"))
        costs = {kind: of_kind.as_dict() for kind, of_kind in measured.items()}
        self._write({"step": run.progress.step, "costs": costs})
        even = self._shape.even()
        close = self._ask(lambda planner: planner.close(even, self._policy.within))
        self._trial = Trial(close, len(self._layers), self._policy)
        self._decide(run, dict.fromkeys(self._layers, even))
        decision = self._pending[min(self._pending)].decision
        plan, prediction = decision.plan, decision.prediction
        run.log(
            f"MoE layers begin with {plan.degree} chunk(s) forward, {plan.backward_degree} backward, memory strategy "
            f"{plan.memory_strategy}; predicted {1000 * prediction.forward:.1f} + {1000 * prediction.backward:.1f} ms "
            f"and {prediction.memory / 2**20:.1f} MiB of buffers"
        )

    def after_step(self, run: Run, metrics: Metrics) -> None:
        if not self._layers:
            return
        step = run.progress.step
        for number, pending in list(self._pending.items()):
            steps = step - pending.since
            if steps >= (MEASURE_AFTER if self._trial.is_over else self._policy.steps) or run.is_last_step:
                seconds = self.measured[number] = pending.layer.timer.take()
                self._write({"step": step, "layer": number, "measured": seconds, **_as_dict(pending.decision)})
                del self._pending[number]
            elif steps == self._policy.steps - 1 and not self._trial.is_over:
                pending.layer.timer.take()  # that step allocated buffers
        if not self._trial.is_over and not self._pending:
            group = next(iter(self._layers.values())).ep_group
            own = [self.measured[number][name] for name in ("forward", "backward") for number in self._layers]
            agreed = measure.max_over_ranks(own, run.topology.device, group)
            self._trial.took(list(zip(agreed[: len(self._layers)], agreed[len(self._layers) :], strict=True)))
            if self._trial.is_over:
                for kind, planner in self._planners.items():
                    planner.learn(self._trial.factors(kind))
        assert run.result is not None and run.result.tokens_per_expert is not None
        start = time.perf_counter()
        self._decide(run, {number: self._load(run.result, number) for number in self._layers})
        metrics["moe_plan_seconds"] = time.perf_counter() - start

    def _load(self, result: StepResult, number: int) -> LayerLoad:
        """Return the token load of MoE layer `number` in the last step, distributed over ranks as expert placement did
        or, without placement, by the experts' primary ranks."""
        layer = self._layers[number]
        if layer.placement is not None and PLACEMENT in result.sums:
            like = ran(result.sums[PLACEMENT][number].tolist(), self._shape.num_ranks)
            if like is not None:
                return self._shape.placed(like)
        assert result.tokens_per_expert is not None
        return self._shape.at_primaries(result.tokens_per_expert[number].tolist(), layer.experts.map)

    @property
    def is_final(self) -> bool:
        """Return whether the trial of plans is finished, or this rank has no MoE layers."""
        return not self._layers or self._trial.is_over

    def _ask(self, question: Callable[[Planner], list[Decision]]) -> list[PlanChoice]:
        """Call `question` with the planner of each kind of all-to-all, and return all decisions, each with the name of
        its all-to-all. Raises ConfigError if no plan fits the memory budget."""
        try:
            return [(kind, decision) for kind, planner in self._planners.items() for decision in question(planner)]
        except ValueError as error:
            raise ConfigError(str(error)) from None

    def _choose(self, load: LayerLoad) -> PlanChoice:
        """Return the plan that is being tried or, after the trial, the plan with the shortest expected time for
        `load`."""
        if not self._trial.is_over:
            return self._trial.choice
        choices = self._ask(lambda planner: [planner.decide(load)])
        return min(choices, key=lambda choice: self._planners[choice[0]].expected(choice[1]))

    def _decide(self, run: Run, loads: dict[int, LayerLoad]) -> None:
        if not self._trial.is_over:
            kind, decision = self._trial.choice
            if not all(self._planners[kind].fits(decision.plan, load) for load in loads.values()):
                self._trial.stop()  # its plans were chosen for an even load
        for number, load in loads.items():
            kind, decision = self._choose(load)
            if self._in_force.get(number) == (kind, decision.plan):
                continue
            layer = self._layers[number]
            layer.use_plan(decision.plan, kind if len(self._planners) > 1 else None)
            self._in_force[number] = kind, decision.plan
            self.decisions[number] = decision
            self.measured.pop(number, None)
            layer.timer.take()
            self._pending[number] = _Pending(layer, decision, run.progress.step)
            line = {"step": run.progress.step, "layer": number, "load": load.as_dict(), "all_to_all": kind}
            self._write({**line, **_as_dict(decision)})

    def _write(self, line: dict[str, Any]) -> None:
        if self._log is not None:
            self._log.write(json.dumps(line))

    def close(self) -> None:
        if self._log is not None:
            self._log.close()
            self._log = None


def _as_dict(decision: Decision) -> dict[str, Any]:
    return {"plan": asdict(decision.plan), "predicted": asdict(decision.prediction)}
