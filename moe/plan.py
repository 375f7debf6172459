"""How one call of an MoE layer runs: what planners decide and the schedule obeys."""

from __future__ import annotations

from dataclasses import dataclass

DEPTH = 2  # chunks that are dispatched before the first is computed, and answers that may be on their way before one is waited for
AHEAD = DEPTH + 1  # chunks whose receive buffers are ready beyond the one that is computed
WHOLE = 2**62  # more pairs than there are: all at once
MAX_IN_FLIGHT = 2 * DEPTH + 2  # exchanges of a pass that may still be sending: bounds the memory of send buffers


@dataclass(frozen=True)
class Strategy:
    """How the backward pass gets back what it needs of each chunk.

    `rows`, the dispatched input: "keep", "communicate" (dispatched again from the layer's own input) or "offload" (to the
    host and back). `hidden`, what goes into the activation function: "keep", "recompute" from the rows, or "offload".
    """

    rows: str
    hidden: str

    @property
    def offloads(self) -> bool:
        """Something comes back from the host, in the forward pass's chunks."""
        return "offload" in (self.rows, self.hidden)


STRATEGIES = {
    "keep": Strategy("keep", "keep"),
    "recompute": Strategy("keep", "recompute"),
    "communicate": Strategy("communicate", "keep"),
    "communicate_recompute": Strategy("communicate", "recompute"),
    "offload": Strategy("offload", "offload"),
    "offload_recompute": Strategy("offload", "recompute"),
    "communicate_offload": Strategy("communicate", "offload"),
}


@dataclass(frozen=True)
class Plan:
    """Numbers of chunks of the two passes, a key of STRATEGIES, and the backward pass's order.

    The weight gradients of chunk i are computed after the input gradients of chunk i + `weight_lag` (or the last one): 0
    holds least memory, `backward_degree` - 1 sends all input gradients first.
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
class Way:
    """How one pass of a plan runs, "forward" or "backward"."""

    name: str
    degree: int
    memory_strategy: str
    weight_lag: int = 0


def ways(plan: Plan) -> tuple[Way, Way]:
    """How the forward pass runs, and the backward pass."""
    strategy = plan.memory_strategy
    return Way("forward", plan.degree, strategy), Way("backward", plan.backward_degree, strategy, plan.weight_lag)


@dataclass(frozen=True, kw_only=True)
class Load:
    """What the busiest rank has to do in one call of a layer. All ranks must plan with the same numbers."""

    tokens: int  # of one rank, before dispatch
    rows: int  # unique (token, rank) rows sent or received, whichever is more, the rank's own included
    away_rows: int  # those of them that travel
    pairs: int  # of a row and an expert, computed here
    hidden_size: int  # H
    hidden_columns: int  # G, what goes into the activation function, per pair: 2 F for SwiGLU
    width: int  # F, what comes out of it
    element_size: int  # bytes per number
    expert_pairs: int = WHOLE  # of the busiest expert
    block: int = WHOLE  # most pairs that go through an expert at once
    tiled: bool = False  # by tiles, whose scratch memory is another
