"""What the clock says of a step: its seconds, and what they are spent on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# What the seconds of a step are spent on, in the words of the sentences that say why a layout loses. `%s` is "inside a
# node" or "between nodes".
REASONS: dict[str, str] = {
    "products": "matrix products and attention",
    "recomputed": "layers that are computed again",
    "memory": "operations that only read and write memory",
    "launches": "the device waiting for the host to start operations",
    "tensor": "waiting for tensor ranks %s",
    "context": "waiting for context ranks %s",
    "expert": "waiting for expert ranks %s",
    "pipeline": "waiting for states of other pipeline stages %s",
    "bubble": "stages with nothing to do while the pipeline fills and drains",
    "gradients": "reducing gradients %s",
    "weights": "gathering updated weights %s",
    "update": "the optimizer's update on the device",
    "host_update": "the optimizer's update on the host",
    "host_link": "the link to the host",
    "disk": "the disk",
    "step": "what a step takes beside its passes",
}


@dataclass(frozen=True)
class PlannedSpan:
    """Work of a resource: from `start`, for `seconds`. `track`: a pipeline stage and what of it, such as "stage 0:
    compute" or "stage 0: link between nodes"."""

    track: str
    name: str
    start: float
    seconds: float


@dataclass(frozen=True)
class Prediction:
    """Seconds of a step, and of its longest chain of work and waiting by reason, which add up to them."""

    seconds: float
    reasons: Mapping[str, float]  # by name in REASONS, ":inside" or ":between" behind it where that is part of it
    hardware: str
    spans: tuple[PlannedSpan, ...] = field(default=(), repr=False)  # where they were asked for
