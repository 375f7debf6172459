"""How one call of an MoE layer runs: what planners decide and the schedule obeys."""

from __future__ import annotations

from dataclasses import asdict, dataclass

# Chunks that are dispatched before the first is computed, and combines that may be on their way before one is waited
# for.
DEPTH = 2
AHEAD = DEPTH + 1  # chunks whose receive buffers are ready beyond the one that is computed
FP32 = 4  # bytes of a number
WHOLE = 2**62  # more assignments than there are: all at once
MAX_IN_FLIGHT = 2 * DEPTH + 2  # exchanges of a pass that may still be sending: bounds the memory of send buffers


@dataclass(frozen=True, eq=False)  # there are those of STRATEGIES alone, and planners look them up often
class Strategy:
    """How the backward pass gets back what it needs of each chunk.

    `rows`, the dispatched input: "keep", "communicate" (dispatched again from the layer's own input) or "offload" (to
    the host and back). `preactivations`, what goes into the activation function: "keep", "recompute" from the rows, or
    "offload".
    """

    rows: str
    preactivations: str

    @property
    def offloads(self) -> bool:
        """Something comes back from the host, in the forward pass's chunks."""
        return "offload" in (self.rows, self.preactivations)


STRATEGIES = {
    "keep": Strategy("keep", "keep"),
    "recompute": Strategy("keep", "recompute"),
    "communicate": Strategy("communicate", "keep"),
    "communicate_recompute": Strategy("communicate", "recompute"),
    "offload": Strategy("offload", "offload"),
    "offload_recompute": Strategy("offload", "recompute"),
    "communicate_offload": Strategy("communicate", "offload"),
}
NOTHING_KEPT = STRATEGIES["communicate_recompute"]  # also of a call without a backward pass


@dataclass(frozen=True)
class Plan:
    """Numbers of chunks of the two passes, a key of STRATEGIES, and the backward pass's order.

    The weight gradients of chunk i are computed after the input gradients of chunk i + `weight_lag` (or the last one):
    0 holds least memory, `backward_degree` - 1 sends all input gradients first.
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
    """How one pass of a plan runs, "forward" or "backward"."""

    name: str
    degree: int
    memory_strategy: str
    weight_lag: int = 0


def pass_degrees(plan: Plan, both: bool) -> list[int]:
    """The degrees of a call's passes, once where they are the same; without `both` the forward pass's."""
    return [plan.degree] if plan.degree == plan.backward_degree or not both else [plan.degree, plan.backward_degree]


def pass_plans(plan: Plan) -> tuple[PassPlan, PassPlan]:
    """How the forward pass runs, and the backward pass."""
    strategy = plan.memory_strategy
    backward = PassPlan("backward", plan.backward_degree, strategy, plan.weight_lag)
    return PassPlan("forward", plan.degree, strategy), backward


@dataclass(frozen=True, kw_only=True)
class LayerLoad:
    """What the busiest rank has to do in one call of a layer. All ranks must plan with the same numbers."""

    tokens: int  # of one rank, before dispatch
    rows: int  # unique (token, rank) rows sent or received, whichever is more, the rank's own included
    away_rows: int  # those of them that travel
    assignments: int  # of a row and an expert, computed here
    hidden_size: int  # H
    hidden_columns: int  # G, what goes into the activation function, per assignment: 2 F for SwiGLU
    width: int  # F, what comes out of it
    element_size: int  # bytes per number
    expert_assignments: int = WHOLE  # of the busiest expert
    block: int = WHOLE  # most assignments that go through an expert at once
    tiled: bool = False  # by tiles, whose scratch memory is another
    slot_numbers: int = 0  # in the weights of all copies of experts that a rank may hold
    fetched_bytes: int = 0  # of copies' weights that a rank sends, or gets
    returned_bytes: int = 0  # of copies' gradients

    @property
    def has_copies(self) -> bool:
        """Whether experts may have copies on other ranks."""
        return self.slot_numbers > 0

    def as_dict(self) -> dict[str, int]:
        """The load for plans.jsonl, whose readers know `assignments` as `pairs`."""
        return {name.replace("assignments", "pairs"): value for name, value in asdict(self).items()}
