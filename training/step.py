"""One optimizer step, and one evaluation, in any layout: micro-batches in, numbers of the global batch out.

The loss that is minimised is the sum over the predicted tokens of the global batch, divided by their number, so the
step does not depend on how the batch is cut into ranks and micro-batches. Megatron's schedule averages over
micro-batches, and `Engine.scale_loss` over data parallel ranks; `_loss` undoes both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import parallel.megatron  # noqa: F401  (before anything else of Megatron-core: see parallel/megatron/startup.py)

# isort: split
import torch
import torch.distributed as dist

from configs import derived
from configs.schema import Config
from data.loader import PREPARED
from data.pieces import attended_pairs, share_of
from memory.transfer import to_device
from models.attention.rows import SLICES
from models.loss.rows import predicted_rows
from moe.watch import RouterReport, in_metrics
from optim import update
from optim.build import set_learning_rate
from parallel.context import all_rows
from training.engine import Engine
from training.loss_buckets import LossBuckets
from training.sums import pack, unpack

Batch = dict[str, torch.Tensor]


@dataclass
class StepResult:
    """Numbers of one step over the global batch, on the host and the same on every rank.

    `extra` holds further losses; `by_layer` lists numbers of each MoE layer; `sums` is what callbacks had summed over
    all ranks.
    """

    loss: float
    grad_norm: float  # before clipping; 0 where fp16 gradients overflowed
    learning_rate: float
    overflowed: bool  # fp16 gradients did, on some rank: the weights will not be changed
    finite: bool  # whether all other gradients are
    own_losses: torch.Tensor  # this rank's sums, on its device
    predicted_tokens: int = 0
    attended_share: float | None = None  # pairs that attend of those of joined samples, where documents are separate
    updated: bool = False  # whether the weights were changed
    extra: dict[str, float] = field(default_factory=dict)
    tokens_per_expert: torch.Tensor | None = None  # [num_layers, num_experts]
    by_layer: dict[str, list[float]] = field(default_factory=dict)
    sums: dict[str, torch.Tensor] = field(default_factory=dict)


def train_step(engine: Engine, batches: Sequence[Batch], step: int) -> StepResult:
    """Take optimizer step `step` (from 1) on this rank's micro-batches of the global batch, whatever comes of it."""
    result = gradients(engine, batches, step)
    apply(engine, result)
    return result


def gradients(engine: Engine, batches: Sequence[Batch], step: int) -> StepResult:
    """Forward and backward passes of step `step` (from 1) on this rank's micro-batches; what came of them on all ranks.

    The weights stay until `apply`. What passes change besides, `Engine.mark` remembers.
    """
    for chunk in engine.chunks:
        chunk.train()
    _clear_gradients(engine)
    engine.dropout.step = step
    rate = set_learning_rate(engine.optimizer, engine.config, step)
    update.begin(engine.optimizer)
    losses, counts = _run(engine, batches, forward_only=False)
    overflow = update.prepare(engine.optimizer)
    own = engine.sums.take()
    parts = [_once(engine, losses), _once_a_job(engine, counts), engine.norms.squares(), *own.values()]
    if overflow is not None:
        parts.append(overflow)
    if engine.watch is not None:
        parts.append(engine.watch.take())
    # All that the host reads of a step: one reduction over the world, and one wait for the device.
    summed, counted, squares, *sums = unpack(_sum_over_ranks(engine, pack(parts)).cpu(), parts)
    grad_norm = engine.norms.take(squares)
    overflowed = overflow is not None and float(sums[len(own)]) > 0
    update.settle(engine.optimizer, overflowed)
    loss, extra = _losses(engine, summed, counted[0], len(batches))
    separate = any("positions" in batch for batch in batches)
    result = StepResult(
        loss=loss,
        grad_norm=0.0 if overflowed else grad_norm,
        learning_rate=rate,
        overflowed=overflowed,
        finite=overflowed or math.isfinite(grad_norm),
        own_losses=losses,
        predicted_tokens=int(counted[0]),
        attended_share=share_of(engine.config, float(counted[1])) if separate else None,
        extra=extra,
        sums=dict(zip(own, sums)),
    )
    if engine.watch is not None:
        _report_routers(engine, engine.watch.split(sums[-1]), len(batches), result)
    return result


def apply(engine: Engine, result: StepResult) -> None:
    """Change the weights by the gradients that are there, if they fit fp16."""
    if not result.overflowed:
        result.updated = update.apply(engine.optimizer, result.grad_norm)


def run_again(engine: Engine, batches: Sequence[Batch]) -> None:
    """Forward and backward passes once more, for those who watch them, with the dropout of the last step's; nothing is
    changed but gradients."""
    mark = engine.mark()
    _clear_gradients(engine)
    update.begin(engine.optimizer, passive=True)
    _run(engine, batches, forward_only=False)
    if engine.watch is not None:
        engine.watch.take()
    mark.restore()


