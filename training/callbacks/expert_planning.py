"""MoE layers that plan themselves: measures costs once, then decides for each layer by what its router did in the last step."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron.core import parallel_state

from configs import derived
from configs.files import Log, WriteError
from configs.schema import ConfigError
from moe import blocks, exchanges
from moe.layer import MixtrainMoELayer
from moe.load import Shape
from moe.measure import measure_layer
from moe.plan import STRATEGIES, Load, Plan
from moe.planner import DEGREES, Decision, Limits, Planner
from moe.trial import Choice, Trial
from parallel import costs
from training.run import Callback, Metrics, Run

MEASURE_AFTER = 5  # steps that a decision is measured over
TRIAL_STEPS = 2  # that each plan of a trial runs at a time; the last one is measured


@dataclass
class _Pending:
    """A decision that is in force and not yet measured."""

    layer: MixtrainMoELayer
    decision: Decision
    since: int


class ExpertPlanning(Callback):
    """Sets each MoE layer's plan where the config says auto, and writes `plans.jsonl`: every decision with its prediction, and what
    was then measured. In the first steps, plans that are predicted to be about as fast are tried. Later pipeline stages write files of
    their own, `plans_stage1.jsonl` and so on."""

    def __init__(self) -> None:
        self._log: Log | None = None
        self._planners: dict[str, Planner] = {}  # by the all-to-all whose costs they know
        self._in_force: dict[int, tuple[str, Plan]] = {}  # by layer
        self.decisions: dict[int, Decision] = {}  # by layer: the one in force
        self.measured: dict[int, dict[str, float]] = {}  # by layer: seconds of a call under the decision in force, once known
        self._pending: dict[int, _Pending] = {}

    def on_start(self, run: Run) -> None:
        """Raises ConfigError if no plan fits the memory budget."""
        layers = [module for chunk in run.model.bare_chunks for module in chunk.modules() if isinstance(module, MixtrainMoELayer)]
        self._layers = {layer.layer_number - 1: layer for layer in layers if layer.layer_number is not None}
        if not layers:
            return
        config = run.config
        self._shape = _shape(run, layers[0])
        folder, group = Path(config.data.cache_dir) / "costs", layers[0].ep_group
        kinds = exchanges.kinds(group) if config.moe.all_to_all == "auto" and group.size() > 1 else [config.moe.all_to_all]
        limits = _limits(run, len(layers))
        measured = {}
        for kind in kinds:
            if len(kinds) > 1:
                layers[0].exchange = exchanges.shared(group, kind)
            measured[kind] = measure_layer(layers[0], self._shape, folder)
            self._planners[kind] = Planner(measured[kind], limits)
        if parallel_state.get_data_parallel_rank() == 0 and run.topology.tensor_rank == 0:
            stage = run.topology.pipeline_rank
            self._log = Log(run.run_dir / ("plans.jsonl" if stage == 0 else f"plans_stage{stage}.jsonl"))
        self._write({"step": run.progress.step, "costs": {kind: of_kind.as_dict() for kind, of_kind in measured.items()}})
        even = self._shape.even()
        self._trial = Trial(self._ask(lambda planner: planner.close(even)), len(layers))
        self._decide(run, dict.fromkeys(self._layers, even))
        decision = self._pending[min(self._pending)].decision
        run.say(f"MoE layers begin with {_describe(decision)}")

    def after_step(self, run: Run, metrics: Metrics) -> None:
        if not self._layers:
            return
        step = run.progress.step
        for number, pending in list(self._pending.items()):
            steps = step - pending.since
            if steps >= (MEASURE_AFTER if self._trial.is_over else TRIAL_STEPS) or run.is_last_step:
                self.measured[number] = pending.layer.clock.take()
                self._write({"step": step, "layer": number, "measured": self.measured[number], **_as_dict(pending.decision)})
                del self._pending[number]
            elif steps == TRIAL_STEPS - 1 and not self._trial.is_over:
                pending.layer.clock.take()  # buffers were made
        if not self._trial.is_over and not self._pending:
            self._learn(run)
        counts, start = run.tokens_per_expert, time.perf_counter()
        self._decide(run, {number: self._shape.load(counts[number].tolist()) for number in self._layers})
        metrics["moe_plan_seconds"] = time.perf_counter() - start

    @property
    def is_settled(self) -> bool:
        """Whether there is nothing left to try."""
        return not self._layers or self._trial.is_over

    def _ask(self, question: Callable[[Planner], list[Decision]]) -> list[Choice]:
        """The answers of all planners. Raises ConfigError if nothing fits the memory budget."""
        try:
            return [(kind, decision) for kind, planner in self._planners.items() for decision in question(planner)]
        except ValueError as error:
            raise ConfigError(str(error)) from None

    def _learn(self, run: Run) -> None:
        """Tell the trial what its plan took, and at its end the planners what came of it."""
        group = next(iter(self._layers.values())).ep_group
        seconds = [self.measured[number][name] for name in ("forward", "backward") for number in self._layers]
        agreed = costs.agree(seconds, run.topology.device, group)
        self._trial.took(list(zip(agreed[: len(self._layers)], agreed[len(self._layers) :], strict=True)))
        if self._trial.is_over:
            for kind, planner in self._planners.items():
                planner.learn(self._trial.factors(kind))

    def _choose(self, load: Load) -> Choice:
        if not self._trial.is_over:
            return self._trial.choice
        choices = self._ask(lambda planner: [planner.decide(load)])
        return min(choices, key=lambda choice: self._planners[choice[0]].expected(choice[1]))

    def _decide(self, run: Run, loads: dict[int, Load]) -> None:
        if not self._trial.is_over:
            kind, decision = self._trial.choice
            if not all(self._planners[kind].fits(decision.plan, load) for load in loads.values()):
                self._trial.stop()  # what is tried was chosen for an even load
        for number, load in loads.items():
            kind, decision = self._choose(load)
            if self._in_force.get(number) == (kind, decision.plan):
                continue
            layer = self._layers[number]
            layer.plan = decision.plan
            if len(self._planners) > 1:
                layer.exchange = exchanges.shared(layer.ep_group, kind)
            self._in_force[number] = kind, decision.plan
            self.decisions[number] = decision
            self.measured.pop(number, None)
            layer.clock.take()
            self._pending[number] = _Pending(layer, decision, run.progress.step)
            line = {"step": run.progress.step, "layer": number, "load": asdict(load), "all_to_all": kind}
            self._write({**line, **_as_dict(decision)})

    def _write(self, line: dict[str, Any]) -> None:
        if self._log is None:
            return
        try:
            self._log.write(json.dumps(line))
        except WriteError as error:  # a run does not end for want of what explains its plans
            print(f"{error} No more plans are on record", file=sys.stderr, flush=True)
            self.close()

    def close(self) -> None:
        if self._log is not None:
            self._log.close()
            self._log = None


def _shape(run: Run, layer: MixtrainMoELayer) -> Shape:
    config, experts = run.config, layer.experts
    tensor, expert_tensor = run.topology.tensor_size, derived.expert_tensor_size(config)
    tokens = config.training.micro_batch_size * config.model.sequence_length * expert_tensor // tensor
    weight = experts.linear_fc2.weight
    return Shape(
        tokens=tokens,
        num_experts=config.moe.num_experts or 0,
        num_ranks=run.topology.expert_size,
        top_k=config.moe.top_k,
        hidden_size=weight.size(1),
        width=weight.size(2),
        gated=experts.linear_fc1.weight.size(1) == 2 * weight.size(2),
        element_size=weight.element_size(),
        whole=weight.device.type == "cuda",
        tiled=blocks.are_tiled(weight.device.type, weight.dtype, weight.size(1), weight.size(2)),
    )


def _limits(run: Run, num_layers: int) -> Limits:
    moe = run.config.moe
    degree, backward_degree = derived.pipeline_degrees(run.config)
    # On a host there is no faster memory to bring things back to.
    automatic = [name for name, strategy in STRATEGIES.items() if run.topology.device.type != "cpu" or not strategy.offloads]
    return Limits(
        degrees=DEGREES if degree is None else (degree,),
        backward_degrees=DEGREES if backward_degree is None else (backward_degree,),
        strategies=tuple(automatic) if moe.memory_strategy == "auto" else (moe.memory_strategy,),
        memory_budget=None if moe.memory_budget is None else int(moe.memory_budget * 2**20),
        live_calls=1 if run.config.training.recompute == "full" else num_layers * _micro_batches_in_flight(run),
    )


def _micro_batches_in_flight(run: Run) -> int:
    """Micro-batches between whose passes a stage holds activations: all stages after it hold one less each (1F1B)."""
    topology, batch = run.topology, run.config.training
    most = batch.global_batch_size // (batch.micro_batch_size * topology.data_size)
    stages = topology.pipeline_size - topology.pipeline_rank
    # Interleaved: its warm-up runs further ahead.
    extra = topology.pipeline_size if topology.virtual_size > 1 else 0
    return max(1, min(most, stages + extra))


def _as_dict(decision: Decision) -> dict[str, Any]:
    return {"plan": asdict(decision.plan), "predicted": asdict(decision.prediction)}


def _describe(decision: Decision) -> str:
    plan, prediction = decision.plan, decision.prediction
    return (
        f"{plan.degree} chunk(s) forward, {plan.backward_degree} backward, memory strategy {plan.memory_strategy}; predicted "
        f"{1000 * prediction.forward:.1f} + {1000 * prediction.backward:.1f} ms and {prediction.memory / 2**20:.1f} MiB of buffers"
    )
