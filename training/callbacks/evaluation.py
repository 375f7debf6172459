"""Validation loss every `training.eval_interval` steps and at the end, beside what a unigram model would reach."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist

from data.build import entropy, label_counts
from training import step
from training.callbacks.logging.console import stamp
from training.run import Callback, Metrics, Run
from training.step import Batch


class Evaluation(Callback):
    """Adds `validation_loss` to the metrics, and says it next to the unigram entropy of the same tokens."""

    def after_step(self, run: Run, metrics: Metrics) -> None:
        interval = run.config.training.eval_interval
        if interval == 0 or (metrics["step"] % interval != 0 and not run.is_last_step):
            return
        loss, extra, entropy = evaluate(run)
        metrics["validation_loss"] = loss
        metrics["unigram_entropy"] = entropy
        metrics.update({f"validation_{name}": value for name, value in extra.items()})
        seen = f"{stamp()} step {metrics['step']}/{run.config.training.steps} | {run.tokens_seen:,} tokens"
        apart = (
            f"{abs(entropy - loss):.4f} {'below' if loss <= entropy else 'above'} the unigram entropy of the same "
            f"tokens ({entropy:.4f})"
        )
        run.say(f"{seen} | validation loss {loss:.4f} nats, {apart}")


def evaluate(run: Run) -> tuple[float, dict[str, float], float]:
    """Mean loss over `training.eval_batches` global batches of the validation split, extra losses, unigram entropy in
    nats."""
    counts = torch.zeros(run.vocab_size, dtype=torch.int64)
    loader = run.make_validation_loader()

    def steps() -> Iterator[list[Batch]]:
        for _ in range(run.config.training.eval_batches):
            batches = loader.next_step()
            counts.add_(label_counts([batches], run.vocab_size))
            yield batches

    try:
        loss, extra = step.evaluate(run.engine, steps())
    finally:
        loader.close()
    counts = counts.to(run.topology.device)
    if run.topology.data.size > 1:
        dist.all_reduce(counts, group=run.topology.data.group)
    return loss, extra, entropy(counts)
