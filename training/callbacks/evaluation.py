"""Compute validation losses every `training.eval_interval` steps and at the end, and compare them with a unigram
model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from data.loader import HELD_OUT, entropy, label_counts
from training import step
from training.callbacks.logging.console import stamp
from training.loss_buckets import LossBuckets, mean_losses
from training.run import Callback, Metrics, Run
from training.step import Batch


class Evaluation(Callback):
    """Adds validation losses to the metrics: `validation_loss` for the held-out documents and `valid/NAME/loss` for
    each validation corpus. Logs each loss with the unigram entropy of the same tokens.

    For GPT, also adds each loss by position in the document segment (`..._by_position`) and by the segment's length
    (`..._by_length`).
    """

    follows = ("OptimizerOffload",)  # an evaluation's transfers must not count as a step's

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
            consumed = run.progress.consumed_samples
            tokens = (consumed - run.skipped.count_before(consumed)) * run.config.model.sequence_length
            seen = f"{stamp()} step {metrics['step']}/{run.config.training.steps} | {tokens:,} tokens"
            corpus, side = "" if name == HELD_OUT else f" of {name}", "below" if loss <= entropy else "above"
            run.log(
                f"{seen} | validation loss{corpus} {loss:.4f} nats, {abs(entropy - loss):.4f} {side} the unigram "
                f"entropy of the same tokens ({entropy:.4f})"
            )


def evaluate(
    run: Run, make_loader: Callable[[], Any]
) -> tuple[float, dict[str, float], float, dict[str, dict[str, float]]]:
    """Evaluate the model on all global batches of a validation loader. Returns the mean loss, the mean of each extra
    loss (of sentences or routers), the unigram entropy in nats, and for GPT the losses by bucket: `loss_by_position`
    and, for separate documents, `loss_by_length`."""
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
