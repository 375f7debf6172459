"""What planners plan with and what they decide: measured costs, limits, decisions."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from moe.chunk_plan import STRATEGIES, Plan
from parallel.costs.models import NOTHING, Curve, Line

# A field under another name in plans.jsonl and in kept measurements, where people have it.
WRITTEN = {"combine_sum": "home_sum"}
DEGREES = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)


@dataclass(frozen=True)
class LayerCosts:
    """What one layer's operations take, in seconds, without anything beside them."""

    exchange: Line  # over bytes that the busiest rank sends to others or receives from them
    gather: Line  # over rows: collecting a chunk's rows for an exchange
    combine_sum: Line  # over rows: adding up the rows that came back, per token
    forward: Curve  # over a chunk's assignments, as are the next three: its experts, and the sum per row
    recompute: Curve  # what the input gradients take longer when the preactivation is computed again
    input_gradients: Curve
    weight_gradients: Curve
    post: Line = NOTHING  # over rows: the program's part in an exchange, while the link is already at it
    # Over a chunk's assignments: sorting them, before the first chunk is there; for both passes' chunks.
    prepare: Line | Curve = NOTHING
    # Over a chunk's assignments: kept preactivations for chunks that are not the forward pass's.
    regroup: Line | Curve = NOTHING
    copy_out: Line = NOTHING  # over bytes, device to host
    copy_in: Line = NOTHING  # over bytes, host to device
    compute_slowdown: float = 1.0  # factor on the program's times while the link is busy
    exchange_slowdown: float = 1.0  # factor on the link's times while the program computes
    count_exchange: float = 0.0  # from the router's choice to the counts on all ranks, before the forward pass
    shared_forward: float = 0.0  # the shared expert, which runs while the first chunk travels
    shared_backward: float = 0.0
    copies_by_program: bool = False  # no engine copies: the program does, as on a host
    # What whole passes in some number of chunks took longer than all of that explains (or less), and a forward pass
    # longer still where the backward pass has another number.
    forward_rest: Line | Curve = NOTHING
    backward_rest: Line | Curve = NOTHING
    mixed_rest: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Numbers, lists and dicts, as JSON takes them."""
        return {WRITTEN.get(name, name): value for name, value in asdict(self).items()}

    @staticmethod
    def from_dict(values: dict[str, Any]) -> LayerCosts:
        """Undo `as_dict`, also after JSON. Raises TypeError or KeyError for something else."""
        return LayerCosts(
            **{field.name: _model(values[WRITTEN.get(field.name, field.name)]) for field in fields(LayerCosts)}
        )


def _model(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return Line(**value) if "alpha" in value else Curve(tuple(value["sizes"]), tuple(value["seconds"]))


@dataclass(frozen=True)
class Limits:
    """What a plan may be. `degrees` and `backward_degrees` beyond the number of tokens are passed over where others are
    left."""

    degrees: tuple[int, ...] = DEGREES
    backward_degrees: tuple[int, ...] = DEGREES
    strategies: tuple[str, ...] = tuple(STRATEGIES)
    memory_budget: int | None = None  # bytes of buffers per rank, as `memory_bytes` counts; None: no limit
    live_calls: int = 1  # calls (layers times micro-batches) that are between their passes at once
    slot_bytes: int = 0  # what slots for copies of experts take, whatever the plan


@dataclass(frozen=True)
class CallPrediction:
    """Seconds of both passes and peak bytes of a plan."""

    forward: float
    backward: float
    memory: int


@dataclass(frozen=True)
class Decision:
    """A plan and the prediction that led to it."""

    plan: Plan
    prediction: CallPrediction
