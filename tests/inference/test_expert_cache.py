"""The policy of the cache of experts: what it knows of the cycle, of protected and expected experts; and that it is not
below LRU and LFU on made-up and on recorded routing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.speed.expert_caches import POLICIES, num_hits
from inference.weights.expert_cache import ExpertUses
from inference.weights.routing_file import read_routing
from tests.inference.made_routing import KINDS, made

pytestmark = pytest.mark.fast

RECORDINGS = Path(__file__).resolve().parents[2] / "benchmarks" / "traces" / "routing"
SEEDS = range(2)
# Of the experts that are needed. Where caches are alike, as where they hold nearly all, chance decides over some hits.
CHANCE = 0.012
CHANCE_OF_ALL = 0.003  # over the seeds


def run(uses: ExpertUses, layer: int, *experts: int, admit: bool = True) -> None:
    """One token's choice in one layer, all of it cached from then on."""
    uses.used(layer, dict.fromkeys(experts, 1))
    for expert in experts if admit else ():
        uses.admit(layer, expert)


def test_the_layer_that_has_just_run_goes_first() -> None:
    uses = ExpertUses([2, 4, 7], 4, 1)
    for layer in (2, 4, 7):
        run(uses, layer, 0)
    assert uses.victims(3) == [(7, 0), (4, 0), (2, 0)]  # LRU: the other way round
    run(uses, 2, 0)
    assert uses.victims(1) == [(2, 0)]


def test_what_is_used_often_stays() -> None:
    uses = ExpertUses([0, 1], 8, 2)
    for number in range(12):
        run(uses, 0, 0, 1 + number % 7)
        run(uses, 1, 3, 0 if number < 6 else 7)
    assert len(uses) == 8 + 3
    gone = uses.victims(8)
    assert (0, 0) not in gone and (1, 3) not in gone and (1, 7) not in gone
    assert uses.victims(len(uses))[-1] in [(0, 0), (1, 3)]


def test_counts_age() -> None:
    uses = ExpertUses([0], 4, 1)
    for expert in [0] * 40 + [1] * 15:
        run(uses, 0, expert)
    assert uses.victims(1) == [(0, 0)]  # LFU: expert 1


def test_protected_ones_are_no_victims_and_victims_stay_until_dropped() -> None:
    uses = ExpertUses([0, 1], 4, 2)
    run(uses, 0, 0, 1)
    run(uses, 1, 2, 3)
    every = uses.victims(9)
    assert sorted(every) == [(0, 0), (0, 1), (1, 2), (1, 3)] and len(uses) == 4
    assert uses.victims(9) == every  # asking changes nothing
    for protected in ([(1, 2), (1, 3)], [every[0]], every, [(0, 2)]):
        assert uses.victims(9, protected) == [one for one in every if one not in protected]
    assert uses.victims(0) == []
    uses.drop(*every[0])
    assert every[0] not in uses and every[1] in uses and len(uses) == 3
    assert uses.victims(9) == every[1:]
    uses.admit(*every[0])
    assert uses.victims(9) == every


def test_expected_ones_stay_until_their_layer_has_run() -> None:
    uses = ExpertUses([0, 1, 2], 6, 1)
    for _ in range(3):
        for layer in (0, 1, 2):
            run(uses, layer, 0)
    run(uses, 0, 0)
    uses.expect(1, [4, 5])
    uses.admit(1, 4)  # fetched ahead, never used so far
    assert uses.victims(9)[-1] == (1, 4) and (1, 4) not in uses.victims(3)
    run(uses, 1, 0)  # the prediction was wrong
    assert uses.victims(1) == [(1, 4)]


def test_a_prompt_keeps_what_its_later_layers_will_use() -> None:
    uses = ExpertUses([0, 1, 2, 3], 4, 1)
    for _ in range(10):
        for layer in range(4):
            run(uses, layer, 0)
    for layer in range(4):
        for expert in (1, 2, 3):
            uses.admit(layer, expert)
    uses.used(0, dict.fromkeys(range(4), 10))  # 40 tokens: all experts of every layer to come
    needed = [(0, expert) for expert in range(4)]
    assert uses.victims(3, needed) == [(3, 1), (3, 2), (3, 3)]  # farthest first
    uses.used(1, dict.fromkeys(range(4), 10))
    needed = [(1, expert) for expert in range(4)]
    assert {layer for layer, _ in uses.victims(3, needed)} == {0}  # decoding hardly uses them


