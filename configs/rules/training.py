"""Rules of the batch, the documents, the evaluation and the optimizer's schedule."""

from __future__ import annotations

from collections.abc import Iterator

from configs import derived
from configs.rules.problem import Fix, Problem, divisors, multiples, set_to
from configs.schema import Config
from configs.show import show


def batch(config: Config, world_size: int) -> Iterator[Problem]:
    training, parallel = config.training, config.parallel
    num_replicas = derived.data_parallel_size(config, world_size)
    size, micro = training.global_batch_size, training.micro_batch_size
    if size % (micro * num_replicas):
        rule = f"must be divisible by training.micro_batch_size ({micro}) times the data-parallel size ({num_replicas})"
        fits = [d for d in divisors(size // num_replicas, micro) if d < micro] if size % num_replicas == 0 else []
        larger = multiples(micro * num_replicas, size)
        if parallel.virtual_pipeline is not None:
            larger += multiples(micro * num_replicas * parallel.pipeline, size)
        yield Problem("training.global_batch_size", rule, *set_to("training.micro_batch_size", fits), *larger)
    count = derived.num_micro_batches(config, world_size)
    if parallel.virtual_pipeline is not None and count % parallel.pipeline:
        rule = (
            f"gives {count} micro-batches per step, which must be a multiple of parallel.pipeline "
            f"({parallel.pipeline}) if parallel.virtual_pipeline is set"
        )
        smaller = set_to("training.micro_batch_size", divisors(size // num_replicas, micro))
        larger = multiples(micro * num_replicas * parallel.pipeline, size)
        yield Problem("training.global_batch_size", rule, *smaller, *larger, {"parallel.virtual_pipeline": None})


def documents(config: Config, world_size: int) -> Iterator[Problem]:
    if config.data.documents == "separate" and config.model.family == "gpt" and config.model.attention_dropout > 0:
        rule = "must be 0 with data.documents=separate, because its attention has no dropout"
        yield Problem("model.attention_dropout", rule, 0.0, {"data.documents": "joined"})


def evaluation(config: Config, world_size: int) -> Iterator[Problem]:
    data, training = config.data, config.training
    if data.validation_fraction == 0 and training.eval_interval > 0 and not data.validation_corpora:
        rule = (
            f"must be greater than 0 if training.eval_interval is {training.eval_interval} and "
            "data.validation_corpora is empty: there is no text to evaluate on"
        )
        yield Problem("data.validation_fraction", rule, 0.02)


def optimizer(config: Config, world_size: int) -> Iterator[Problem]:
    optimizer = config.optimizer
    if optimizer.min_lr > optimizer.lr:
        rule = f"must not exceed optimizer.lr ({show(optimizer.lr)})"
        yield Problem("optimizer.min_lr", rule, float(f"{optimizer.lr / 10:.6g}"), optimizer.lr, 0.0)
    end, warmup = derived.decay_steps(config), optimizer.warmup_steps
    end_key = "training.steps" if optimizer.decay_steps is None else "optimizer.decay_steps"
    if warmup >= end:
        rule = f"must be less than {end_key} ({end})"
        yield Problem("optimizer.warmup_steps", rule, end // 10, 0, {end_key: warmup * 10})
    tail = optimizer.wsd_decay_steps
    if optimizer.schedule == "wsd" and not 1 <= tail <= end - warmup:
        rule = f"must be from 1 to {end_key} ({end}) minus optimizer.warmup_steps ({warmup}) for optimizer.schedule=wsd"
        yield Problem("optimizer.wsd_decay_steps", rule, max(1, (end - warmup) // 5))


def pass_order(config: Config, world_size: int) -> Iterator[Problem]:
    """Yield the problems of the layer-wise schedule (training.pass_order=by_layer)."""
    training, parallel = config.training, config.parallel
    if training.pass_order != "by_layer":
        return
    back: Fix = {"training.pass_order": "by_micro_batch"}
    if parallel.pipeline > 1:
        what = f"parallel.pipeline ({parallel.pipeline})"
        if parallel.virtual_pipeline is not None:
            what += f" (with parallel.virtual_pipeline {parallel.virtual_pipeline})"
        rule = f"needs {what} to be 1: each stage would wait until the previous stage has finished all micro-batches"
        alone: Fix = {"parallel.pipeline": 1, "parallel.virtual_pipeline": None}
        yield Problem("training.pass_order", rule, back, alone)
    if training.recompute != "full":
        rule = f"needs training.recompute ({training.recompute}) to be full, because it stores only layer inputs"
        yield Problem("training.pass_order", rule, {"training.recompute": "full"}, back)
