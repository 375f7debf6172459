"""Description of a training that the simulator, the searches and a run's own checks share."""

from __future__ import annotations

from dataclasses import dataclass

from configs.schema import Config


@dataclass(frozen=True)
class Job:
    """A training job to plan, time or build: its configuration, and facts that the configuration does not contain.

    `world_size`: number of ranks. `vocab_size`: token ids of the tokenizer, without padding. `device`: type of the
    device of every rank as torch names it, "cuda" or "cpu" (`training.device` may be "auto").
    """

    config: Config
    world_size: int
    vocab_size: int
    device: str
