"""The chunk plan of one call of an MoE layer, which planners decide and the schedule follows."""

from __future__ import annotations

from dataclasses import asdict, dataclass

# Chunks that are dispatched before the first is computed, and combines that may be in flight before one is waited for.
DEPTH = 2
AHEAD = DEPTH + 1  # chunks whose receive buffers are ready beyond the one that is computed
FP32 = 4  # bytes of a number
WHOLE = 2**62  # greater than any number of assignments: all at once
MAX_IN_FLIGHT = 2 * DEPTH + 2  # exchanges of a pass that may still be sending: bounds the memory of send buffers


@dataclass(frozen=True, eq=False)  # only those of STRATEGIES exist, and planners hash them often
class Strategy:
    """The memory strategy: how the backward pass obtains the tensors of each chunk.

    `token_rows`, the dispatched input: "keep", "communicate" (dispatched again from the layer's own input) or "offload"
    (to the host and back). `preactivations`, the input of the activation function: "keep", "recompute" from the rows,
    or "offload".
    """

    token_rows: str
    preactivations: str

    @property
    def offloads(self) -> bool:
        """Whether tensors are copied back from the host, in the forward pass's chunks."""
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
    """The numbers of chunks of both passes, a key of STRATEGIES, and the order of the backward pass.

    The weight gradients of chunk i are computed after the input gradients of chunk i + `weight_lag` (or the last one):
    0 takes the least memory, `backward_degree` - 1 sends all input gradients first.
    """

    degree: int = 1
    backward_degree: int = 1
    memory_strategy: str = "keep"
    weight_lag: int = 0

    def __post_init__(self) -> None:
        if STRATEGIES[self.memory_strategy].offloads and self.degree != self.backward_degree:
            raise ValueError(
                f"memory strategy {self.memory_strategy!r} brings back the forward pass's chunks: backward_degree "
                f"({self.backward_degree}) must equal degree ({self.degree})."
            )


@dataclass(frozen=True)
class PassPlan:
    """The settings of one pass of a plan, named "forward" or "backward"."""

    name: str
    degree: int
    memory_strategy: str
    weight_lag: int = 0


def pass_degrees(plan: Plan, both: bool) -> list[int]:
    """Return the degrees of a call's passes, without duplicates; without `both` only the forward pass's."""
    return [plan.degree] if plan.degree == plan.backward_degree or not both else [plan.degree, plan.backward_degree]


def pass_plans(plan: Plan) -> tuple[PassPlan, PassPlan]:
    """Return the settings of the forward and of the backward pass of a plan."""
    strategy = plan.memory_strategy
    backward = PassPlan("backward", plan.backward_degree, strategy, plan.weight_lag)
    return PassPlan("forward", plan.degree, strategy), backward


# Names of LayerLoad's fields in plans.jsonl and in the benchmarks' results, where they differ.
STORED_LOAD = {"token_rows": "rows", "replica_numbers": "slot_numbers"}


@dataclass(frozen=True, kw_only=True)
class LayerLoad:
    """The work of the busiest rank in one call of a layer. All ranks must plan with the same numbers."""

    tokens: int  # of one rank, before dispatch
    token_rows: int  # unique (token, rank) rows sent or received, whichever is more, the rank's own included
    away_rows: int  # those of them that are sent to other ranks
    assignments: int  # of a token row and an expert, computed here
    hidden_size: int  # H
    hidden_columns: int  # G, inputs of the activation function per assignment: 2 F for SwiGLU
    width: int  # F, its outputs
    element_size: int  # bytes per number
    expert_assignments: int = WHOLE  # of the busiest expert
    block: int = WHOLE  # most assignments that go through an expert at once
    tiled: bool = False  # computed in tiles, which need other scratch memory
    replica_numbers: int = 0  # numbers in the weights of all replicas that a rank may hold
    fetched_bytes: int = 0  # of replicas' weights that a rank sends, or receives
    returned_bytes: int = 0  # of replicas' gradients

    @property
    def has_replicas(self) -> bool:
        """Whether experts may have replicas on other ranks."""
        return self.replica_numbers > 0

    def as_dict(self) -> dict[str, int]:
        """Return the load under the names that plans.jsonl has: `assignments` are `pairs` there."""
        return {
            STORED_LOAD.get(name, name.replace("assignments", "pairs")): value for name, value in asdict(self).items()
        }
