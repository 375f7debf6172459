"""Take one optimizer step, or evaluate the model, in any parallel layout.

The minimised loss is the sum of the losses of the global batch's predicted tokens, divided by their number, so it does
not depend on how the batch is split over ranks and micro-batches. Megatron's schedule divides the loss by the number of
micro-batches, and `Engine.scale_loss` by the number of data-parallel ranks; `_loss` multiplies by both numbers.
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
from data.document_lengths import attended_pairs, share_of
from data.loader import PREPARED
from memory.transfer import to_device
from models.attention.sequence_rows import SLICES, gather_rows
from models.loss.output_layer import predicted_rows
from moe.watch import router_metrics
from optim.optimizer import apply_gradients, begin_step, prepare_gradients, set_learning_rate, update_loss_scale
from training.engine import Engine
from training.loss_buckets import LossBuckets
from training.sums import pack, unpack

Batch = dict[str, torch.Tensor]


@dataclass
class StepResult:
    """Results of one step over the global batch. All except `own_losses` are on the host and equal on every rank.
    `extra` holds further losses and router metrics; `per_layer` lists router metrics of each MoE layer; `sums` maps a
    name that a callback registered to its sum over all ranks."""

    loss: float
    grad_norm: float  # before clipping; 0 where fp16 gradients overflowed
    learning_rate: float
    overflowed: bool  # whether fp16 gradients overflowed on any rank; the weights then do not change
    finite: bool  # whether the gradients are finite, apart from an overflow
    own_losses: torch.Tensor  # this rank's sums, on its device
    predicted_tokens: int = 0
    attended_share: float | None = None  # attended pairs / pairs of joined samples, for separate documents
    updated: bool = False  # whether the weights were changed
    extra: dict[str, float] = field(default_factory=dict)
    tokens_per_expert: torch.Tensor | None = None  # [num_layers, num_experts]
    per_layer: dict[str, list[float]] = field(default_factory=dict)
    sums: dict[str, torch.Tensor] = field(default_factory=dict)


def train_step(engine: Engine, batches: Sequence[Batch], step: int) -> StepResult:
    """Take optimizer step `step` (counted from 1) on this rank's micro-batches, without checking first whether the loss
    is good."""
    result = gradients(engine, batches, step)
    apply(engine, result)
    return result


def gradients(engine: Engine, batches: Sequence[Batch], step: int) -> StepResult:
    """Run the forward and backward passes of optimizer step `step` (counted from 1) on this rank's micro-batches, and
    return the results over all ranks. The weights are not updated. Other state changes, such as random number states
    and the routers' token counts."""
    for chunk in engine.chunks:
        chunk.train()
    _clear_gradients(engine)
    engine.dropout.step = step
    rate = set_learning_rate(engine.optimizer, engine.config, step)
    begin_step(engine.optimizer)
    losses, counts = _run(engine, batches, forward_only=False)
    overflow = prepare_gradients(engine.optimizer)
    own = engine.sums.take()
    addends = [_once(engine, losses), _once_a_job(engine, counts), engine.norms.squares(), *own.values()]
    addends += [] if overflow is None else [overflow]
    addends += [] if engine.watch is None else [engine.watch.take()]
    # The host reads all numbers of a step here.
    summed, counted, squares, *sums = _sum_over_ranks(engine, addends)
    grad_norm = engine.norms.take(squares)
    overflowed = overflow is not None and float(sums[len(own)]) > 0
    update_loss_scale(engine.optimizer, overflowed)
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
        report, config, topology = engine.watch.split(sums[-1]), engine.config, engine.topology
        micro_batches = len(batches) * topology.data.size
        tokens = micro_batches * config.training.micro_batch_size * config.model.sequence_length
        layers = torch.tensor(derived.moe_layer_pattern(config), dtype=torch.bool)
        result.tokens_per_expert = report.tokens_per_expert
        holders = topology.tensor.size * topology.context.size
        result.per_layer, means = router_metrics(report, layers, tokens, micro_batches, config.moe.top_k, holders)
        result.extra.update(means)
    return result


def apply(engine: Engine, result: StepResult) -> None:
    """Update the weights with the current gradients, unless the fp16 gradients overflowed."""
    if not result.overflowed:
        result.updated = apply_gradients(engine.optimizer, result.grad_norm)


def run_again(engine: Engine, batches: Sequence[Batch]) -> None:
    """Repeat the last step's forward and backward passes with identical dropout masks, for hooks that inspect them.
    Only gradients change."""
    snapshot = engine.snapshot()
    _clear_gradients(engine)
    begin_step(engine.optimizer, passive=True)
    _run(engine, batches, forward_only=False)
    if engine.watch is not None:
        engine.watch.take()
    snapshot.roll_back()


def evaluate(
    engine: Engine, steps: Iterator[Sequence[Batch]], buckets: LossBuckets | None = None
) -> tuple[float, dict[str, float]]:
    """Return the mean loss per predicted token over the global batches in `steps`, and the mean of each extra loss.
    Adds every token's loss to `buckets` if given (GPT only), which then holds the sums over all ranks."""
    total, batches = _no_losses(engine), 0
    counts = torch.zeros(2, dtype=torch.float64, device=engine.topology.device)
    with engine.frozen_weights(), torch.no_grad():  # Megatron's schedule alone would still build the graph
        for micro_batches in steps:
            losses, batch_counts = _run(engine, micro_batches, forward_only=True, buckets=buckets)
            total += losses
            counts += batch_counts
            batches += len(micro_batches)
    addends = [_once(engine, total), _once_a_job(engine, counts)]
    if buckets is not None:
        addends.append(_once(engine, buckets.sums))
    summed, counted, *others = _sum_over_ranks(engine, addends)
    if buckets is not None:
        (buckets.sums,) = others
    return _losses(engine, summed, counted[0], batches)


