"""Rules for each key by itself: those that the schema states, and those of the few keys whose values may have several
types."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

from configs import hardware_files
from configs.keys import Key, get
from configs.rules.problem import Problem
from configs.schema import KEYS, Config
from configs.show import nearest

CORPUS_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


def values(config: Config, world_size: int) -> Iterator[Problem]:
    """Yield a problem for each key whose value breaks the rule that the schema states for the key."""
    for name, key in KEYS.items():
        value = get(config, name)
        if isinstance(value, str) and not key.choices and not value.strip():
            yield Problem(name, "must not be empty", get(Config(), name))
        rule = key.broken_rule(value)
        if rule is not None:
            yield Problem(name, f"must be {rule}", *_legal_values(key, value))
    for name in config.checkpoint.accept_changes:
        yield from _accepted(config, name)


def _legal_values(key: Key, value: Any) -> list[Any]:
    """Return legal values to replace an illegal value of a key, the most similar first."""
    close = nearest(value, key.choices) if key.choices else None
    edge = [int(key.low)] if key.low is not None and isinstance(value, int) else []
    tried = [*([close] if close else []), *edge, key.fresh_default(), *(key.choices or (1, 0.5)), None]
    return [new for new in tried if key.broken_rule(new) is None and (new is not None or key.nullable)]


def wrong_validation_corpora(value: Any) -> str | None:
    """Return the rule that a value of data.validation_corpora breaks, to end an error message; None if legal."""
    if not isinstance(value, dict):
        return f"must be {KEYS['data.validation_corpora'].form}"
    for name, corpus in value.items():
        if not (isinstance(name, str) and CORPUS_NAME.fullmatch(name)):
            return (
                f"must have names of at most 64 letters, digits, _ - . that begin with a letter or digit, and "
                f"{name!r} is not such a name"
            )
        paths = corpus if isinstance(corpus, list) else [corpus]
        if not paths or not all(isinstance(path, str) and path.strip() for path in paths):
            return f"must map each name to a text: {name} must be stdlib, a path, or a list of paths"
    return None


def _accepted(config: Config, name: str) -> Iterator[Problem]:
    """Yield a problem if the entry `name` of checkpoint.accept_changes is not a key whose change a resume refuses
    unless it is accepted."""
    key = "checkpoint.accept_changes"
    acceptable = [other for other in KEYS if KEYS[other].acceptable]
    if name in acceptable:
        return
    if name not in KEYS:
        rule = f"must list only known keys, and {name} is not one"
    elif KEYS[name].architecture:
        rule = f"must not list {name}, because a change of it makes another model"
    else:
        rule = f"must not list {name}, because a resume never refuses a change of it"
    rest = [other for other in config.checkpoint.accept_changes if other != name]
    by_last = {other.rpartition(".")[2]: other for other in acceptable}
    close = (nearest(name, acceptable) or by_last.get(nearest(name, by_last) or "")) if name not in KEYS else None
    rule += "" if close else f"; legal are {', '.join(acceptable)}"
    yield Problem(key, rule, *([[*rest, close]] if close and close not in rest else []), rest)


def loose_values(config: Config, world_size: int) -> Iterator[Problem]:
    """Yield the problems of the few keys whose values may have several types."""
    yield from _corpora(config)
    profile, steps = config.training.profile, config.training.steps
    if any(not 1 <= step <= steps for step in profile.steps):
        rule = f"must be a list of steps from 1 to training.steps ({steps})"
        yield Problem("training.profile.steps", rule, [min(10, steps)], [])
    ranks = profile.ranks if isinstance(profile.ranks, list) else []
    if profile.ranks != "all" and not (ranks and all(type(rank) is int and 0 <= rank < world_size for rank in ranks)):
        rule = f"must be all, or a list of ranks from 0 to {world_size - 1}"
        yield Problem("training.profile.ranks", rule, "all")

    offload = config.training.activation_offload
    if offload not in ("none", "auto") and not _is_positive(offload):
        rule = f"must be {KEYS['training.activation_offload'].form}"
        yield Problem("training.activation_offload", rule, "none")

    degree = config.moe.pipeline_degree
    if degree != "auto" and (type(degree) is not int or degree < 1):
        yield Problem("moe.pipeline_degree", f"must be {KEYS['moe.pipeline_degree'].form}", "auto", 1)

    yield from _plan(config)
    layers, num_layers = config.moe.layers, config.model.num_layers
    if isinstance(layers, list):
        if len(layers) != num_layers or any(layer not in (0, 1) for layer in layers) or not any(layers):
            spread = [int(layers[i % len(layers)] in (1, True)) if layers else 1 for i in range(num_layers)]
            rule = (
                f"must be an integer, or a list with a 0 or 1 for each of model.num_layers ({num_layers}) layers and "
                "at least one 1"
            )
            yield Problem("moe.layers", rule, *([spread] if any(spread) and num_layers <= 16 else []), 1)
    elif type(layers) is not int or layers < 1:
        rule = "must be an integer n of at least 1 (every n-th layer is MoE) or a list of 0 and 1, one per layer"
        yield Problem("moe.layers", rule, 1)


def _corpora(config: Config) -> Iterator[Problem]:
    corpus = config.data.corpus
    items = corpus if isinstance(corpus, list) else [] if isinstance(corpus, dict) else [corpus]
    if not items or not all(map(_is_corpus, items)):
        yield Problem("data.corpus", f"must be {KEYS['data.corpus'].form}", "stdlib")
    if (wrong := wrong_validation_corpora(config.data.validation_corpora)) is not None:
        yield Problem("data.validation_corpora", wrong, {"data.validation_corpora": {}})


def _is_corpus(item: Any) -> bool:
    fields = item if isinstance(item, dict) else {"path": item}
    path, weight = fields.get("path"), fields.get("weight", 1.0)
    return isinstance(path, str) and bool(path.strip()) and _is_positive(weight) and fields.keys() <= {"path", "weight"}


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf


def _plan(config: Config) -> Iterator[Problem]:
    """Yield the problems of the keys that concern a plan: plan, plan_world_size and hardware."""
    if not isinstance(config.plan, bool) and config.plan not in ("json", "search"):
        close = nearest(str(config.plan), ("json", "search"))
        yield Problem("plan", "must be true, false, json or search", *([close] if close else []), True)
    if config.plan_world_size is not None and config.plan is False:
        rule = "must be null without plan=true, because a run uses the processes that are started"
        yield Problem("plan_world_size", rule, {"plan": True}, None)

    if config.hardware is not None and (unknown_file := hardware_files.wrong(config.hardware)) is not None:
        rule, close = unknown_file
        yield Problem("hardware", rule, *([close] if close else []), None)
