"""An MoE layer as a plain loop over tokens, and the cases and plans that ours is compared with it on."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch.nn import functional as F

from moe.alltoall.flat import AllToAll
from moe.chunk_plan import STRATEGIES, Plan
from moe.experts.blocks import hidden_factor
from moe.experts.weights import Slab
from moe.layer import Setting, routed_experts
from moe.placement.live import LayerPlacement
from moe.schedule.over_ranks import SharedExpert
from tests.tolerances import MOE

HIDDEN, WIDTH = 8, 12  # rows of a multiple of 16 bytes in fp32, which grouped products need
ROUTINGS = ("balanced", "skewed", "empty_experts", "one_expert", "dropped")
TOP_K = (1, 2, 4, 8)
DEGREES = [(degree, degree) for degree in range(1, 9)] + [(1, 3), (4, 1), (3, 2), (2, 6)]  # forward, backward


@dataclass(frozen=True)
class Case:
    """One problem: sizes, routing and what computes it."""

    num_tokens: int = 13  # per rank
    num_experts: int = 8
    top_k: int = 2
    routing: str = "balanced"
    activation: str = "swiglu"
    bias: bool = False
    shared: bool = False
    dtype: torch.dtype = torch.float64
    hidden: int = HIDDEN
    width: int = WIDTH


@dataclass
class Problem:
    """Tensors of a case for one rank's tokens; the weights are those of all experts and the same on every rank."""

    x: torch.Tensor
    probs: torch.Tensor
    routing_map: torch.Tensor
    output_grad: torch.Tensor
    parameters: list[torch.Tensor]  # fc1, fc2, then the two biases if there are any
    shared: list[torch.Tensor]


