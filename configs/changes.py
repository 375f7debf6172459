"""What differs between the configuration of a checkpoint and that of the run which goes on from it."""

from __future__ import annotations

from typing import Any, NamedTuple

from configs import derived
from configs.keys import OnResume, get
from configs.rules import idle
from configs.schema import KEYS, Config


class Change(NamedTuple):
    """A key with two values, and what that means to a run that goes on with the second."""

    key: str
    before: Any
    after: Any
    on_resume: OnResume


def changes(before: Config, after: Config) -> list[Change]:
    """Every key whose value differs, in the schema's order."""
    values = ((name, get(before, name), get(after, name)) for name in KEYS)
    return [Change(name, old, new, on_resume(name, before, after)) for name, old, new in values if old != new]


def on_resume(name: str, before: Config, after: Config) -> OnResume:
    """What another value of a key means between these configurations: what the schema says, or less."""
    both = (before, after)
    if name == "training.steps" and all(
        c.optimizer.schedule == "constant" or c.optimizer.decay_steps is not None for c in both
    ):
        return "free"  # the learning rate does not look at the run's end
    if name == "training.micro_batch_size" and not any(_looks_at_micro_batches(config) for config in both):
        return "free"  # the loss is a mean over the global batch
    if name == "data.vocab_size" and all(config.data.tokenizer != "sentencepiece" for config in both):
        return "free"  # of a tokenizer that is trained here
    if all(idle.has_no_effect(name, config) for config in both):
        return "free"
    if name == "data.validation_corpora" and _only_more_or_less(before, after):
        return "say"  # no number of training looks at them
    if _draws_by(name, before) or _draws_by(name, after):
        return "say"
    return KEYS[name].on_resume


def _draws_by(name: str, config: Config) -> bool:
    """Whether the masks of dropout follow from this key of the layout: see parallel/dropout.py."""
    model, parallel = config.model, config.parallel
    if name == "parallel.context":
        return model.hidden_dropout > 0  # a rank draws for its rows
    if name == "parallel.tensor":
        return model.attention_dropout > 0 or (model.hidden_dropout > 0 and parallel.sequence)  # for its heads or rows
    return name == "parallel.sequence" and model.hidden_dropout > 0


def _only_more_or_less(before: Config, after: Config) -> bool:
    """Whether the validation corpora that both have are the same."""
    one, other = before.data.validation_corpora, after.data.validation_corpora
    return all(one[name] == other[name] for name in one.keys() & other.keys())


def _looks_at_micro_batches(config: Config) -> bool:
    moe = config.moe
    if derived.has_dropout(config):
        return True  # each micro-batch draws its own
    return derived.is_moe(config) and (moe.aux_loss_coeff > 0 or moe.capacity_factor is not None)
