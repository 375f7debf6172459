"""A planner for tests: it answers something else at each call, any ranks and any quotas."""

from __future__ import annotations

import contextlib
from unittest import mock

import numpy as np

from configs.schema import Config
from moe.placement.map import Integers, PlacementMap
from moe.placement.quotas import Costs, Limits, check
from tests.training.helpers import Lines, train


class Scattered:
    """The same answers on all ranks that ask alike."""

    def __init__(self) -> None:
        self._calls = 0

    def __call__(self, counts_RE: Integers, placement: PlacementMap, costs: Costs, limits: Limits) -> Integers:
        """Raises AssertionError where the answer is none."""
        self._calls += 1
        generator = np.random.default_rng(self._calls)
        ranks, experts = counts_RE.shape
        quotas_ER, taken = np.zeros((experts, ranks), np.int64), np.zeros(ranks, np.int64)
        for expert in generator.permutation(experts):
            home, may = placement.home_ranks[expert], (taken < limits.slots) & (generator.random(ranks) < 0.6)
            hosts = [rank for rank in range(ranks) if rank == home or may[rank]]
            taken[[rank for rank in hosts if rank != home]] += 1
            parts = generator.dirichlet(np.ones(len(hosts)))
            quotas_ER[expert, hosts] = generator.multinomial(counts_RE[:, expert].sum(), parts)
        check(quotas_ER, counts_RE, placement, limits)
        return quotas_ER


def train_on_rank(config: Config, scattered: bool) -> Lines:
    """Train, every call planned by the planner that changes its mind if `scattered`."""
    with contextlib.ExitStack() as patches:
        if scattered:
            patches.enter_context(mock.patch.dict("moe.placement.policy.POLICIES", {"solve": Scattered()}))
        return train(config)
