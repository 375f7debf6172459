"""Input and output of the layer planner: measured costs, limits of plans, decisions."""

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
    """The seconds of one layer's operations, each measured alone, as models over sizes."""

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
    # Over the number of chunks: the difference of whole passes to all of the above; and the extra time of a forward
    # pass if the backward pass has another number of chunks.
    forward_rest: Line | Curve = NOTHING
    backward_rest: Line | Curve = NOTHING
    mixed_rest: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return the costs as numbers, lists and dicts for JSON, with the field names of stored files."""
        return stored_fields(self, WRITTEN)

    @staticmethod
    def from_dict(values: dict[str, Any]) -> LayerCosts:
        """Return the costs from a dict of `as_dict`, also after JSON. Raises TypeError or KeyError for another dict."""

        def model(value: Any) -> Any:
            if not isinstance(value, dict):
                return value
            return Line(**value) if "alpha" in value else Curve(tuple(value["sizes"]), tuple(value["seconds"]))

        return LayerCosts(**{f.name: model(values[WRITTEN.get(f.name, f.name)]) for f in fields(LayerCosts)})


@dataclass(frozen=True)
class Limits:
    """The chunk plans that the planner may choose, and the memory budget.

    `degrees` and `backward_degrees` above the number of tokens are ignored unless no others are left.
    """

    degrees: tuple[int, ...] = DEGREES
    backward_degrees: tuple[int, ...] = DEGREES
    strategies: tuple[str, ...] = tuple(STRATEGIES)
    memory_budget: int | None = None  # bytes of buffers per rank, as `memory_bytes` counts; None: no limit
    live_calls: int = 1  # calls (layers times micro-batches) that are between their two passes at once
    replica_bytes: int = 0  # memory for replicas of experts, the same for every plan


@dataclass(frozen=True)
class CallPrediction:
    """The predicted seconds of both passes of a call, and its peak bytes, with some chunk plan."""

    forward: float
    backward: float
    memory: int


@dataclass(frozen=True)
class Decision:
    """A chunk plan and its prediction."""

    plan: Plan
    prediction: CallPrediction
