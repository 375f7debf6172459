"""Input and output of the layer planner: measured costs, limits on plans, decisions."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from moe.chunk_plan import STRATEGIES, Plan, stored_fields
from parallel.costs.models import NOTHING, Curve, Line

# Fields that plans.jsonl and cached measurements store under another name.
WRITTEN = {"combine_sum": "home_sum"}
DEGREES = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)


@dataclass(frozen=True)
class LayerCosts:
    """Measured costs of one layer: the seconds of each operation as a function of its size, and of whole passes."""

    exchange: Line  # over bytes that the busiest rank sends to other ranks or receives from them
    gather: Line  # over token rows: collecting a chunk's rows for an exchange
    combine_sum: Line  # over token rows: adding up the returned rows of each token
    forward: Curve  # over a chunk's assignments, as are the next three: its experts, and the sum per token row
    recompute: Curve  # extra time of the input gradients if the preactivation is recomputed
    input_gradients: Curve
    weight_gradients: Curve
    post: Line = NOTHING  # over token rows: the program's work for an exchange that the link already carries
    # Over a chunk's assignments: sorting them, before the first chunk has arrived; for both passes' chunks.
    prepare: Line | Curve = NOTHING
    # Over a chunk's assignments: regrouping kept preactivations if the backward pass has other chunks.
    regroup: Line | Curve = NOTHING
    copy_out: Line = NOTHING  # over bytes, device to host
    copy_in: Line = NOTHING  # over bytes, host to device
    compute_slowdown: float = 1.0  # factor on the program's times while the link is busy
    exchange_slowdown: float = 1.0  # factor on the link's times while the program computes
    count_exchange: float = 0.0  # from routing to the counts on all ranks, before the forward pass
    shared_forward: float = 0.0  # the shared expert, which runs while the first chunk is sent
    shared_backward: float = 0.0
    copies_by_program: bool = False  # there is no copy engine: the program copies, as on a host
    # Over the number of chunks: the time of whole passes minus the time predicted from all of the above. `mixed_rest`:
    # extra time of a forward pass if the backward pass has a different number of chunks.
    forward_rest: Line | Curve = NOTHING
    backward_rest: Line | Curve = NOTHING
    mixed_rest: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return the costs as a dict for JSON, with the field names of stored files."""
        return stored_fields(self, WRITTEN)

    @staticmethod
    def from_dict(values: dict[str, Any]) -> LayerCosts:
        """Return the costs in a dict from `as_dict`, or from its JSON. Raises TypeError or KeyError for other dicts."""

        def model(value: Any) -> Any:
            if not isinstance(value, dict):
                return value
            return Line(**value) if "alpha" in value else Curve(tuple(value["sizes"]), tuple(value["seconds"]))

        return LayerCosts(**{f.name: model(values[WRITTEN.get(f.name, f.name)]) for f in fields(LayerCosts)})


@dataclass(frozen=True)
class Limits:
    """Limits on the planner's choice: the allowed chunk plans and the memory budget.

    Degrees (numbers of chunks) above the number of tokens are ignored; if all are above it, the least one is allowed.
    """

    degrees: tuple[int, ...] = DEGREES
    backward_degrees: tuple[int, ...] = DEGREES
    strategies: tuple[str, ...] = tuple(STRATEGIES)
    memory_budget: int | None = None  # bytes of buffers per rank, as `memory_bytes` counts; None: no limit
    live_calls: int = 1  # calls (layers times micro-batches) that are between their two passes at once
    replica_bytes: int = 0  # memory for replicas of experts, equal for all plans


@dataclass(frozen=True)
class CallPrediction:
    """Prediction for a call with a chunk plan: seconds of the forward and the backward pass, and peak bytes."""

    forward: float
    backward: float
    memory: int


@dataclass(frozen=True)
class Decision:
    """A chunk plan that the planner chose, and its predicted time and memory."""

    plan: Plan
    prediction: CallPrediction
