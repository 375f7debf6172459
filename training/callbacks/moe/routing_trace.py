"""Routing counts of every call, for planners that are tried without a training."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from configs.schema import ConfigError
from moe.layer import MixtrainMoELayer, layers_of
from moe.placement.trace import TraceHeader, TraceWriter
from parallel.refusal import raise_together
from training.resilience import events
from training.run import Callback, Metrics, Run
from training.step import StepResult


class RoutingTrace(Callback):
    """Writes `routing.trace`: by step, MoE layer, micro-batch, rank and expert the assignments that the first expert
    parallel group of a pipeline stage had. Later stages write files of their own, `routing_stage1.trace` and so on.

    `python -m benchmarks.placement_replay` reads them. A step waits once more for the device."""

    def __init__(self) -> None:
        self._layers: list[MixtrainMoELayer] = []
        self._counts: dict[int, list[torch.Tensor]] = {}  # by layer: of each micro-batch [E]
        self._writer: TraceWriter | None = None

    def on_start(self, run: Run) -> None:
        """Raises ConfigError on every rank where the run's trace is of other experts, or none."""
        layers = layers_of(run.engine.bare_chunks)
        self._layers = [layers[number] for number in sorted(layers)]
        for number, layer in enumerate(self._layers):
            layer.router.register_forward_hook(self._hook(number))
        problem = None
        if self._layers and run.topology.speaks_for_stage:
            stage, moe = run.topology.pipeline.rank, run.config.moe
            self._path = run.run_dir / ("routing.trace" if stage == 0 else f"routing_stage{stage}.trace")
            assert moe.num_experts is not None
            self._header = TraceHeader(run.config.name, moe.num_experts, moe.top_k, run.config.parallel.expert)
            try:
                self._open(run)
            except ConfigError as error:
                problem = str(error)
        raise_together(problem)

    def _open(self, run: Run) -> None:
        self._writer = TraceWriter(self._path, self._header, after=run.progress.step)
        for line in self._writer.missing:
            events.say(self._path.parent, events.INCOMPLETE, line)

    def _hook(self, number: int) -> Any:
        def count(router: Any, inputs: Any, output: tuple[torch.Tensor, torch.Tensor]) -> None:
            # Without gradients it is an evaluation, or the first of two passes under recompute.
            if torch.is_grad_enabled():
                self._counts.setdefault(number, []).append(output[1].sum(dim=0, dtype=torch.int32))

        return count

    def before_step(self, run: Run) -> None:
        self._counts.clear()

    def before_update(self, run: Run, result: StepResult) -> None:
        """Others may run passes once more after this."""
        if self._layers:
            self._own_LME = torch.stack([torch.stack(self._counts[number]) for number in range(len(self._layers))])

    def after_step(self, run: Run, metrics: Metrics) -> None:
        if not self._layers:
            return
        own_LME, first = self._own_LME, self._layers[0]
        if first.expert_tensor_group.size() > 1:  # its ranks compute for each other's tokens
            dist.all_reduce(own_LME, group=first.expert_tensor_group)
        ranks = first.ep_group.size()
        everywhere = own_LME.new_empty(ranks * len(own_LME), *own_LME.shape[1:])
        dist.all_gather_into_tensor(everywhere, own_LME, group=first.ep_group)
        if self._writer is not None:
            counts_LMRE = everywhere.view(ranks, *own_LME.shape).permute(1, 2, 0, 3).cpu().numpy()
            self._writer.append(run.progress.step, counts_LMRE)

    def on_rollback(self, run: Run) -> None:
        """Steps that are taken again are written again."""
        if self._writer is not None:
            self._writer.close()
            self._open(run)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
