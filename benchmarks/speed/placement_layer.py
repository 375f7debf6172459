"""The rank program of placement_step.py: one MoE layer with the routing of a given load, and its steps per planner."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.kit.accelerator import VirtualAccelerator, step_flops
from benchmarks.kit.workloads import Size, counts
from benchmarks.planners import PLANNERS, Entry
from moe.alltoall.flat import FlatAllToAll
from moe.chunk_plan import Plan
from moe.experts.compute import ExpertCompute
from moe.experts.weights import Slab
from moe.layer import Setting, routed_experts
from moe.placement.live import LayerPlacement
from moe.placement.quotas import Costs, ReplicaLimits
from moe.placement_map import Integers, PlacementMap

TRIPS = 2  # of a copy: its weights, and its gradient
REPLICA_SLOTS, EXPERTS_PER_RANK, TOP_K, HIDDEN, WIDTH = 2, 8, 2, 64, 128
TOKENS, MICRO_BATCHES, CAPACITY = 4096, 4, 1.25
SECONDS_PER_ASSIGNMENT = 25e-6  # of the virtual accelerator, both passes
CONTIGUOUS, BITWISE, BLOCK_ROWS = "contiguous", "bitwise", 256  # ways of a variant
IDEAL, STATIC, DROPS = "ideal", "static", "capacity 1.25"


@dataclass(frozen=True)
class Case:
    ranks: int
    load: str
    steps: int = 1  # that are one measurement
    degree: int = 1
    seconds: float | None = SECONDS_PER_ASSIGNMENT  # None: computed in earnest
    tokens: int = TOKENS
    width: int = WIDTH
    micro_batches: int = MICRO_BATCHES
    # What a copy's weights and gradient take of a micro-batch's computation; it sets the width.
    share: float | None = None

    @property
    def name(self) -> str:
        degree = f", degree {self.degree}" if self.degree > 1 else ""
        replicas = "" if self.share is None else f", copy {self.share:.0%}, {self.micro_batches} micro-batches"
        return f"{self.ranks} ranks, {self.load}{degree}{'' if self.seconds else ', real'}{replicas}"

    def at_rate(self, bytes_per_second: float) -> Case:
        """The case with experts as wide as its share asks for over links of this rate."""
        if self.share is None or self.seconds is None:
            return self
        num_bytes = self.share * self.seconds * self.tokens * TOP_K * bytes_per_second
        return replace(self, width=max(8, round(num_bytes / (TRIPS * 4 * 3 * HIDDEN) / 8) * 8))


class _Timed:
    """A planner whose time is counted."""

    def __init__(self, entry: Entry) -> None:
        self.entry, self.seconds = entry, 0.0

    def __call__(self, counts_RE: Integers, placement: PlacementMap, costs: Costs, limits: ReplicaLimits) -> Integers:
        start = time.perf_counter()
        quotas_ER = self.entry.plan(counts_RE, placement, costs, limits)
        self.seconds += time.perf_counter() - start
        return quotas_ER


class _Layer:
    def __init__(self, case: Case, costs: Costs) -> None:
        self.case, self.costs = case, costs
        self.rank, ranks = dist.get_rank(), case.ranks
        generator, size = torch.Generator().manual_seed(self.rank), self._size()
        self.num_experts = size.experts
        self.x = torch.randn(case.tokens, HIDDEN, generator=generator).requires_grad_()
        self.output_grad = torch.randn(case.tokens, HIDDEN, generator=generator)
        shapes = (EXPERTS_PER_RANK, 2 * case.width, HIDDEN), (EXPERTS_PER_RANK, HIDDEN, case.width)
        fc1, fc2 = (torch.nn.Parameter(torch.randn(shape, generator=generator) * 0.02) for shape in shapes)
        self.weights = Slab(fc1, fc2, None, None, "swiglu")
        self.probs = torch.rand(case.tokens, self.num_experts, generator=generator).requires_grad_()
        self.exchange = FlatAllToAll(dist.group.WORLD)
        self.experts: ExpertCompute = ExpertCompute()
        if case.seconds is not None:
            self.experts = VirtualAccelerator(step_flops(1, HIDDEN, case.width) / case.seconds)
            torch.set_flush_denormal(True)
        drawn = [step_LMRE[0] for step_LMRE in counts(case.load, size, case.steps)]
        self.counts = [[of_call[self.rank] for of_call in step] for step in drawn]
        self.maps = [[self._map(counts_E) for counts_E in step] for step in self.counts]
        even_E = np.full(self.num_experts, case.tokens * TOP_K // self.num_experts)
        self.even = [[self._map(even_E)] * size.micro_batches] * case.steps
        self.placements: dict[str, tuple[LayerPlacement, _Timed]] = {}
        for name, entry in PLANNERS.items():
            planner = _Timed(entry)
            limits = ReplicaLimits(EXPERTS_PER_RANK if entry.own_slots else REPLICA_SLOTS, ranks)
            group = dist.group.WORLD
            assert group is not None
            self.placements[name] = LayerPlacement(group, self.num_experts, planner, costs, limits), planner

    def _size(self) -> Size:
        case = self.case
        return Size(case.ranks, EXPERTS_PER_RANK * case.ranks, TOP_K, case.tokens, case.micro_batches)

    def _map(self, counts_E: Integers) -> torch.Tensor:
        """[tokens, experts]: so many tokens for each expert, in no order; each token has TOP_K different ones."""
        experts = torch.from_numpy(np.repeat(np.arange(self.num_experts), counts_E))
        tokens = torch.randperm(self.case.tokens, generator=torch.Generator().manual_seed(self.rank))
        chosen = torch.zeros(self.case.tokens, self.num_experts, dtype=torch.bool)
        chosen[tokens[torch.arange(len(experts)) % self.case.tokens], experts] = True
        return chosen

    def dropped(self, routing_map: torch.Tensor) -> torch.Tensor:
        most = int(CAPACITY * self.case.tokens * TOP_K / self.num_experts)
        return routing_map & (routing_map.cumsum(0) <= most)

    def run(self, variant: str) -> dict[str, float]:
        name, _, way = variant.partition(", ")
        placement, planner = self.placements.get(name, (None, None))
        if name == STATIC:
            placement = None
        weights = replace(self.weights, block_rows=BLOCK_ROWS if way == BITWISE else None)
        if placement is not None:
            placement.block_rows = weights.block_rows
        plan = Plan(self.case.degree, self.case.degree)
        steps = self.even if name == IDEAL else self.maps
        if name == DROPS:
            steps = [[self.dropped(each) for each in step] for step in steps]
        if planner is not None:
            planner.seconds = 0.0
        dist.barrier()
        patch = mock.patch("moe.placement.live.interleave", lambda codes, shares_ER: None)
        if way == CONTIGUOUS:
            patch.start()
        start = time.perf_counter()
        for step in steps:
            for number, routing_map in enumerate(step):
                if placement is not None and (number == 0 or not PLANNERS[name].keeps):
                    placement.begin_passes(len(step) if PLANNERS[name].keeps else 1)
                for tensor in (self.x, self.probs, self.weights.fc1, self.weights.fc2):
                    tensor.grad = None
                output = routed_experts(
                    self.x,
                    self.probs,
                    routing_map,
                    weights,
                    plan,
                    Setting(
                        self.exchange,
                        assignments_per_token=None if name == DROPS else TOP_K,
                        experts=self.experts,
                        placement=placement,
                    ),
                )
                output.backward(self.output_grad)
        seconds = time.perf_counter() - start
        if way == CONTIGUOUS:
            patch.stop()
        return {"step": seconds, "planning": 0.0 if planner is None or placement is None else planner.seconds}


_layer: _Layer | None = None


def build(case: Case, costs: Costs) -> dict[str, float]:
    """Make this rank's layer: the load's max/mean, and what capacity drops here."""
    global _layer
    dist.barrier()
    _layer = _Layer(case, costs)
    placement = PlacementMap(_layer.num_experts, case.ranks)
    ratios = []
    for step in counts(case.load, _layer._size(), case.steps):
        for counts_RE in step[0]:
            loads_R = np.bincount(placement.primary_ranks, counts_RE.sum(0))
            ratios.append(float(loads_R.max() / loads_R.mean()))
    maps = [each for step in _layer.maps for each in step]
    kept = sum(int(_layer.dropped(each).sum()) for each in maps) / sum(int(each.sum()) for each in maps)
    return {"ratio": float(np.mean(ratios)), "dropped": 1 - kept}


def run(variant: str) -> dict[str, float]:
    """One measurement on this rank."""
    assert _layer is not None, "build comes first"
    return _layer.run(variant)
