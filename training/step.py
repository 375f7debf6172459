"""One optimizer step, and one evaluation, in any layout: micro-batches in, numbers of the global batch out.

The loss that is minimised is the sum over the predicted tokens of the global batch, divided by their number, so the
step does not depend on how the batch is cut into ranks and micro-batches. Megatron's schedule averages over micro-batches
and its DDP over data parallel ranks; `_loss` undoes both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker
from megatron.core.utils import get_model_config

from configs import derived
from configs.schema import Config
from models.build import build_model, family_module
from models.folder import load_logical_folder
from moe.watch import RouterReport, RouterWatch
from optim import update
from optim.build import build_optimizer, set_learning_rate
from parallel.topology import Topology
from training.health import Refusal
from training.rewind import Mark

Batch = dict[str, torch.Tensor]
_BROKEN = "gradients_not_finite"  # along with the losses: how many ranks found it so


@dataclass
class StepResult:
    """Numbers of one step over the global batch. `extra` holds further losses; `updated` is False for a skipped fp16 step;
    `by_layer` lists numbers of each MoE layer; `along` is the sum over all ranks of what was in `Model.along`; `refusal` tells why
    the judge let nothing be changed, if so."""

    loss: float
    grad_norm: float
    learning_rate: float
    updated: bool
    extra: dict[str, float]
    tokens_per_expert: torch.Tensor | None = None  # [num_layers, num_experts]
    by_layer: dict[str, list[float]] = field(default_factory=dict)
    along: dict[str, torch.Tensor] = field(default_factory=dict)
    refusal: Refusal | None = None


Judge = Callable[[float, bool], Refusal | None]  # of a step's loss and of whether its gradients are finite


class Model:
    """This rank's model chunks with their gradient buffers and optimizer, and Megatron's schedule over them."""

    def __init__(self, config: Config, topology: Topology, vocab_size: int):
        self.config, self.topology = config, topology
        self.family = family_module(config)
        self.bare_chunks = build_model(config, vocab_size)
        self.chunks = _wrap(config, self.bare_chunks)
        self.optimizer = build_optimizer(config, self.chunks)
        self._buffers = [buffer for chunk in self.bare_chunks for buffer in chunk.buffers()]
        self._schedule = get_forward_backward_func()
        self._connect()
        # What callbacks want summed over all ranks at the end of a step: float64 on the device, of the same names and shapes on
        # every rank. It travels with the loss, so that it costs neither a message nor a wait of its own.
        self.along: dict[str, Callable[[], torch.Tensor]] = {}
        self.watch: RouterWatch | None = None
        if config.moe.num_experts is not None:
            get_moe_layer_wise_logging_tracker().clear()  # one for the process: an earlier run in it may have had other layers
            coefficients = {
                "aux_loss": config.moe.aux_loss_coeff,
                "sequence_aux_loss": config.moe.sequence_aux_loss_coeff,
                "z_loss": config.moe.z_loss_coeff,
            }
            losses = [name for name, coefficient in coefficients.items() if coefficient > 0]
            self.watch = RouterWatch(self.bare_chunks, config.model.num_layers, config.moe.num_experts, losses, topology.device)
        self._extra_names = ["sentence_loss"] if config.model.sentence_head != "none" else []
        self.finite_here = True  # this rank's part of the last step's loss

    def _connect(self) -> None:
        """Tell Megatron's schedule how to scale the loss and when to reduce gradients and gather weights."""
        settings = get_model_config(self.chunks[0])
        settings.grad_scale_func = self.optimizer.scale_loss
        settings.finalize_model_grads_func = finalize_model_grads
        if self.config.parallel.overlap_grad_reduce:
            settings.no_sync_func = _one_or_all([chunk.no_sync for chunk in self.chunks])
            settings.grad_sync_func = _one_or_all([chunk.start_grad_sync for chunk in self.chunks])
        if derived.overlap_param_gather(self.config):
            settings.param_sync_func = _one_or_all([chunk.start_param_sync for chunk in self.chunks])

    def train_step(self, batches: Sequence[Batch], step: int, judge: Judge | None = None) -> StepResult:
        """Take optimizer step `step` (from 1) on this rank's micro-batches of the global batch, unless the judge refuses it.

        The judge is asked before the optimizer is touched, and hears the same on every rank. A refused step leaves no trace but gradients.
        """
        mark = self.mark() if judge is not None else None
        for chunk in self.chunks:
            chunk.train()
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        rate = set_learning_rate(self.optimizer, self.config, step)
        sums, count = self._run(batches, forward_only=False)
        grad_norm = update.prepare(self.optimizer)
        overflowed = grad_norm is None
        along = {name: value() for name, value in self.along.items()}
        broken = not overflowed and not math.isfinite(grad_norm or 0.0)
        along[_BROKEN] = torch.tensor([float(broken)], dtype=torch.float64, device=self.topology.device)
        flat = self._sum_over_ranks(sums, along, self.watch).cpu()
        loss, extra = self._losses(flat, count, len(batches))
        result = StepResult(loss, grad_norm or 0.0, rate, False, extra)
        rest = flat[len(sums) :]
        for name, value in along.items():
            result.along[name], rest = rest[: value.numel()].view(value.shape), rest[value.numel() :]
        if self.watch is not None:
            self._report_routers(self.watch.split(rest), len(batches), result)
        finite = not float(result.along.pop(_BROKEN))
        result.refusal = judge(loss, finite) if judge is not None else None
        if result.refusal is not None:
            self.finite_here = bool(sums.isfinite().all())
            assert mark is not None
            mark.restore()
        elif grad_norm is not None:
            result.updated = update.apply(self.optimizer, grad_norm)
        return result

    def mark(self) -> Mark:
        """What passes change beside gradients, as it is now, to be put back."""
        return Mark(self._buffers, self.optimizer)

    def run_again(self, batches: Sequence[Batch]) -> None:
        """Forward and backward passes of a refused step once more, for those who watch them; nothing is changed but gradients."""
        mark = self.mark()
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self._run(batches, forward_only=False)
        if self.watch is not None:
            self.watch.take()
        mark.restore()

    def _report_routers(self, report: RouterReport, num_micro_batches: int, result: StepResult) -> None:
        """Put the routers' numbers into the step's result: means per token or per micro-batch, and counts of the global batch."""
        layers = torch.tensor(derived.moe_layer_pattern(self.config), dtype=torch.bool)
        micro_batches = num_micro_batches * self.topology.data_size
        tokens = micro_batches * self.config.training.micro_batch_size * self.config.model.sequence_length
        result.tokens_per_expert = report.tokens_per_expert
        chosen = report.tokens_per_expert[layers].sum(dim=1)
        result.by_layer["dropped_tokens"] = (tokens * self.config.moe.top_k - chosen).long().tolist()
        result.by_layer["router_entropy"] = (report.entropy[layers] / tokens).tolist()
        for name, values in report.losses.items():
            ranks = self.topology.tensor_size if name == "z_loss" else 1
            result.by_layer[name] = (values[layers] / (micro_batches * ranks)).tolist()
            result.extra[name] = float(values.sum() / (layers.sum() * micro_batches * ranks))

    def evaluate(self, steps: Iterator[Sequence[Batch]]) -> tuple[float, dict[str, float]]:
        """Mean loss per predicted token over the given global batches, and means of the extra losses."""
        total, tokens, batches = torch.zeros(1 + len(self._extra_names), dtype=torch.float64, device=self.topology.device), 0.0, 0
        with self.frozen_weights(), torch.no_grad():  # Megatron's schedule would build the graph all the same
            for micro_batches in steps:
                sums, count = self._run(micro_batches, forward_only=True)
                total += sums
                tokens += float(count)
                batches += len(micro_batches)
        flat = self._sum_over_ranks(total)
        return self._losses(flat, torch.tensor(tokens), batches)

    def load_weights(self, folder: Path, vocab_size: int) -> None:
        """Start from a folder of logical weights (`python -m models.convert import` writes one). Raises ConfigError for another model's."""
        load_logical_folder(self.bare_chunks, folder, self.config, vocab_size)
        self.optimizer.reload_model_params()

    def close(self) -> None:
        """Let go of the model: autograd's hooks hold Megatron's DDP, in cycles that Python's collector cannot see. Without
        this a process that trains one model after the other keeps them all, with their process groups and threads."""
        settings = get_model_config(self.chunks[0])
        settings.grad_scale_func = settings.no_sync_func = settings.grad_sync_func = settings.param_sync_func = None
        for chunk in self.chunks:
            if chunk.use_forward_hook and chunk.remove_forward_pre_hook_handles:
                chunk.disable_forward_pre_hook(param_sync=False)
            chunk.grad_accs.clear()
            chunk._modules.clear()
        get_moe_layer_wise_logging_tracker().clear()  # it holds a process group

    def frozen_weights(self) -> _FrozenWeights:
        """Context for reading weights between steps: gathers that are still due are finished first, dropout is off."""
        return _FrozenWeights(self.chunks, derived.overlap_param_gather(self.config))

    def forward(self, micro_batch: Batch) -> torch.Tensor | None:
        """Logits [batch, sequence, vocabulary] (fp32, this rank's slice of the vocabulary) on the last pipeline stage, else None."""

        def forward_step(iterator: Iterator[Batch], chunk: torch.nn.Module) -> tuple[torch.Tensor, Any]:
            return self.family.forward(chunk, self._to_device(next(iterator))), lambda output, non_loss_data=True: output

        sequence_length, batch_size = micro_batch["tokens"].shape[1], micro_batch["tokens"].shape[0]
        with self.frozen_weights(), torch.no_grad():
            outputs = self._schedule(
                forward_step_func=forward_step,
                data_iterator=self._iterators([micro_batch] * self._min_micro_batches()),
                model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
                num_microbatches=self._min_micro_batches(),
                seq_length=sequence_length,
                micro_batch_size=batch_size,
                forward_only=True,
                collect_non_loss_data=True,
            )
        return outputs[-1].float() if outputs else None

    def _min_micro_batches(self) -> int:
        return self.topology.pipeline_size if len(self.chunks) > 1 else 1

    def _iterators(self, batches: Sequence[Batch]) -> Any:
        return [iter(batches) for _ in self.chunks] if len(self.chunks) > 1 else iter(batches)

    def _to_device(self, batch: Batch) -> Batch:
        return {key: value.to(self.topology.device, non_blocking=True) for key, value in batch.items()}

    def _run(self, batches: Sequence[Batch], *, forward_only: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the schedule. Returns this rank's loss sums [loss, *extra] (zero off the last stage) and the number of
        predicted tokens of the global batch (a tensor on the device, so that no host waits for it)."""
        count = torch.stack([batch["loss_mask"].sum() for batch in batches]).sum().to(self.topology.device)
        if self.topology.data_size > 1:
            dist.all_reduce(count, group=parallel_state.get_data_parallel_group())
        scale = len(batches) * self.topology.data_size / count.clamp(min=1.0)
        sums = torch.zeros(1 + len(self._extra_names), dtype=torch.float64, device=self.topology.device)

        def forward_step(iterator: Iterator[Batch], chunk: torch.nn.Module) -> tuple[torch.Tensor, Any]:
            batch = self._to_device(next(iterator))
            return self.family.forward(chunk, batch), partial(self._loss, batch, scale, sums)

        self._schedule(
            forward_step_func=forward_step,
            data_iterator=self._iterators(batches),
            model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
            num_microbatches=len(batches),
            seq_length=self.config.model.sequence_length,
            micro_batch_size=self.config.training.micro_batch_size,
            forward_only=forward_only,
        )
        return sums, count

    def _loss(self, batch: Batch, scale: torch.Tensor, sums: torch.Tensor, output: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        loss_sum, extra = self.family.loss(output, batch)
        with torch.no_grad():
            sums[0] += loss_sum
            for i, name in enumerate(self._extra_names):
                sums[1 + i] += extra[name]
        return loss_sum * scale + sum(extra.values()), {}

    def _sum_over_ranks(
        self, sums: torch.Tensor, along: dict[str, torch.Tensor] | None = None, watch: RouterWatch | None = None
    ) -> torch.Tensor:
        if self.topology.tensor_rank != 0:
            sums = torch.zeros_like(sums)  # tensor parallel ranks computed the same loss
        rest = [value.flatten() for value in (along or {}).values()] + ([] if watch is None else [watch.take()])
        if rest:
            sums = torch.cat([sums, *rest])
        if self.topology.world_size > 1:
            dist.all_reduce(sums)
        return sums

    def _losses(self, flat: torch.Tensor, count: torch.Tensor, num_micro_batches: int) -> tuple[float, dict[str, float]]:
        micro_batches = num_micro_batches * self.topology.data_size
        extra = {name: float(flat[1 + i]) / max(micro_batches, 1) for i, name in enumerate(self._extra_names)}
        return float(flat[0]) / max(float(count), 1.0), extra


class _FrozenWeights:
    """Evaluation mode with complete weights; restores training mode and the overlapped gather on exit."""

    def __init__(self, chunks: list[DistributedDataParallel], overlapped: bool):
        self.chunks, self.overlapped = chunks, overlapped

    def __enter__(self) -> None:
        for chunk in self.chunks:
            if self.overlapped:
                chunk.disable_forward_pre_hook(param_sync=True)
            chunk.eval()

    def __exit__(self, *error: Any) -> None:
        for chunk in self.chunks:
            if self.overlapped:
                chunk.enable_forward_pre_hook()
            chunk.train()


def _one_or_all(functions: list[Any]) -> Any:
    return functions if len(functions) > 1 else functions[0]


def _wrap(config: Config, chunks: list[torch.nn.Module]) -> list[DistributedDataParallel]:
    settings = get_model_config(chunks[0])
    if config.training.precision != "fp32":
        chunks = [Float16Module(settings, chunk) for chunk in chunks]
    ddp_settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=config.parallel.overlap_grad_reduce,
        overlap_param_gather=derived.overlap_param_gather(config),
        use_distributed_optimizer=config.optimizer.distributed,
    )
    return [DistributedDataParallel(settings, ddp_settings, chunk, disable_bucketing=i > 0) for i, chunk in enumerate(chunks)]
