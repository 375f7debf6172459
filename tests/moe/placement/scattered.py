"""Trainings whose experts are placed: a planner that answers something else at each call, any ranks and any quotas, and
what weights a training ends with."""

from __future__ import annotations

import contextlib
import hashlib
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from configs.schema import Config
from moe.experts.module import StackedLinear
from moe.experts.weights import Slab, Weights
from moe.layer import layers_of
from moe.placement.quotas import Costs, ReplicaLimits, check
from moe.placement_map import Integers, PlacementMap
from tests.training.helpers import Lines, train
from training.run import Callback, Run


class Scattered:
    """The same answers on all ranks that ask alike."""

    def __init__(self) -> None:
        self._calls = 0

    def __call__(self, counts_RE: Integers, placement: PlacementMap, costs: Costs, limits: ReplicaLimits) -> Integers:
        """Raises AssertionError where the answer is none."""
        self._calls += 1
        generator = np.random.default_rng(self._calls)
        ranks, experts = counts_RE.shape
        quotas_ER, taken = np.zeros((experts, ranks), np.int64), np.zeros(ranks, np.int64)
        for expert in generator.permutation(experts):
            home, may = (
                placement.primary_ranks[expert],
                (taken < limits.replica_slots) & (generator.random(ranks) < 0.6),
            )
            hosts = [rank for rank in range(ranks) if rank == home or may[rank]]
            taken[[rank for rank in hosts if rank != home]] += 1
            shares = generator.dirichlet(np.ones(len(hosts)))
            quotas_ER[expert, hosts] = generator.multinomial(counts_RE[:, expert].sum(), shares)
        check(quotas_ER, counts_RE, placement, limits)
        return quotas_ER


def train_on_rank(config: Config, scattered: bool) -> tuple[Lines, dict[str, str]]:
    """Train, every call planned by the planner that changes its mind if `scattered`; the lines, and a hash of each
    weight that the ranks end with, of experts one by one."""
    weights = EndWeights()
    with contextlib.ExitStack() as patches:
        if scattered:
            patches.enter_context(mock.patch.dict("moe.placement.policy.POLICIES", {"solve": Scattered()}))
        return train(config, [weights]), weights.hashes


class EndWeights(Callback):
    """A hash of each part of each weight at the end, of experts one by one; the same on all ranks."""

    def __init__(self) -> None:
        self.hashes: dict[str, str] = {}

    def on_end(self, run: Run) -> None:
        here: dict[str, str] = {}
        topology = run.topology
        with run.engine.frozen_weights():
            for number, chunk in enumerate(run.engine.bare_chunks):
                layers = {id(layer.experts) for layer in layers_of([chunk]).values()}
                stage, dense = f"{topology.pipeline.rank}.{number}", f"{topology.tensor.rank}"
                for prefix, module in chunk.named_modules():
                    if id(module) in layers:
                        for name, parameter in module.named_parameters():
                            for expert, weight in zip(module.experts_here(), parameter, strict=True):
                                key = f"{stage} {prefix}.{name} {expert} {topology.expert_tensor.rank}"
                                here[key] = _hash(weight)
                    elif not isinstance(module, StackedLinear):
                        for name, parameter in module.named_parameters(recurse=False):
                            here[f"{stage} {prefix}.{name} {dense}"] = _hash(parameter)
        everywhere: list[dict[str, str]] = [{} for _ in range(topology.world_size)]
        dist.all_gather_object(everywhere, here)
        self.hashes = {name: value for of_rank in everywhere for name, value in of_rank.items()}


def _hash(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().cpu().contiguous().view(torch.uint8).numpy()).hexdigest()


def slab_of(weights: Weights, expert: int) -> tuple[Slab, int]:
    """Return the slab of an expert of this rank, and the expert's index in it."""
    for slab in weights.slabs:
        if expert < len(slab):
            return slab, expert
        expert -= len(slab)
    raise AssertionError(f"{weights.num_experts} experts have no number {expert}")