def logits(engine: Engine, micro_batch: Batch) -> torch.Tensor | None:
    """Return this tensor-parallel rank's fp32 logits [batch, sequence, vocabulary slice]. Returns None on pipeline
    stages before the last one."""
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
    return gather_rows(outputs[-1][0].float(), made[0][SLICES].sequence_rows, context, batch_size)


# ---------------------------------------------------------------------------------------------------------------------
# Passes
# ---------------------------------------------------------------------------------------------------------------------


def _run(
    engine: Engine, batches: Sequence[Batch], *, forward_only: bool, buckets: LossBuckets | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run Megatron's schedule over the micro-batches. Returns two device tensors, so that the host does not wait: this
    rank's loss sums [loss, *extra], which are zero before the last pipeline stage; and int64 [2] with the number of
    predicted tokens in the global batch and, for separate documents, the number of attended token pairs."""
    config, topology = engine.config, engine.topology
    tokens = torch.stack([batch["loss_mask"].sum() for batch in batches]).sum().long()
    pairs = sum(attended_pairs(config, batch["positions"]) for batch in batches if "positions" in batch)
    counts = to_device(torch.stack([tokens, torch.tensor(pairs)]), topology.device)
    if topology.data.size > 1:
        dist.all_reduce(counts, group=topology.data.group)
    scale = len(batches) * topology.data.size / counts[0].clamp(min=1)
    losses = _no_losses(engine)
    loss_grad = None if forward_only else _loss_grad(engine, scale, len(batches))
    batches = [batch.get(PREPARED) or engine.on_host(batch) for batch in batches]

    def forward_step(iterator: Iterator[tuple[int, Batch]], chunk: torch.nn.Module) -> tuple[torch.Tensor, Any]:
        number, batch = next(iterator)
        predicts = topology.pipeline.is_last and (len(engine.chunks) == 1 or chunk is engine.chunks[-1])
        extra: Batch = {}
        if predicts:
            ranks = topology.tensor.size if config.parallel.sequence else 1
            sequence_rows = predicted_rows(batch["loss_mask"], ranks)  # None if all of this rank's rows predict
            if sequence_rows is not None:
                extra["rows"] = to_device(sequence_rows, topology.device)
            if loss_grad is not None:
                extra["loss_grad"] = loss_grad
        batch = {**_to_device(engine, batch), **extra}
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


def _loss(
    engine: Engine, batch: Batch, scale: torch.Tensor, losses: torch.Tensor, buckets: LossBuckets | None, output: Any
) -> tuple[torch.Tensor, dict[str, Any]]:
    loss_sum, extra = engine.family.loss(output, batch)
    if buckets is not None:
        buckets.add(output[1], batch)  # the loss of each token
    with torch.no_grad():
        losses[0] += loss_sum
        for i, name in enumerate(engine.extra_losses):
            losses[1 + i] += extra[name]
    return loss_sum * scale + sum(extra.values()), {}


def _loss_grad(engine: Engine, scale: torch.Tensor, num_micro_batches: int) -> torch.Tensor:
    """Return the gradient of the step's loss with respect to a micro-batch's loss sum: the product of all scale
    factors, multiplied in the order of the backward pass. `scale`: the factor of the loss sum."""
    one = engine.scale_loss(torch.ones((), device=scale.device)).reshape(())
    return one / num_micro_batches * engine.topology.context.size * scale


def _clear_gradients(engine: Engine) -> None:
    for chunk in engine.chunks:
        chunk.zero_grad_buffer()
    engine.optimizer.zero_grad()


def _chunks(engine: Engine) -> Any:
    """Return the model in the form that Megatron's schedule expects: one chunk, or a list of several."""
    return engine.chunks if len(engine.chunks) > 1 else engine.chunks[0]


def _iterators(engine: Engine, batches: Sequence[Any]) -> Any:
    return [iter(batches) for _ in engine.chunks] if len(engine.chunks) > 1 else iter(batches)


def _shape(engine: Engine, num_samples: int, length: int) -> dict[str, int]:
    """Return a micro-batch's shape as arguments of Megatron's schedule. With context parallelism, all sequence rows
    form one sample, whose length the schedule divides by the number of context-parallel ranks."""
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
    """Return the losses on tensor parallel rank 0 and zeros on the other ranks, so that a sum over all ranks counts
    them once."""
    return losses if engine.topology.tensor.rank == 0 else torch.zeros_like(losses)


def _once_a_job(engine: Engine, value: torch.Tensor) -> torch.Tensor:
    """Return the value as float64 on rank 0 and zeros on the other ranks, so that a sum over all ranks counts it
    once."""
    value = value.to(torch.float64)
    return value if engine.topology.rank == 0 else torch.zeros_like(value)


def _sum_over_ranks(engine: Engine, addends: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the sums of the addends over all ranks, on the host, after one all-reduce and one wait for the device."""
    flat = pack(addends)
    if engine.topology.world_size > 1:
        dist.all_reduce(flat)
    return unpack(flat.cpu(), addends)


def _losses(
    engine: Engine, summed: torch.Tensor, tokens: torch.Tensor, num_micro_batches: int
) -> tuple[float, dict[str, float]]:
    """Return the mean loss per predicted token and the mean of each extra loss per micro-batch, from the sums over all
    ranks."""
    micro_batches = num_micro_batches * engine.topology.data.size
    extra = {name: float(summed[1 + i]) / max(micro_batches, 1) for i, name in enumerate(engine.extra_losses)}
    return float(summed[0]) / max(float(tokens), 1.0), extra
