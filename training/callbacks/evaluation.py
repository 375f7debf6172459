"""Validation losses every `training.eval_interval` steps and at the end, beside what a unigram model would reach."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from data.build import HELD_OUT, entropy, label_counts
from training import step
from training.callbacks.logging.console import stamp
from training.loss_buckets import LossBuckets, mean_losses
from training.run import Callback, Metrics, Run
from training.step import Batch


class Evaluation(Callback):
    """Adds the loss of what is held out of the corpus to the metrics, as `validation_loss`, and that of each validation
    corpus, as `valid/NAME/loss`; says each next to the unigram entropy of the same tokens.

    For GPT the same losses by position and by the length of a document's piece, as `..._by_position` and
    `..._by_length`.
    """

    follows = ("OptimizerTiers",)  # what an evaluation fetches is no step's

    def after_step(self, run: Run, metrics: Metrics) -> None:
        interval = run.config.training.eval_interval
        if interval == 0 or (metrics["step"] % interval != 0 and not run.is_last_step):
            return
        for name, make_loader in run.make_validation_loaders.items():
            loss, extra, entropy, by = evaluate(run, make_loader)
            if name == HELD_OUT:
                metrics["validation_loss"] = loss
                metrics["unigram_entropy"] = entropy
                metrics.update({f"validation_{key}": value for key, value in (extra | by).items()})
            else:
                numbers = {"loss": loss, "unigram_entropy": entropy, **extra, **by}
                metrics.update({f"valid/{name}/{key}": value for key, value in numbers.items()})
            seen = f"{stamp()} step {metrics['step']}/{run.config.training.steps} | {run.tokens_seen:,} tokens"
            apart = (
                f"{abs(entropy - loss):.4f} {'below' if loss <= entropy else 'above'} the unigram entropy of the same "
                f"tokens ({entropy:.4f})"
            )
            of = "" if name == HELD_OUT else f" of {name}"
            run.say(f"{seen} | validation loss{of} {loss:.4f} nats, {apart}")


def evaluate(
    run: Run, make_loader: Callable[[], Any]
) -> tuple[float, dict[str, float], float, dict[str, dict[str, float]]]:
    """Mean loss over the global batches of a validation loader, extra losses, unigram entropy in nats, and for GPT the
    loss by bucket: of `loss_by_position` and, where documents are separate, `loss_by_length`."""
    model = run.config.model
    buckets = LossBuckets(model.sequence_length, run.topology.device) if model.family == "gpt" else None
    counts = torch.zeros(run.vocab_size, dtype=torch.int64)
    loader = make_loader()

    def steps() -> Iterator[list[Batch]]:
        while True:
            try:
                batches = loader.next_step()
            except StopIteration:
                return
            counts.add_(label_counts([batches], run.vocab_size))
            yield batches

    try:
        loss, extra = step.evaluate(run.engine, steps(), buckets)
    finally:
        loader.close()
    counts = counts.to(run.topology.device)
    if run.topology.data.size > 1:
        dist.all_reduce(counts, group=run.topology.data.group)
    by = {} if buckets is None else mean_losses(buckets.sums)
    return loss, extra, entropy(counts), {f"loss_by_{name}": means for name, means in by.items()}
