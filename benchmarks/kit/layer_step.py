"""A rank's side of benchmarks of one MoE layer on a cluster: builds the layer once, then times steps of it in any plan.

The layer has no router: tokens go to experts evenly, each to `top_k` ranks, so that every rank sends and receives as
much as every other, and a chunk as much as every other chunk.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.kit import link
from benchmarks.kit.accelerator import VirtualAccelerator, VirtualExperts
from moe.alltoall.flat import FlatAllToAll, Handle, SplitSizes
from moe.chunk_plan import LayerLoad, Plan
from moe.experts.compute import ExpertCompute
from moe.experts.weights import Slab
from moe.layer import Setting, routed_experts
from moe.planning.costs import LayerCosts
from moe.planning.layer_measurement import BUDGET, measure_costs
from moe.planning.load import Shape

MEGATRON, EXCHANGES, IN_TURN = "megatron", "exchanges", "in turn"


@dataclass(frozen=True)
class Case:
    """One layer. `tokens`: per rank; `flops_per_second`: rate of a virtual accelerator, None for real computation."""

    tokens: int
    hidden: int
    width: int
    top_k: int
    experts_per_rank: int
    flops_per_second: float | None = None


class _Blocking(FlatAllToAll):
    """The same exchanges, each finished before anything else happens: what a layer without any overlap does."""

    def expect(self, buffer: torch.Tensor, split_sizes: SplitSizes) -> Handle:
        return _BlockingHandle(super().expect(buffer, split_sizes))


class _BlockingHandle:
    def __init__(self, handle: Handle) -> None:
        self._handle = handle

    def send(self, token_rows: torch.Tensor, own: bool = True) -> None:
        self._handle.send(token_rows, own)
        self._received = self._handle.wait()
        self._handle.finish()

    def wait(self) -> torch.Tensor:
        return self._received

    def finish(self) -> None:
        self._handle.finish()


class _Layer:
    def __init__(self, case: Case) -> None:
        self.case, self.size, self.rank = case, dist.get_world_size(), dist.get_rank()
        self.num_experts = case.experts_per_rank * self.size
        generator = torch.Generator().manual_seed(self.rank)
        self.x = torch.randn(case.tokens, case.hidden, generator=generator).requires_grad_()
        self.output_grad = torch.randn(case.tokens, case.hidden, generator=generator)
        self.routing_map = routing_map(case, self.size)
        self.probs = (torch.rand(self.routing_map.shape, generator=generator) * self.routing_map).requires_grad_()
        shapes = (case.experts_per_rank, 2 * case.width, case.hidden), (case.experts_per_rank, case.hidden, case.width)
        fc1, fc2 = (torch.nn.Parameter(torch.randn(shape, generator=generator) * 0.02) for shape in shapes)
        self.weights = Slab(fc1, fc2, None, None, "swiglu")
        self.exchange, self.blocking = FlatAllToAll(dist.group.WORLD), _Blocking(dist.group.WORLD)
        speed = case.flops_per_second
        self.experts = ExpertCompute() if speed is None else VirtualAccelerator(speed)
        self.megatron: Any = None
        # What a virtual accelerator leaves in its buffers is added up all the same, which must not be slower than
        # numbers are.
        torch.set_flush_denormal(case.flops_per_second is not None)

    def forward(self, what: Plan | str) -> torch.Tensor:
        if what == MEGATRON:
            return self._forward_by_megatron()
        plan, exchange = (Plan(), self.blocking) if isinstance(what, str) else (what, self.exchange)
        return routed_experts(
            self.x,
            self.probs,
            self.routing_map,
            self.weights,
            plan,
            Setting(exchange, assignments_per_token=self.case.top_k, experts=self.experts),
        )

    def _forward_by_megatron(self) -> torch.Tensor:
        if self.megatron is None:
            self.megatron = _megatron_layer(self)
        return self.megatron(self.x.view(self.case.tokens, 1, self.case.hidden))[0].view_as(self.x)

    def clear(self) -> None:
        parameters = [] if self.megatron is None else list(self.megatron.parameters())
        for tensor in (self.x, self.probs, self.weights.fc1, self.weights.fc2, *parameters):
            tensor.grad = None


_layer: _Layer | None = None


def routing_map(case: Case, num_ranks: int) -> torch.Tensor:
    """[tokens, experts] bool: token t goes to `top_k` (1 or 2) different ranks, evenly in any chunk of the tokens."""
    if case.top_k not in (1, 2):
        raise ValueError(f"top_k={case.top_k}: the benchmark's routing has 1 or 2")
    token = torch.arange(case.tokens)
    first = token % num_ranks
    ranks = [first, (first + 1 + token // num_ranks % (num_ranks - 1)) % num_ranks][: case.top_k]
    chosen = torch.zeros(case.tokens, case.experts_per_rank * num_ranks, dtype=torch.bool)
    local = token // (num_ranks * max(1, num_ranks - 1)) % case.experts_per_rank
    for rank in ranks:
        chosen[token, rank * case.experts_per_rank + local] = True
    return chosen


def build(case: Case) -> int:
    """Build this rank's layer, replacing an earlier one; return the pairs that it computes."""
    global _layer
    dist.barrier()  # nobody is still at work with the earlier one
    _layer = _Layer(case)
    mine = slice(_layer.rank * case.experts_per_rank, (_layer.rank + 1) * case.experts_per_rank)
    counts = _layer.routing_map.sum(dim=0)
    dist.all_reduce(counts)
    return int(counts[mine].sum())