def test_what_follows_a_prompt_is_decoding() -> None:
    uses = ExpertUses([0, 1], 4, 1)
    uses.used(0, {0: 97, 1: 1, 2: 1, 3: 1})
    uses.used(1, {0: 50, 1: 50})
    for layer, expert in ((0, 0), (0, 1), (1, 0), (1, 1)):
        uses.admit(layer, expert)
    assert uses.victims(1) == [(0, 1)]  # the next prompt would use it before layer 1 runs again


@pytest.mark.parametrize("top_k", [1, 3])
def test_a_cache_of_any_size_holds_what_it_may(top_k: int) -> None:
    """Also one that is smaller than what a layer needs, where nothing but what has been used can go."""
    recording = made("batch", 0, num_layers=2, num_experts=6, top_k=top_k, num_passes=12)
    for num_slots in (1, 2, 5, 11, 12, 100):
        uses = ExpertUses(recording.header.layers, 6, top_k)
        cached: set[tuple[int, int]] = set()
        for visit in recording.visits:
            uses.used(visit.layer, visit.counts)
            needed = [(visit.layer, expert) for expert in visit.counts]
            for key in needed:
                if key in cached:
                    continue
                if len(cached) == num_slots:
                    (gone,) = uses.victims(1, needed) or uses.victims(1)
                    uses.drop(*gone)
                    cached.remove(gone)
                cached.add(key)
                uses.admit(*key)
            assert len(uses) == len(cached) <= num_slots and all(key in uses for key in cached)


def test_extreme_routing_stays_finite() -> None:
    uses = ExpertUses([0], 2, 2)
    with np.errstate(all="raise", under="ignore"):
        for num_tokens in (1, 1000, 1, 1, 500, 1):
            uses.used(0, {0: num_tokens, 1: num_tokens})
        one = ExpertUses([0, 1], 300, 1)
        for number in range(400):
            run(one, number % 2, 0 if number < 300 else number % 300)
    uses.admit(0, 1)
    assert uses.victims(2) == [(0, 1)]
    assert len(one.victims(1)) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_hits_are_not_below_lru_and_lfu(kind: str) -> None:
    recordings = [made(kind, seed) for seed in SEEDS]
    needed = np.array([sum(len(visit.counts) for visit in recording.visits) for recording in recordings])
    for num_slots in (5, 24, 48, 72):  # of 96
        hits = {
            name: np.array(
                [num_hits(recording.visits, num_slots, POLICIES[name](recording)) for recording in recordings]
            )
            for name in ("ours", "LRU", "LFU", "Belady")
        }
        better = np.maximum(hits["LRU"], hits["LFU"])
        assert (hits["ours"] >= better - CHANCE * needed).all(), (num_slots, hits)
        if num_slots in (24, 48):
            assert hits["ours"].sum() >= better.sum() - CHANCE_OF_ALL * needed.sum(), (num_slots, hits)
        assert all((hits["Belady"] >= found).all() for found in hits.values()), (num_slots, hits)


@pytest.mark.parametrize("path", sorted(RECORDINGS.glob("*.jsonl.gz")), ids=lambda path: path.stem)
def test_hits_of_recordings_are_not_below_lru_and_lfu(path: Path) -> None:
    recording = read_routing(path)
    num_slots = len(recording.header.layers) * recording.header.num_experts // 4
    hits = {name: num_hits(recording.visits, num_slots, POLICIES[name](recording)) for name in ("ours", "LRU", "LFU")}
    ours, lru, lfu = hits.values()
    assert (
        ours >= max(lru, lfu) - 5
    )  # of thousands: the last bit of a product may decide between experts that are alike


@pytest.mark.parametrize(
    ("kind", "other", "least"), [("local", "LFU", 0.35), ("skewed", "LRU", 0.1), ("prompts", "LRU", 0.08)]
)
def test_one_of_both_is_far_below(kind: str, other: str, least: float) -> None:
    """Where only recency or only frequency tells something, the cache of the other kind falls behind ours."""
    recording = made(kind, 7)
    needed = sum(len(visit.counts) for visit in recording.visits)
    ours, theirs = (num_hits(recording.visits, 24, POLICIES[name](recording)) for name in ("ours", other))
    assert ours - theirs > least * needed
