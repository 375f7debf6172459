"""What whole passes of an MoE layer take beyond what its operations explain: run in a few numbers of chunks, and
timed."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from moe.alltoall.flat import AllToAll
from moe.chunk_plan import Plan
from moe.experts.compute import ExpertCompute
from moe.experts.weights import Slab
from moe.layer import Setting, routed_experts
from moe.planning.costs import LayerCosts, Limits
from moe.planning.load import Shape
from moe.planning.search import best_plan, predict
from parallel.costs import measure
from parallel.costs.models import Curve

DEGREES = (1, 2, 4, 8)  # numbers of chunks in which passes run
MIXED = (4, 2)  # forward and backward, to see what other chunks backward cost
FEWER = ((1, 1), (4, 4), (8, 8))  # run alone where steps are long
STEPS = 3  # of a plan one after the other; the first one makes its buffers
MAX_VISITS = 5
BELIEVED = 0.5  # of what whole passes take beyond the model: few are run, and a disturbed one must not decide

Degrees = tuple[int, int]
Times = dict[Degrees, tuple[list[float], list[float]]]  # seconds of the forward and of the backward passes


class Residuals:
    """A layer whose whole passes are timed for `budget` seconds; all ranks of `group` do it together."""

    def __init__(
        self,
        weights: Slab,
        exchange: AllToAll,
        group: dist.ProcessGroup | None,
        shape: Shape,
        experts: ExpertCompute,
        budget: float,
    ) -> None:
        self.weights, self.exchange, self.group, self.shape = weights, exchange, group, shape
        self.experts, self.budget, self.device = experts, budget, weights.fc1.device

    def measure(self, known: LayerCosts) -> dict[str, Any]:
        """What passes take beyond what `known` predicts, at some numbers of chunks, as fields of LayerCosts."""
        load = self.shape.even()
        alone = replace(known, shared_forward=0.0, shared_backward=0.0)
        limits = Limits(strategies=("keep",))
        best = {
            (r, r): best_plan(alone, load, replace(limits, degrees=(r,), backward_degrees=(r,))).plan for r in DEGREES
        }
        best[MIXED] = replace(best[MIXED[1], MIXED[1]], degree=MIXED[0])
        best = {degrees: plan for degrees, plan in best.items() if max(degrees) <= max(load.tokens, 1)}
        expected = {degrees: predict(alone, load, plan) for degrees, plan in best.items()}
        seconds = {degrees: prediction.forward + prediction.backward for degrees, prediction in expected.items()}
        some = {degrees: plan for degrees, plan in best.items() if degrees in FEWER}
        if STEPS * sum(seconds.values()) <= self.budget:
            times = self._time_plans(best)
        elif STEPS * sum(seconds[degrees] for degrees in some) <= self.budget:
            times = self._time_plans(some)
        else:
            return {}
        rest = {}
        for degrees, (forwards, backwards) in times.items():
            of = expected[degrees]
            rest[degrees] = [
                BELIEVED * (statistics.median(of_pass) - predicted)
                for of_pass, predicted in ((forwards, of.forward), (backwards, of.backward))
            ]
        same = [degrees[0] for degrees in rest if degrees != MIXED]
        forward, backward = (
            _rising_on(Curve(tuple(map(float, same)), tuple(rest[r, r][i] for r in same))) for i in (0, 1)
        )
        mixed = sum(rest[MIXED]) - forward(MIXED[0]) - backward(MIXED[1]) if MIXED in rest else 0.0
        return {"forward_rest": forward, "backward_rest": backward, "mixed_rest": max(mixed, 0.0)}

    def _time_plans(self, plans: dict[Degrees, Plan]) -> Times:
        """Both passes of the plans, which take turns."""
        shape, dtype = self.shape, self.weights.fc1.dtype
        generator = torch.Generator().manual_seed(self.exchange.rank)
        drawn = torch.rand(shape.tokens, shape.num_experts, generator=generator)
        routing = torch.zeros_like(drawn, dtype=torch.bool).scatter_(1, drawn.topk(shape.top_k).indices, True)
        routing = routing.to(self.device)
        rows = torch.randn(shape.tokens, shape.hidden_size, device=self.device).to(dtype)
        tensors = rows, routing.to(dtype), self.weights.fc1.detach(), self.weights.fc2.detach()
        x, probs, fc1, fc2 = (tensor.view_as(tensor).requires_grad_() for tensor in tensors)
        weights, output_grad = replace(self.weights, fc1=fc1, fc2=fc2), torch.ones_like(x)

        def step(plan: Plan) -> list[float]:
            outputs: list[torch.Tensor] = []

            def forward() -> None:
                with torch.enable_grad():
                    setting = Setting(self.exchange, assignments_per_token=shape.top_k, experts=self.experts)
                    outputs.append(routed_experts(x, probs, routing, weights, plan, setting))

            def backward() -> None:
                torch.autograd.grad(outputs, [x, probs, fc1, fc2], [output_grad])

            return [measure.time_call(call, self.device) for call in (forward, backward)]

        begin = time.perf_counter()
        times: Times = {degrees: ([], []) for degrees in plans}
        for visit in range(1, MAX_VISITS + 1):
            for degrees, plan in plans.items():
                step(plan)
                for _ in range(STEPS - 1):
                    measure.max_over_ranks([0.0], self.device, self.group)  # ranks start together
                    slowest = measure.max_over_ranks(step(plan), self.device, self.group)
                    for of_pass, seconds in zip(times[degrees], slowest, strict=True):
                        of_pass.append(seconds)
            (spent,) = measure.max_over_ranks([time.perf_counter() - begin], self.device, self.group)
            if spent * (visit + 1) / visit > self.budget:
                break
        return times


def _rising_on(curve: Curve) -> Curve:
    """The curve with a point more, beyond which it does not fall."""
    sizes, seconds = curve.sizes, curve.seconds
    return Curve((*sizes, 2 * sizes[-1]), (*seconds, max(seconds[-1], curve(2 * sizes[-1]))))