def evaluate(
    engine: Engine, steps: Iterator[Sequence[Batch]], buckets: LossBuckets | None = None
) -> tuple[float, dict[str, float]]:
    """Mean loss per predicted token over the given global batches, and means of the extra losses.

    `buckets` (GPT) get every token's loss, and hold the sums over all ranks afterwards.
    """
    total, batches = _no_losses(engine), 0
    counts = torch.zeros(2, dtype=torch.float64, device=engine.topology.device)
    with engine.frozen_weights(), torch.no_grad():  # Megatron's schedule would build the graph all the same
        for micro_batches in steps:
            losses, of_batch = _run(engine, micro_batches, forward_only=True, buckets=buckets)
            total += losses
            counts += of_batch
            batches += len(micro_batches)
    parts = [_once(engine, total), _once_a_job(engine, counts)]
    if buckets is not None:
        parts.append(_once(engine, buckets.sums))
    summed, counted, *others = unpack(_sum_over_ranks(engine, pack(parts)).cpu(), parts)
    if buckets is not None:
        (buckets.sums,) = others
    return _losses(engine, summed, counted[0], batches)


def logits(engine: Engine, micro_batch: Batch) -> torch.Tensor | None:
    """Logits [batch, sequence, vocabulary] in fp32, all rows of this rank's slice of the vocabulary; None off the last
    stage."""
    context = engine.topology.context
    made: list[Batch] = []

    def forward_step(iterator: Iterator[Batch], chunk: torch.nn.Module) -> tuple[torch.Tensor, Any]:
        made[:] = [engine.on_host(next(iterator))]
        output = engine.family.forward(chunk, _to_device(engine, made[0]))
        return output, lambda output, non_loss_data=True: output

    micro_batches = engine.topology.pipeline.size if len(engine.chunks) > 1 else 1
    batch_size, sequence_length = micro_batch["tokens"].shape
    engine.begin_passes(micro_batches, forward_only=True)
    with engine.frozen_weights(), torch.no_grad():
        outputs = engine.schedule(
            forward_step_func=forward_step,
            data_iterator=_iterators(engine, [micro_batch] * micro_batches),
            model=_chunks(engine),
            num_microbatches=micro_batches,
            **_shape(engine, batch_size, sequence_length),
            forward_only=True,
            collect_non_loss_data=True,
        )
    if not outputs or context.size == 1:
        return outputs[-1].float() if outputs else None
    return all_rows(outputs[-1][0].float(), made[0][SLICES].rows, context, batch_size)


# ---------------------------------------------------------------------------------------------------------------------
# Passes
# ---------------------------------------------------------------------------------------------------------------------


