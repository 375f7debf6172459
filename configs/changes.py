"""Differences between the configuration of a checkpoint and that of the run that resumes from it."""

from __future__ import annotations

from typing import Any, NamedTuple

from configs import derived
from configs.keys import OnResume, get
from configs.rules import idle
from configs.schema import KEYS, Config


class Change(NamedTuple):
    """A key whose value differs between a checkpoint and the run that resumes from it, and the effect of the change."""

    key: str
    before: Any
    after: Any
    on_resume: OnResume


def changes(before: Config, after: Config) -> list[Change]:
    """Return the keys whose values differ between two configurations, in the order of the schema."""
    values = ((name, get(before, name), get(after, name)) for name in KEYS)
    return [Change(name, old, new, on_resume(name, before, after)) for name, old, new in values if old != new]


def on_resume(name: str, before: Config, after: Config) -> OnResume:
    """Return the effect of a changed key on a resumed run: the effect that the schema states, or a weaker one if the
    other keys allow it."""
    both = (before, after)
    if name == "training.steps" and all(
        c.optimizer.schedule == "constant" or c.optimizer.decay_steps is not None for c in both
    ):
        return "free"  # the learning rate does not depend on the last step
    if name == "training.micro_batch_size" and not any(map(_depends_on_micro_batches, both)):
        return "free"  # the loss is a mean over the global batch
    if name == "data.vocab_size" and all(config.data.tokenizer != "sentencepiece" for config in both):
        return "free"  # only a tokenizer trained on the corpus uses it
    if all(idle.has_no_effect(name, config) for config in both):
        return "free"
    if name == "data.validation_corpora":
        one, other = before.data.validation_corpora, after.data.validation_corpora
        if all(one[corpus] == other[corpus] for corpus in one.keys() & other.keys()):
            return "say"  # corpora were only added or removed, and training does not depend on them
    if any(_changes_dropout(name, config) for config in both):
        return "say"
    return KEYS[name].on_resume


def _changes_dropout(name: str, config: Config) -> bool:
    """Return whether a different value of this layout key changes the random masks of dropout (parallel/dropout.py)."""
    model, parallel = config.model, config.parallel
    if name == "parallel.context":
        return model.hidden_dropout > 0  # a rank draws for its sequence rows
    if name == "parallel.tensor":
        return model.attention_dropout > 0 or (model.hidden_dropout > 0 and parallel.sequence)  # for its heads or rows
    return name == "parallel.sequence" and model.hidden_dropout > 0


def _depends_on_micro_batches(config: Config) -> bool:
    """Return whether dropout or routing makes results depend on how samples are grouped into micro-batches."""
    moe = config.moe
    routes = derived.is_moe(config) and (moe.aux_loss_coeff > 0 or moe.capacity_factor is not None)
    return derived.has_dropout(config) or routes
