"""Made-up routing counts: Megatron-LM's workloads have the histograms of their definition, popularity the skew that was
asked for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.kit.workloads import MEGATRON, POPULARITIES, Size, counts, is_workload, routing
from moe.placement_map import Integers

pytestmark = pytest.mark.fast

SMALL = Size(ranks=4, experts=8, top_k=2, tokens=512, micro_batches=2)
# Of 8 experts top 2: by (workload, step) the assignments of each expert, in 32nds of the tokens. Chosen from a hot pair
# by three tokens of four, an expert has 3/4 + 1/4 * 1/4; of four, 3/4 * 1/2 + 1/16; the others 1/16.
EXPECTED = {
    ("W0", 0): [8] * 8,
    ("W1", 0): [26] * 2 + [2] * 6,
    ("W2", 5): [26] * 2 + [2] * 6,
    ("W3", 0): [14, 2] * 4,
    ("W4", 0): [8] * 8,
    ("W5", 0): [0] * 4 + [16] * 4,
    ("W6", 2): [26] * 2 + [2] * 6,
    ("W6", 3): [2] * 2 + [26] * 2 + [2] * 4,
    ("W6", 13): [26] * 2 + [2] * 6,
    ("W7", 2): [8] * 8,
    ("W7", 3): [20] * 2 + [4] * 6,
}
# What (workload, seed 0, step 3) is in fact, so that nobody changes it unseen.
HISTOGRAMS = {
    "W0": [1024, 1024, 1024, 1024, 1024, 1024, 1024, 1024],
    "W1": [3317, 3328, 251, 236, 291, 250, 264, 255],
    "W2": [3334, 3330, 235, 253, 257, 257, 267, 259],
    "W3": [1787, 257, 1782, 269, 1795, 255, 1798, 249],
    "W4": [988, 1021, 982, 1037, 1057, 1072, 1046, 989],
    "W5": [0, 0, 0, 0, 2083, 2064, 2039, 2006],
    "W6": [256, 250, 3313, 3340, 271, 243, 270, 249],
    "W7": [2562, 2565, 503, 516, 502, 509, 517, 518],
}


def histogram(name: str, step: int) -> Integers:
    return list(counts(name, SMALL, step + 1))[step].sum((0, 1, 2))


@pytest.mark.parametrize(("name", "step"), EXPECTED)
def test_histograms_are_those_of_the_definition(name: str, step: int) -> None:
    found, expected = histogram(name, step) * 32 / 4096, EXPECTED[name, step]
    assert found == pytest.approx(expected, abs=0 if name == "W0" else 0.9)
    assert (found == 0).tolist() == [number == 0 for number in expected]


def test_histograms_stay() -> None:
    assert {name: histogram(name, 3).tolist() for name in MEGATRON} == HISTOGRAMS


@pytest.mark.parametrize("name", MEGATRON)
@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (8, 4), (32, 3), (4, 4)])
def test_a_token_has_different_experts(name: str, experts: int, top_k: int) -> None:
    size = replace(SMALL, experts=experts, top_k=top_k, tokens=16)
    ids = np.sort(routing(name, size, 3), 1)
    assert ids.shape == (128, top_k) and ids.min() >= 0 and ids.max() < experts
    assert (ids[:, 1:] > ids[:, :-1]).all()


@pytest.mark.parametrize("name", MEGATRON)
def test_workload_seed_step_and_nothing_else(name: str) -> None:
    """The same tokens in any layout; other steps and seeds have others, where the workload has any choice."""
    ids = routing(name, SMALL, 3)
    assert (routing(name, replace(SMALL, ranks=2, tokens=1024), 3) == ids).all()
    assert (routing(name, replace(SMALL, ranks=8, micro_batches=1), 3) == ids).all()
    for other in (routing(name, SMALL, 4), routing(name, replace(SMALL, seed=1), 3)):
        assert (other == ids).all() == (name == "W0")


def test_only_the_ragged_workload_has_ranks_with_more_tokens() -> None:
    for name in MEGATRON:
        (step,) = counts(name, SMALL, 1)
        assert step.shape == (1, 2, 4, 8)
        shares = [1, 2, 3, 4] if name == "W4" else [2.5] * 4
        assert step.sum(3)[0].tolist() == [pytest.approx([4096 * share / 10 for share in shares], abs=2)] * 2


@pytest.mark.parametrize("kind", POPULARITIES)
def test_popularity_gives_each_token_its_experts(kind: str) -> None:
    size = replace(SMALL, experts=16, top_k=4, micro_batches=16)
    first, second = counts(kind, size, 2)
    assert (first.sum(3) == 512 * 4).all() and first.max() <= 512 and first.min() >= 0
    again, _ = counts(kind, size, 2)
    assert (first == again).all() and (first != second).any()
    (other,) = counts(kind, replace(size, seed=1), 1)
    assert (first != other).any()
    # from one micro-batch to the next, shares are alike but for bursts and jumps
    shares = np.concatenate([first, second], 1)[0].sum(1) / (4 * 512 * 4)
    change = abs(np.diff(shares, axis=0)).sum(1)
    assert (change.max() > 0.1) == (kind in ("drifting", "bursty", "jumping"))
    assert np.median(change) < 0.3


@pytest.mark.parametrize("ratio", [1.5, 2, 3])
@pytest.mark.parametrize(("ranks", "experts", "top_k"), [(4, 32, 2), (8, 256, 8), (64, 256, 8)])
def test_the_busiest_rank_is_as_busy_as_asked_for(ratio: float, ranks: int, experts: int, top_k: int) -> None:
    size = Size(ranks, experts, top_k, tokens=4096, micro_batches=1)
    (step,) = counts(f"steady@{ratio:g}", size, 1)
    loads = step.sum((0, 1, 2)).reshape(ranks, -1).sum(1)
    assert loads.max() / loads.mean() == pytest.approx(ratio, rel=0.03)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^steady@3: no popularity of 8 experts, top 2, is that unequal on 2 ranks;"):
        list(counts("steady@3", replace(SMALL, ranks=2), 1))
    names = ["W0", "W8", "zipf", "zipf@2", "zipf@1.5", "zipf@", "zipf@x", "Zipf", "W1@2"]
    assert [name for name in names if is_workload(name)] == ["W0", "zipf", "zipf@2", "zipf@1.5"]
