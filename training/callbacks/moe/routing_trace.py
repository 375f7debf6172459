"""Record the routing counts of every call, so that placement planners can be evaluated without training."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from moe.layer import MixtrainMoELayer, layers_of
from moe.placement.trace import TraceHeader, TraceWriter
from parallel.joint_errors import raised_together
from training.resilience import events
from training.run import Callback, Metrics, Run
from training.step import StepResult


class RoutingTrace(Callback):
    """Writes `routing.trace`: counts of token assignments by step, MoE layer, micro-batch, rank and expert, in the
    first expert parallel group of the first pipeline stage. Later stages write `routing_stage1.trace` and so on.
    `python -m benchmarks.speed.placement_replay` reads these files. Adds one wait for the device to each step."""

    def __init__(self) -> None:
        self._layers: list[MixtrainMoELayer] = []
        self._counts: dict[int, list[torch.Tensor]] = {}  # by layer: counts [E] of each micro-batch
        self._writer: TraceWriter | None = None

    def on_start(self, run: Run) -> None:
        """Start recording. Raises ConfigError on every rank if an existing trace is invalid or has a different number
        of experts."""
        layers = layers_of(run.engine.bare_chunks)
        self._layers = [layers[number] for number in sorted(layers)]
        for number, layer in enumerate(self._layers):
            layer.router.register_forward_hook(self._hook(number))
        with raised_together():
            if self._layers and run.topology.speaks_for_stage:
                stage, moe = run.topology.pipeline.rank, run.config.moe
                self._path = run.run_dir / ("routing.trace" if stage == 0 else f"routing_stage{stage}.trace")
                assert moe.num_experts is not None
                self._header = TraceHeader(run.config.name, moe.num_experts, moe.top_k, run.config.parallel.expert)
                self._open(run)

    def _open(self, run: Run) -> None:
        self._writer = TraceWriter(self._path, self._header, after=run.progress.step)
        for line in self._writer.missing:
            events.log(self._path.parent, events.INCOMPLETE, line)

    def _hook(self, number: int) -> Any:
        def count(router: Any, inputs: Any, output: tuple[torch.Tensor, torch.Tensor]) -> None:
            # A pass without gradients is an evaluation, or the first of two passes under recompute.
            if torch.is_grad_enabled():
                self._counts.setdefault(number, []).append(output[1].sum(dim=0, dtype=torch.int32))

        return count

    def before_step(self, run: Run) -> None:
        self._counts.clear()

    def before_update(self, run: Run, result: StepResult) -> None:
        """Copy the counts of this step now, because later callbacks may repeat passes."""
        if self._layers:
            self._own_LME = torch.stack([torch.stack(self._counts[number]) for number in range(len(self._layers))])

    def after_step(self, run: Run, metrics: Metrics) -> None:
        if not self._layers:
            return
        own_LME, first = self._own_LME, self._layers[0]
        if first.expert_tensor_group.size() > 1:  # its ranks share their tokens
            dist.all_reduce(own_LME, group=first.expert_tensor_group)
        ranks = first.ep_group.size()
        everywhere = own_LME.new_empty(ranks * len(own_LME), *own_LME.shape[1:])
        dist.all_gather_into_tensor(everywhere, own_LME, group=first.ep_group)
        if self._writer is not None:
            counts_LMRE = everywhere.view(ranks, *own_LME.shape).permute(1, 2, 0, 3).cpu().numpy()
            self._writer.append(run.progress.step, counts_LMRE)

    def on_rollback(self, run: Run) -> None:
        """Remove from the trace the steps that will be repeated."""
        if self._writer is not None:
            self._writer.close()
            self._open(run)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