def shape(case: Case, num_ranks: int) -> Shape:
    """Return the sizes of a case's layer in the form of planners."""
    return Shape(
        tokens=case.tokens,
        num_experts=case.experts_per_rank * num_ranks,
        num_ranks=num_ranks,
        top_k=case.top_k,
        hidden_size=case.hidden,
        width=case.width,
        gated=True,
        element_size=4,
    )


def load(case: Case, num_ranks: int) -> LayerLoad:
    """Return the load of a rank: each token goes to `top_k` different ranks, so that no two of its rows are one."""
    num_rows = case.tokens * case.top_k
    return replace(
        shape(case, num_ranks).even(), token_rows=num_rows, away_rows=num_rows * (num_ranks - 1) // num_ranks
    )


def costs(budget: float = BUDGET) -> LayerCosts:
    """Return the planner's costs of this rank's layer, measured now in about `budget` seconds. Collective."""
    layer = _layer
    assert layer is not None, "build comes first"
    sizes = shape(layer.case, layer.size)
    return measure_costs(layer.weights, layer.exchange, dist.group.WORLD, sizes, experts=layer.experts, budget=budget)


def steps(what: Plan | str, repeats: int = 1) -> list[dict[str, float]]:
    """Seconds of one forward and backward pass, each and together: of the second step, as every one of a training but
    the first, and of those that follow.

    `what` is a plan, IN_TURN (degree 1, and nothing at the same time), MEGATRON, or EXCHANGES (those of degree 1
    alone).
    """
    layer = _layer
    assert layer is not None, "build comes first"
    if what == EXCHANGES:
        return [_exchanges(layer)]
    _once(layer, what)  # buffers of the plan's sizes are there now
    return [_once(layer, what) for _ in range(repeats)]


def step(what: Plan | str, repeats: int = 1) -> dict[str, float]:
    """Return the mean seconds of several steps."""
    each = steps(what, repeats)
    return {phase: statistics.fmean(seconds[phase] for seconds in each) for phase in each[0]}


def _once(layer: _Layer, what: Plan | str) -> dict[str, float]:
    dist.barrier()
    layer.clear()
    start = time.perf_counter()
    output = layer.forward(what)
    middle = time.perf_counter()
    output.backward(layer.output_grad)
    end = time.perf_counter()
    return {"forward": middle - start, "backward": end - middle, "together": end - start}


def _exchanges(layer: _Layer) -> dict[str, float]:
    # Rows to each rank at degree 1: all of the tokens that go there at least once.
    to_ranks = layer.routing_map.view(layer.case.tokens, layer.size, -1).any(dim=2).sum(dim=0).tolist()
    one_pass = link.seconds_of_exchanges(to_ranks, layer.case.hidden, 2)
    other_pass = link.seconds_of_exchanges(to_ranks, layer.case.hidden, 2)
    return {"forward": one_pass, "backward": other_pass, "together": one_pass + other_pass}


# ---------------------------------------------------------------------------------------------------------------------
# Megatron-core's layer
# ---------------------------------------------------------------------------------------------------------------------


def start_megatron() -> None:
    """Expert parallelism over all ranks; its all-to-all becomes full duplex, as ours is, so that no gain is an
    artefact."""
    from megatron.core import parallel_state, tensor_parallel

    from parallel.megatron import apply_patches

    if parallel_state.model_parallel_is_initialized():
        return
    apply_patches("cpu")
    parallel_state.initialize_model_parallel(
        expert_model_parallel_size=dist.get_world_size(), expert_tensor_parallel_size=1
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    dist.all_to_all_single = link.all_to_all_single


def _megatron_layer(ours: _Layer) -> Any:
    """Megatron-core's MoELayer (alltoall dispatcher) with the same weights and routing."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    from benchmarks.kit.megatron_layer import fill_experts, megatron_layer

    start_megatron()
    case = ours.case
    config = TransformerConfig(
        num_layers=1,
        hidden_size=case.hidden,
        num_attention_heads=1,
        ffn_hidden_size=case.width,
        moe_ffn_hidden_size=case.width,
        num_moe_experts=ours.num_experts,
        moe_router_topk=case.top_k,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="alltoall",
        activation_func=torch.nn.functional.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        expert_model_parallel_size=ours.size,
        expert_tensor_parallel_size=1,
    )
    layer = megatron_layer(config)
    layer.router.forward = lambda *_, **__: (ours.probs, ours.routing_map)
    fill_experts(layer, ours.weights.fc1, ours.weights.fc2)
    if case.flops_per_second is not None:
        layer.experts = VirtualExperts(case.flops_per_second, layer.experts)
    return layer


def difference() -> float:
    """Return the largest difference of Megatron-core's output and gradients from ours (degree 1), by the largest
    value of each. Collective."""
    from benchmarks.kit.megatron_layer import expert_gradients

    layer = _layer
    assert layer is not None
    results = []
    for what in (Plan(), MEGATRON):
        layer.clear()
        output = layer.forward(what)
        output.backward(layer.output_grad)
        ours = what != MEGATRON
        parameters = [layer.weights.fc1.grad, layer.weights.fc2.grad] if ours else expert_gradients(layer.megatron)
        results.append([output.detach(), layer.x.grad, layer.probs.grad, *parameters])
    return max(float((ours - theirs).abs().max() / ours.abs().max()) for ours, theirs in zip(*results))
