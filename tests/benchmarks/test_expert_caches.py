"""The hits of expert caches are those of a search through all choices and of plain lists; and the command line."""

from __future__ import annotations

import gzip
import itertools
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.speed import expert_caches
from benchmarks.speed.expert_caches import POLICIES, Key, num_hits
from inference.weights.routing_file import Recording, RoutedLayer, RoutingHeader, RoutingWriter
from tests.inference.made_routing import made

pytestmark = pytest.mark.fast

HEADER = RoutingHeader("small", num_experts=4, top_k=2, layers=(0, 1))


def small(seed: int, top_k: int, num_passes: int = 6) -> Recording:
    """Two layers with four experts; one or two tokens a pass where top_k is 2, else one."""
    rng = np.random.default_rng(seed)
    recording = Recording(replace(HEADER, top_k=top_k))
    for number in range(num_passes):
        for layer in HEADER.layers:
            choices = [tuple(rng.permutation(4)[:top_k].tolist()) for _ in range(1 + seed % top_k)]
            tokens = tuple((row, number) for row in range(len(choices)))
            recording.visits.append(RoutedLayer(number, layer, tokens, tuple(choices)))
    return recording


def best_hits(visits: Sequence[RoutedLayer], num_slots: int) -> int:
    """The most hits of any choice of what stays, by following all caches that can be."""
    caches: dict[frozenset[Key], int] = {frozenset(): 0}
    for visit in visits:
        needed = {(visit.layer, expert) for expert in visit.counts}
        after: dict[frozenset[Key], int] = {}
        for cache, hits in caches.items():
            hits += len(needed & cache)
            every = needed | cache
            for stay in itertools.combinations(sorted(every), min(num_slots, len(every))):
                new = frozenset(stay)
                after[new] = max(after.get(new, 0), hits)
        caches = after
    return max(caches.values())


def by_list(visits: Sequence[RoutedLayer], num_slots: int, rank: Callable[[list[Key], Key], tuple[int, ...]]) -> int:
    """Hits of a cache in which what `rank` puts first goes, of all uses so far and a cached expert."""
    cached: list[Key] = []
    uses: list[Key] = []
    hits = 0
    for visit in visits:
        needed = [(visit.layer, expert) for expert in visit.counts]
        hit = [key for key in needed if key in cached]
        hits += len(hit)
        uses.extend(hit)
        for key in needed:
            if key in hit:
                continue
            if len(cached) == num_slots:
                cached.remove(min(cached, key=lambda one: rank(uses, one)))
            cached.append(key)
            uses.append(key)
    return hits


def last_use(uses: list[Key], key: Key) -> int:
    return len(uses) - uses[::-1].index(key)


RANKS: dict[str, Callable[[list[Key], Key], tuple[int, ...]]] = {
    "LRU": lambda uses, key: (last_use(uses, key),),
    "LFU": lambda uses, key: (uses.count(key), last_use(uses, key)),
}


@pytest.mark.parametrize("top_k", [1, 2])
def test_belady_is_the_best_of_all_choices(top_k: int) -> None:
    for seed, num_slots in itertools.product(range(8), (1, 2, 3, 4, 5, 6, 8)):
        recording = small(seed, top_k)
        hits = {name: num_hits(recording.visits, num_slots, make(recording)) for name, make in POLICIES.items()}
        assert max(hits.values()) == hits["Belady"] == best_hits(recording.visits, num_slots), (seed, num_slots, hits)


@pytest.mark.parametrize("kind", ["words", "batch", "local"])
def test_lru_and_lfu_are_those_of_plain_lists(kind: str) -> None:
    recording = made(kind, 1, num_layers=3, num_experts=8, top_k=2, num_passes=30)
    for num_slots, (name, rank) in itertools.product((1, 3, 8, 12, 20), RANKS.items()):
        assert num_hits(recording.visits, num_slots, POLICIES[name](recording)) == by_list(
            recording.visits, num_slots, rank
        )


def test_fifo_does_not_mind_use() -> None:
    recording = Recording(RoutingHeader("fifo", 3, 1, (0,)))
    recording.visits.extend(
        RoutedLayer(number, 0, ((0, number),), ((expert,),)) for number, expert in enumerate([0, 1, 0, 2, 0])
    )
    hits = {name: num_hits(recording.visits, 2, make(recording)) for name, make in POLICIES.items()}
    assert hits == {"FIFO": 1, "LRU": 2, "LFU": 2, "Belady": 2, "ours": 2}


def test_all_that_fits_stays() -> None:
    recording = made("skewed", 0, num_layers=2, num_experts=6, top_k=2, num_passes=20)
    keys = [(visit.layer, expert) for visit in recording.visits for expert in visit.counts]
    for make in POLICIES.values():
        assert num_hits(recording.visits, 12, make(recording)) == len(keys) - len(set(keys))


def record(path: Path, recording: Recording) -> Path:
    with RoutingWriter(path, recording.header) as writer:
        for visit in recording.visits:
            writer.write(visit.pass_number, visit.layer, visit.tokens, visit.experts)
    return path


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["expert_caches", *map(str, arguments)])
    return expert_caches.main()


def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    recording = made("words", 0, num_layers=2, num_experts=8, top_k=2, num_passes=30)
    plain = record(tmp_path / "plain.jsonl", recording)
    packed = tmp_path / "packed.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert run(monkeypatch, plain, packed, "--slots", 4, 8, "--json") == 0
    lines = capsys.readouterr().out.splitlines()
    results = json.loads(lines[-1])["results"]
    assert [(one["recording"], one["slots"]) for one in results] == [
        (path.name, num_slots) for path in (plain, packed) for num_slots in (4, 8)
    ]
    assert results[0]["hits"] == results[2]["hits"] and results[0]["share"] == 0.25
    for one in results:
        assert set(one["hits"]) == set(POLICIES) and one["requests"] == 120
        assert one["below"] == (one["hits"]["ours"] < max(one["hits"]["LRU"], one["hits"]["LFU"]))
        assert one["hit_shares"]["Belady"] == one["hits"]["Belady"] / 120
    assert lines[0].split() == ["recording", "slots", "of", "all", "needed", *POLICIES, "best", "ours"]
    assert f"{100 * results[0]['hit_shares']['ours']:.2f}" in lines[1]
    assert sum("BELOW" in line for line in lines) == sum(one["below"] for one in results)
    assert run(monkeypatch, plain, "--shares", 0.5) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[1:3] == ["8", "50%"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["no/such/file"], "no/such/file: No such file"),
        (["{folder}"], "Is a directory"),
        (["{text}"], "a_file:1 must be a header of recorded routing"),
        (["{empty}"], "empty.jsonl has no whole pass"),
        (["{empty}", "--slots", "0"], "--slots (0) must be at least 1"),
        (["{empty}", "--shares", "1.5"], "--shares (1.5) must be above 0 and at most 1"),
    ],
)
def test_mistakes_are_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    said: str,
) -> None:
    (tmp_path / "a_file").write_text("text")
    empty = record(tmp_path / "empty.jsonl", Recording(HEADER))
    paths = {"folder": tmp_path, "text": tmp_path / "a_file", "empty": empty}
    assert run(monkeypatch, *(argument.format(**paths) for argument in arguments)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and said in line
