"""What the emulated cluster's steps stand on: collectives, the virtual accelerator, routers that choose evenly."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.distributed as dist

from benchmarks.kit import full_duplex
from benchmarks.kit.emulated_cases import CASES, RATES
from benchmarks.kit.virtual_device import even_choice, pairs
from tests.distributed import run


@pytest.mark.fast
def test_half_of_the_cases_is_of_kinds_that_nothing_is_fitted_to() -> None:
    assert len(CASES) == len({case.name for case in CASES}) == 40
    fitted, others = ({case.kind for case in CASES if case.is_fitted is half} for half in (True, False))
    assert not fitted & others
    assert Counter(case.is_fitted for case in CASES) == {True: 20, False: 20}
    assert {case.rate for case in CASES} == set(RATES) and {case.ranks for case in CASES} == {2, 4}


@pytest.mark.fast
def test_every_case_is_a_legal_config() -> None:
    for case in CASES:
        training = case.setting.config(case.ranks).training
        assert training.global_batch_size % training.micro_batch_size == 0, case.name


@pytest.mark.fast
@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_each_expert_is_chosen_as_often(top_k: int) -> None:
    chosen = even_choice(64, 8).topk(top_k, dim=1).indices
    assert torch.bincount(chosen.flatten(), minlength=8).tolist() == [8 * top_k] * 8


@pytest.mark.fast
def test_pairs_are_those_that_a_mask_leaves() -> None:
    for queries, keys in ((5, 5), (3, 7), (7, 3)):
        assert pairs(queries, keys, False) == queries * keys
        assert pairs(queries, keys, True) == torch.ones(queries, keys).tril().sum()


def collectives(seed: int) -> int:
    """Compare with gloo's; how many were compared."""
    import parallel.megatron  # noqa: F401

    size, rank, compared = dist.get_world_size(), dist.get_rank(), 0
    generator = torch.Generator().manual_seed(seed + rank)
    for numbers in (5, 4096 * size, 100_003):
        x, whole = torch.randn(numbers, generator=generator), torch.randn(numbers * size, generator=generator)
        pairs_of_results = []
        for operation in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.AVG):
            theirs, ours = x.clone(), x.clone()
            dist.all_reduce(theirs, operation)
            pending = full_duplex.all_reduce(ours, operation, async_op=numbers > 5)
            if pending is not None:
                pending.wait()
            pairs_of_results.append((ours, theirs))
        theirs, ours = torch.empty(numbers), torch.empty(numbers)
        dist.reduce_scatter_tensor(theirs, whole)
        full_duplex.reduce_scatter_tensor(ours, whole)
        pairs_of_results.append((ours, theirs))
        theirs, ours = torch.empty_like(whole), torch.empty_like(whole)
        dist.all_gather_into_tensor(theirs, x)
        full_duplex.all_gather_into_tensor(ours, x)
        pairs_of_results.append((ours, theirs))
        for ours, theirs in pairs_of_results:
            torch.testing.assert_close(ours, theirs)
            compared += 1
    full_duplex.forget(set())
    return compared


@pytest.mark.parametrize("ranks", [2, 4])
def test_collectives_give_what_gloo_gives(ranks: int) -> None:
    assert run(collectives, ranks, 7) == [15] * ranks