def routing_map(case: Case, generator: torch.Generator) -> torch.Tensor:
    """[T, E] bool. `dropped` leaves some tokens fewer experts, and one none."""
    num_tokens, num_experts = case.num_tokens, case.num_experts
    scores = torch.rand(num_tokens, num_experts, generator=generator)
    if case.routing == "skewed":
        scores -= torch.linspace(0, 1.5, num_experts)
    elif case.routing == "empty_experts":
        scores[:, : num_experts - case.top_k] -= 2.0 * (torch.arange(num_experts - case.top_k) % 2 == 0)
    elif case.routing == "one_expert":
        scores[:, num_experts - 1] += 2.0
        scores[:, : num_experts - case.top_k] -= 2.0
    chosen = torch.zeros(num_tokens, num_experts, dtype=torch.bool).scatter_(
        1, scores.topk(case.top_k, dim=1).indices, True
    )
    if case.routing == "dropped" and num_tokens:
        chosen &= torch.rand(num_tokens, num_experts, generator=generator) < 0.6
        chosen[num_tokens // 2] = False
    return chosen


def problem(case: Case, rank: int = 0) -> Problem:
    """The tensors of a rank, drawn by the case alone: rounded to its dtype, so that the loop sees the same numbers."""
    weights = torch.Generator().manual_seed(1)
    tokens = torch.Generator().manual_seed(100 + rank)
    num_experts, hidden, width = case.num_experts, case.hidden, case.width
    outer, smaller = hidden_factor(case.activation) * width, 2 * (hidden / HIDDEN) ** 0.5

    def draw(generator: torch.Generator, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(case.dtype)

    parameters = [
        draw(weights, num_experts, outer, hidden) / smaller,
        draw(weights, num_experts, hidden, width) / smaller,
    ]
    if case.bias:
        parameters += [draw(weights, num_experts, outer), draw(weights, num_experts, hidden)]
    shared = [draw(weights, width, hidden), draw(weights, hidden, width)] if case.shared else []
    wide = case.dtype if case.dtype is torch.float64 else torch.float32  # the router's
    probs = draw(tokens, case.num_tokens, num_experts).abs().to(wide)
    if case.num_tokens:
        probs[0] = 0.0  # a weight of zero still has a gradient
    return Problem(
        draw(tokens, case.num_tokens, hidden),
        probs,
        routing_map(case, tokens),
        draw(tokens, case.num_tokens, hidden),
        parameters,
        shared,
    )


def shared_expert(weights: list[torch.Tensor]) -> SharedExpert | None:
    """A small differentiable function of the tokens."""
    return (lambda x: torch.tanh(x @ weights[0].t()) @ weights[1].t()) if weights else None


def plans(degrees: list[tuple[int, int]] = DEGREES) -> list[Plan]:
    """Every strategy with these degrees, where it allows them; the order of the backward pass takes turns."""
    found: list[Plan] = []
    for (degree, backward), strategy in itertools.product(degrees, STRATEGIES):
        if degree == backward or not STRATEGIES[strategy].offloads:
            found.append(Plan(degree, backward, strategy, weight_lag=len(found) % (backward + 1)))
    return found


def loop(case: Case, given: Problem, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """[output, gradients of x, probs, parameters..., shared...] by a loop over tokens and their experts."""
    tensors = given.x, given.probs, *given.parameters, *given.shared
    leaves = [tensor.detach().clone().to(dtype).requires_grad_() for tensor in tensors]
    x, probs, fc1, fc2, *rest = leaves
    fc1_bias, fc2_bias = rest[:2] if case.bias else (None, None)
    output = x * 0.0  # in the graph also where there are no tokens
    for token in range(case.num_tokens):
        total = output[token]
        for expert in given.routing_map[token].nonzero().flatten().tolist():
            hidden = F.linear(x[token], fc1[expert], None if fc1_bias is None else fc1_bias[expert])
            if case.activation == "swiglu":
                gate, up = hidden.chunk(2)
                hidden = F.silu(gate) * up
            else:
                hidden = F.gelu(hidden, approximate="tanh" if case.activation == "gelu_tanh" else "none")
            total = total + probs[token, expert] * F.linear(
                hidden, fc2[expert], None if fc2_bias is None else fc2_bias[expert]
            )
        output = torch.cat([output[:token], total[None], output[token + 1 :]])
    function = shared_expert(leaves[-2:] if case.shared else [])
    if function is not None:
        output = output + function(x)
    return [output.detach(), *_gradients(output, leaves, given.output_grad.to(dtype))]


def ours(
    case: Case,
    given: Problem,
    plan: Plan,
    exchange: AllToAll | None = None,
    rank: int = 0,
    num_ranks: int = 1,
    placement: LayerPlacement | None = None,
    block_rows: int | None = None,
    strided: bool = False,
) -> list[torch.Tensor]:
    """The same by `routed_experts` on one of `num_ranks` ranks, which holds its part of the experts."""
    num_local = case.num_experts // num_ranks
    local = [parameter[rank * num_local : (rank + 1) * num_local] for parameter in given.parameters]
    leaves = [tensor.detach().clone().requires_grad_() for tensor in (given.x, given.probs, *local, *given.shared)]
    x, probs, fc1, fc2, *rest = leaves
    fc1_bias, fc2_bias = rest[:2] if case.bias else (None, None)
    weights = Slab(fc1, fc2, fc1_bias, fc2_bias, case.activation, block_rows)
    assignments_per_token = None if case.routing == "dropped" else case.top_k
    function = shared_expert(leaves[-2:] if case.shared else [])
    setting = Setting(exchange, function, assignments_per_token, placement=placement, strided=strided)
    output = routed_experts(x, probs, given.routing_map, weights, plan, setting)
    return [output.detach(), *_gradients(output, leaves, given.output_grad)]


def _gradients(output: torch.Tensor, leaves: list[torch.Tensor], output_grad: torch.Tensor) -> list[torch.Tensor]:
    output.backward(output_grad)  # as a training does: the shared expert's gradients come from a graph of its own
    return [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]


def expected_on(case: Case, rank: int, num_ranks: int) -> list[torch.Tensor]:
    """What `ours` should return on a rank: its tokens' values, and its experts' gradients from all ranks' tokens.
    Collective."""
    result = loop(case, problem(case, rank))
    num_local, num_parameters = case.num_experts // num_ranks, 4 if case.bias else 2
    for i in range(3, 3 + num_parameters):
        if num_ranks > 1:
            torch.distributed.all_reduce(result[i])
        result[i] = result[i][rank * num_local : (rank + 1) * num_local]
    return result


def largest_error(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Over all tensors: the largest difference, relative to the tensor's largest value."""
    assert [tensor.shape for tensor in actual] == [tensor.shape for tensor in expected]
    assignments = [(a.double(), e) for a, e in zip(actual, expected, strict=True) if e.numel()]
    return max(
        (((a - e).abs().max() / e.abs().max().clamp_min(1e-30)).item() if e.any() else a.abs().max().item())
        for a, e in assignments
    )


def error_of_norms(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Over all tensors: the norm of the difference, relative to the tensor's norm."""
    assignments = [(a.double(), e) for a, e in zip(actual, expected, strict=True) if e.numel()]
    return max((((a - e).norm() / e.norm()).item() if e.any() else a.norm().item()) for a, e in assignments)


def compared(
    cases: Iterable[tuple[Case, list[Plan]]], exchange: AllToAll | None, rank: int, num_ranks: int
) -> Iterator[tuple[Case, Plan, list[torch.Tensor], list[torch.Tensor]]]:
    """(case, plan, ours, expected) for every case in each of its plans. Collective where there are several ranks."""
    for case, its_plans in cases:
        expected = expected_on(case, rank, num_ranks)
        for plan in its_plans:
            yield case, plan, ours(case, problem(case, rank), plan, exchange, rank, num_ranks), expected


def check_on_ranks(cases: Iterable[tuple[Case, list[Plan]]], exchange: AllToAll) -> float:
    """The largest error as a part of what is allowed; fails at the first that is too large. Collective."""
    worst = 0.0
    for case, plan, actual, expected in compared(cases, exchange, torch.distributed.get_rank(), exchange.size):
        # In bf16 single elements are off by more, the plain loop's too: docs/decisions/error-tolerances-by-norm.md.
        measure = error_of_norms if case.dtype is torch.bfloat16 else largest_error
        error, allowed = measure(actual, expected), MOE[str(case.dtype).removeprefix("torch.")]
        assert error < allowed, (case, plan, error)
        worst = max(worst, error / allowed)
    return worst


def with_dtype(case: Case, name: str) -> Case:
    """The case in another dtype, by its name."""
    return replace(case, dtype=getattr(torch, name))
