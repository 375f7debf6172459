"""Compare caches of experts on recorded routing, without a model.

`python -m benchmarks.speed.expert_caches FILE... [--slots N ... | --shares 0.1 0.25 0.5] [--markdown] [--json]`

FILE is a recording of `python -m inference.generate --record-routing FILE`, also compressed with gzip. A cache has
slots for some of the experts of all MoE layers. In each pass each layer needs the experts that any of its tokens chose.
Cached experts are hits and used first. Missing ones are loaded and used one by one; if the cache is full, each evicts
another expert, perhaps one that has just been used. Nothing is prefetched. The table has the share of hits of:

* ours: inference/weights/expert_cache.py
* LRU: evicts the least recently used expert
* LFU: evicts the expert used in the fewest passes since the start, among equals the least recent
* FIFO: evicts the expert that was loaded first
* Belady: evicts the expert whose next use is latest, even if it has just been loaded. It knows the future, and no cache
  of that size has more hits.

Lines in which ours is below the better one of LRU and LFU are marked.
"""

from __future__ import annotations

import argparse
import heapq
import json
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from base import command
from base.errors import ConfigError
from benchmarks.kit.tables import table
from inference.weights.expert_cache import ExpertUses
from inference.weights.routing_file import Recording, RoutedLayer, read_routing

SHARES = (0.1, 0.25, 0.5, 0.75)  # of all experts
Key = tuple[int, int]  # layer, expert


class CachePolicy(Protocol):
    """Tracks the cached experts, and chooses the one to evict."""

    keeps_new: bool  # a loaded expert is not evicted at once

    def routed(self, index: int, visit: RoutedLayer) -> None:
        """A layer's router has chosen; its experts are touched next, hits before misses."""

    def touch(self, key: Key) -> None:
        """An expert is used, and cached from now on."""

    def victim(self) -> Key:
        """Evict an expert and return it."""


class LeastRecent:
    """LRU; with `by_load` FIFO."""

    keeps_new = True

    def __init__(self, by_load: bool = False) -> None:
        self._order: OrderedDict[Key, None] = OrderedDict()
        self._by_load = by_load

    def routed(self, index: int, visit: RoutedLayer) -> None:
        pass

    def touch(self, key: Key) -> None:
        self._order[key] = None
        if not self._by_load:
            self._order.move_to_end(key)

    def victim(self) -> Key:
        return self._order.popitem(last=False)[0]


class LowestFirst:
    """Evicts the expert with the lowest value. Values change only when an expert is used."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], Key]] = []
        self._value: dict[Key, tuple[int, int]] = {}  # of cached experts

    def put(self, key: Key, value: tuple[int, int]) -> None:
        if self._value.get(key) != value:
            self._value[key] = value
            heapq.heappush(self._heap, (value, key))

    def victim(self) -> Key:
        while True:
            value, key = heapq.heappop(self._heap)
            if self._value.get(key) == value:  # else the entry is outdated
                del self._value[key]
                return key


class LeastUsed(LowestFirst):
    """LFU over all time: a reloaded expert keeps its earlier counts."""

    keeps_new = True

    def __init__(self) -> None:
        super().__init__()
        self._counts: dict[Key, int] = {}
        self._time = 0

    def routed(self, index: int, visit: RoutedLayer) -> None:
        pass

    def touch(self, key: Key) -> None:
        self._time += 1
        self._counts[key] = self._counts.get(key, 0) + 1
        self.put(key, (self._counts[key], self._time))


class LatestNextUse(LowestFirst):
    """Belady's optimum; a loaded and used expert may be evicted at once."""

    keeps_new = False

    def __init__(self, visits: Sequence[RoutedLayer]) -> None:
        super().__init__()
        self._next: list[dict[Key, int]] = [{} for _ in visits]
        self._now = 0
        coming: dict[Key, int] = {}
        for i in range(len(visits) - 1, -1, -1):
            for expert in visits[i].counts:
                key = visits[i].layer, expert
                self._next[i][key] = coming.get(key, len(visits))
                coming[key] = i

    def routed(self, index: int, visit: RoutedLayer) -> None:
        self._now = index

    def touch(self, key: Key) -> None:
        self.put(key, (-self._next[self._now][key], 0))


