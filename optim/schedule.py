"""Learning-rate schedules, as pure functions of the step: nothing to save, nothing to restore."""

from __future__ import annotations

import math

from configs.schema import OptimizerConfig


def learning_rate(config: OptimizerConfig, total_steps: int, step: int) -> float:
    """The learning rate of optimizer step `step` (counted from 1) in a run of `total_steps`.

    Linear warm-up over `warmup_steps`, then cosine, linear, constant or warm-up-stable-decay (wsd) down to `min_lr`.
    """
    if config.warmup_steps and step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    decay_steps = config.decay_steps or total_steps
    if config.schedule == "constant":
        return config.lr
    if config.schedule == "wsd":
        start, length = decay_steps - config.wsd_decay_steps, config.wsd_decay_steps
    else:
        start, length = config.warmup_steps, decay_steps - config.warmup_steps
    progress = min(max((step - start) / max(length, 1), 0.0), 1.0)
    share = 0.5 * (1 + math.cos(math.pi * progress)) if config.schedule == "cosine" else 1 - progress
    return config.min_lr + share * (config.lr - config.min_lr)
