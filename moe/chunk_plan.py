"""The chunk plan of an MoE layer's call: its numbers of chunks and its memory strategy, chosen by a planner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

# Chunks that are dispatched before the first is computed, and most combines in flight before the oldest is waited for.
DEPTH = 2
AHEAD = DEPTH + 1  # chunks after the computed one whose receive buffers are ready
FP32 = 4  # bytes of a number
WHOLE = 2**62  # greater than any number of assignments: all at once
MAX_IN_FLIGHT = 2 * DEPTH + 2  # exchanges of a pass that may still be sending: bounds the memory of send buffers


@dataclass(frozen=True, eq=False)  # there are only the objects in STRATEGIES, and planners hash them often
class Strategy:
    """A memory strategy: how the backward pass obtains the activations of each chunk.

    `token_rows` (the dispatched input): "keep", "communicate" (dispatch again from the layer's input) or "offload"
    (copy to the host and back). `preactivations` (the input of the activation function): "keep", "recompute" (from the
    dispatched input) or "offload".
    """

    token_rows: str
    preactivations: str

    @property
    def offloads(self) -> bool:
        """Return whether activations are copied to the host and back. Both passes then need the same chunks."""
        return "offload" in (self.token_rows, self.preactivations)


STRATEGIES = {
    "keep": Strategy("keep", "keep"),
    "recompute": Strategy("keep", "recompute"),
    "communicate": Strategy("communicate", "keep"),
    "communicate_recompute": Strategy("communicate", "recompute"),
    "offload": Strategy("offload", "offload"),
    "offload_recompute": Strategy("offload", "recompute"),
    "communicate_offload": Strategy("communicate", "offload"),
}
NOTHING_KEPT = STRATEGIES["communicate_recompute"]  # also used for calls without a backward pass


@dataclass(frozen=True)
class Plan:
    """The settings of an MoE layer's call: numbers of chunks, memory strategy, and order of the backward pass.

    The weight gradients of chunk i are computed after the input gradients of chunk i + `weight_lag`, or of the last
    chunk. A lag of 0 needs the least memory. With a lag of `backward_degree` - 1 all input gradients are sent before
    weight gradients are computed.
    """

    degree: int = 1
    backward_degree: int = 1
    memory_strategy: str = "keep"
    weight_lag: int = 0

    def __post_init__(self) -> None:
        if STRATEGIES[self.memory_strategy].offloads and self.degree != self.backward_degree:
            raise ValueError(
                f"backward_degree ({self.backward_degree}) must equal degree ({self.degree}) with the memory strategy "
                f"{self.memory_strategy!r}, which copies the forward pass's chunks back from the host. "
                "Set both to the same number, or choose a memory strategy without offload."
            )


@dataclass(frozen=True)
class PassPlan:
    """The settings of one pass in a chunk plan; `name` is "forward" or "backward"."""

    name: str
    degree: int
    memory_strategy: str
    weight_lag: int = 0


def pass_degrees(plan: Plan, both: bool) -> list[int]:
    """Return the distinct numbers of chunks of the forward pass and, with `both`, of the backward pass."""
    return [plan.degree] if plan.degree == plan.backward_degree or not both else [plan.degree, plan.backward_degree]


def pass_plans(plan: Plan) -> tuple[PassPlan, PassPlan]:
    """Split a chunk plan into the settings of its forward pass and those of its backward pass."""
    strategy = plan.memory_strategy
    backward = PassPlan("backward", plan.backward_degree, strategy, plan.weight_lag)
    return PassPlan("forward", plan.degree, strategy), backward


def stored_fields(record: Any, stored: Mapping[str, str]) -> dict[str, Any]:
    """Return a dataclass as a dict for a file. `stored` maps renamed fields to their names in the file."""
    return {stored.get(name, name): value for name, value in asdict(record).items()}


# Names of LayerLoad's fields in plans.jsonl and in the benchmarks' results, where they differ.
STORED_LOAD = {"token_rows": "rows", "replica_numbers": "slot_numbers"}
STORED_PAIRS = {"assignments": "pairs", "expert_assignments": "expert_pairs"}  # only in plans.jsonl


@dataclass(frozen=True, kw_only=True)
class LayerLoad:
    """The load of one call of an MoE layer on its busiest rank. All ranks must plan with the same load."""

    tokens: int  # of one rank, before dispatch
    token_rows: int  # unique (token, rank) rows sent or received, whichever is more, including the rank's own
    away_rows: int  # `token_rows` that are sent to other ranks
    assignments: int  # (token row, expert), computed on the rank
    hidden_size: int  # H
    hidden_columns: int  # G, inputs of the activation function per assignment: 2 F for SwiGLU
    width: int  # F, outputs of the activation function per assignment
    element_size: int  # bytes per number
    expert_assignments: int = WHOLE  # of the busiest expert
    block: int = WHOLE  # most assignments that an expert computes at once
    tiled: bool = False  # computed in tiles, which changes the scratch memory
    replica_numbers: int = 0  # numbers in the weights of all replicas that a rank may hold
    fetched_bytes: int = 0  # of replicas' weights that a rank sends, or receives
    returned_bytes: int = 0  # of replicas' gradients

    @property
    def has_replicas(self) -> bool:
        """Return whether experts may have replicas on other ranks."""
        return self.replica_numbers > 0

    def as_dict(self) -> dict[str, int]:
        """Return the load with the field names of plans.jsonl, which calls assignments pairs."""
        return stored_fields(self, STORED_LOAD | STORED_PAIRS)