class ExpectedUse:
    """The policy of inference/weights/expert_cache.py."""

    keeps_new = True

    def __init__(self, recording: Recording) -> None:
        header = recording.header
        self._uses = ExpertUses(header.layers, header.num_experts, header.top_k)

    def routed(self, index: int, visit: RoutedLayer) -> None:
        self._uses.used(visit.layer, visit.counts)

    def touch(self, key: Key) -> None:
        self._uses.admit(*key)

    def victim(self) -> Key:
        (found,) = self._uses.victims(1)
        self._uses.drop(*found)
        return found


POLICIES: dict[str, Callable[[Recording], CachePolicy]] = {
    "ours": ExpectedUse,
    "LRU": lambda recording: LeastRecent(),
    "LFU": lambda recording: LeastUsed(),
    "FIFO": lambda recording: LeastRecent(by_load=True),
    "Belady": lambda recording: LatestNextUse(recording.visits),
}
BAR = ("LRU", "LFU")  # ours must not be below either


def num_hits(visits: Sequence[RoutedLayer], num_slots: int, policy: CachePolicy) -> int:
    """Return the number of needed experts that are cached when they are needed, in a cache that starts empty."""
    cached: set[Key] = set()
    hits = 0
    for i, visit in enumerate(visits):
        needed = [(visit.layer, expert) for expert in visit.counts]
        found = [key for key in needed if key in cached]
        missing = [key for key in needed if key not in cached]
        hits += len(found)
        policy.routed(i, visit)
        for key in found:
            policy.touch(key)
        for key in missing:
            if len(cached) == num_slots and policy.keeps_new:
                cached.remove(policy.victim())
            cached.add(key)
            policy.touch(key)
            if len(cached) > num_slots:
                cached.remove(policy.victim())
    return hits


def compared(name: str, recording: Recording, num_slots: int) -> dict[str, Any]:
    """Return the share of hits of each policy with `num_slots` slots, the best policy except Belady, and whether ours
    is below LRU or LFU."""
    requests = sum(len(visit.counts) for visit in recording.visits)
    hits = {policy: num_hits(recording.visits, num_slots, make(recording)) for policy, make in POLICIES.items()}
    present = {policy: count for policy, count in hits.items() if policy != "Belady"}
    return {
        "recording": name,
        "slots": num_slots,
        "share": num_slots / (len(recording.header.layers) * recording.header.num_experts),
        "requests": requests,
        "hits": hits,
        "hit_shares": {policy: count / requests for policy, count in hits.items()},
        "best": max(present, key=lambda policy: present[policy]),
        "below": hits["ours"] < max(hits[policy] for policy in BAR),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.speed.expert_caches",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="recorded routing")
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--slots", nargs="+", type=int, metavar="N", help="experts that the cache holds")
    text = " ".join(map(str, SHARES))
    sizes.add_argument("--shares", nargs="+", type=float, metavar="X", help=f"the same, of all experts ({text})")
    parser.add_argument("--markdown", action="store_true", help="tables for benchmarks/results")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    arguments = parser.parse_args()
    return command.run(lambda: run(arguments))


def run(arguments: argparse.Namespace) -> None:
    """Print a line for each recording and size."""
    shares = arguments.shares or SHARES
    if wrong := [number for number in arguments.slots or [] if number < 1]:
        raise ConfigError(f"--slots ({wrong[0]}) must be at least 1")
    if wrong := [share for share in shares if not 0 < share <= 1]:
        raise ConfigError(f"--shares ({wrong[0]}) must be above 0 and at most 1")
    recordings = {path: read_routing(path) for path in arguments.files}
    results = []
    for path, recording in recordings.items():
        if not recording.visits:
            raise ConfigError(f"{path} has no whole pass")
        total = len(recording.header.layers) * recording.header.num_experts
        for num_slots in arguments.slots or [max(1, int(total * share)) for share in shares]:
            results.append(compared(path.name, recording, num_slots))
    lines = [
        [
            result["recording"],
            str(result["slots"]),
            f"{result['share']:.0%}",
            f"{result['requests']:,}",
            *(f"{100 * result['hit_shares'][policy]:.2f}" for policy in POLICIES),
            result["best"],
            "BELOW" if result["below"] else "",
        ]
        for result in results
    ]
    print(table(["recording", "slots", "of all", "needed", *POLICIES, "best", "ours"], lines, arguments.markdown))
    below = sum(result["below"] for result in results)
    print(f"\nours below the better one of LRU and LFU: {below} of {len(results)} lines")
    if arguments.json:
        print(json.dumps({"results": results}))


if __name__ == "__main__":
    sys.exit(main())