def _run(
    engine: Engine, batches: Sequence[Batch], *, forward_only: bool, buckets: LossBuckets | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the schedule. Returns this rank's loss sums [loss, *extra] (zero off the last stage) and the `_counts` of the
    global batch (on the device, so that no host waits for them)."""
    config, topology = engine.config, engine.topology
    counts = to_device(_counts(config, batches), topology.device)
    if topology.data.size > 1:
        dist.all_reduce(counts, group=topology.data.group)
    scale = len(batches) * topology.data.size / counts[0].clamp(min=1)
    losses = _no_losses(engine)
    loss_grad = None if forward_only else _loss_grad(engine, scale, len(batches))
    batches = [batch.get(PREPARED) or engine.on_host(batch) for batch in batches]

    def forward_step(iterator: Iterator[tuple[int, Batch]], chunk: torch.nn.Module) -> tuple[torch.Tensor, Any]:
        number, batch = next(iterator)
        predicts = topology.pipeline.is_last and (len(engine.chunks) == 1 or chunk is engine.chunks[-1])
        rows = _predicted_rows(engine, batch) if predicts else None
        batch = _to_device(engine, batch)
        if predicts:
            batch |= {name: value for name, value in (("rows", rows), ("loss_grad", loss_grad)) if value is not None}
        engine.dropout.begin(number)
        return engine.family.forward(chunk, batch), partial(_loss, engine, batch, scale, losses, buckets)

    engine.begin_passes(len(batches), forward_only)
    engine.schedule(
        forward_step_func=forward_step,
        data_iterator=_iterators(engine, list(enumerate(batches))),
        model=_chunks(engine),
        num_microbatches=len(batches),
        **_shape(engine, config.training.micro_batch_size, config.model.sequence_length),
        forward_only=forward_only,
    )
    return losses, counts


def _counts(config: Config, batches: Sequence[Batch]) -> torch.Tensor:
    """Predicted tokens of micro-batches, and the pairs that attend where documents are separate: int64 [2], on the
    host."""
    tokens = torch.stack([batch["loss_mask"].sum() for batch in batches]).sum().long()
    pairs = sum(attended_pairs(config, batch["positions"]) for batch in batches if "positions" in batch)
    return torch.stack([tokens, torch.tensor(pairs)])


def _loss(
    engine: Engine,
    batch: Batch,
    scale: torch.Tensor,
    losses: torch.Tensor,
    buckets: LossBuckets | None,
    output: Any,
) -> tuple[torch.Tensor, dict[str, Any]]:
    loss_sum, extra = engine.family.loss(output, batch)
    if buckets is not None:
        buckets.add(output[1], batch)  # each token's, beside their sum
    with torch.no_grad():
        losses[0] += loss_sum
        for i, name in enumerate(engine.extra_losses):
            losses[1 + i] += extra[name]
    return loss_sum * scale + sum(extra.values()), {}


def _loss_grad(engine: Engine, scale: torch.Tensor, num_micro_batches: int) -> torch.Tensor:
    """The gradient that a micro-batch's sum of losses will get: what the schedule and `_loss` make of it, undone in
    their order."""
    one = engine.scale_loss(torch.ones((), device=scale.device)).reshape(())
    return one / num_micro_batches * engine.topology.context.size * scale


def _predicted_rows(engine: Engine, batch: Batch) -> torch.Tensor | None:
    """Rows that predict something, on the device; None if all of this rank's do."""
    parallel, topology = engine.config.parallel, engine.topology
    rows = predicted_rows(batch["loss_mask"], topology.tensor.size if parallel.sequence else 1)
    return None if rows is None else to_device(rows, topology.device)


def _clear_gradients(engine: Engine) -> None:
    for chunk in engine.chunks:
        chunk.zero_grad_buffer()
    engine.optimizer.zero_grad()


def _chunks(engine: Engine) -> Any:
    """The model chunks as Megatron's schedule takes them."""
    return engine.chunks if len(engine.chunks) > 1 else engine.chunks[0]


def _iterators(engine: Engine, batches: Sequence[Any]) -> Any:
    return [iter(batches) for _ in engine.chunks] if len(engine.chunks) > 1 else iter(batches)


def _shape(engine: Engine, num_samples: int, length: int) -> dict[str, int]:
    """What Megatron's schedule takes a micro-batch for: with context ranks it is one sample of all rows, of which it
    counts each rank's part."""
    if engine.topology.context.size == 1:
        return {"seq_length": length, "micro_batch_size": num_samples}
    return {"seq_length": num_samples * length, "micro_batch_size": 1}


def _to_device(engine: Engine, batch: dict[str, Any]) -> dict[str, Any]:
    device = engine.topology.device
    return {key: to_device(value, device) if isinstance(value, torch.Tensor) else value for key, value in batch.items()}


def _no_losses(engine: Engine) -> torch.Tensor:
    return torch.zeros(1 + len(engine.extra_losses), dtype=torch.float64, device=engine.topology.device)


# ---------------------------------------------------------------------------------------------------------------------
# Numbers of all ranks
# ---------------------------------------------------------------------------------------------------------------------


def _once(engine: Engine, losses: torch.Tensor) -> torch.Tensor:
    """This rank's part of a sum over all ranks: tensor parallel ranks computed the same loss."""
    return losses if engine.topology.tensor.rank == 0 else torch.zeros_like(losses)


def _once_a_job(engine: Engine, value: torch.Tensor) -> torch.Tensor:
    """This rank's part of a sum over all ranks of what each of them knows."""
    value = value.to(torch.float64)
    return value if engine.topology.rank == 0 else torch.zeros_like(value)


def _sum_over_ranks(engine: Engine, flat: torch.Tensor) -> torch.Tensor:
    if engine.topology.world_size > 1:
        dist.all_reduce(flat)
    return flat


def _losses(
    engine: Engine, summed: torch.Tensor, tokens: torch.Tensor, num_micro_batches: int
) -> tuple[float, dict[str, float]]:
    """The loss per predicted token, and the extra losses per micro-batch, of the sums over all ranks."""
    micro_batches = num_micro_batches * engine.topology.data.size
    extra = {name: float(summed[1 + i]) / max(micro_batches, 1) for i, name in enumerate(engine.extra_losses)}
    return float(summed[0]) / max(float(tokens), 1.0), extra


def _report_routers(engine: Engine, report: RouterReport, num_micro_batches: int, result: StepResult) -> None:
    """Put the routers' numbers into the step's result: means per token or per micro-batch, and counts of the global
    batch."""
    config, topology = engine.config, engine.topology
    micro_batches = num_micro_batches * topology.data.size
    tokens = micro_batches * config.training.micro_batch_size * config.model.sequence_length
    layers = torch.tensor(derived.moe_layer_pattern(config), dtype=torch.bool)
    result.tokens_per_expert = report.tokens_per_expert
    holders = topology.tensor.size * topology.context.size
    result.by_layer, means = in_metrics(report, layers, tokens, micro_batches, config.moe.top_k, holders)
    result.extra.update(means)
