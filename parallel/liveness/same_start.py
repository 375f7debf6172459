"""A check before the first collective that all ranks were started with the same command, code and versions.

Otherwise a typing error on one node could train a mixture of two settings, or hang without naming a key. Each rank
stores a digest. Rank 0 compares them and asks for details if they differ; then all ranks raise an error.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from base.errors import ConfigError
from configs.keys import get
from configs.schema import KEYS, Config
from configs.show import show
from parallel.liveness.rendezvous import absent

# Keys of a node's folders, budgets and processes, on which no number of the training depends.
MAY_DIFFER = frozenset(
    ("data.cache_dir", "data.num_workers", "memory.disk_budget", "memory.disk_dir", "memory.host_budget")
)
ROOT = Path(__file__).parents[2]
SOURCE = "base checkpoint configs data inference launch memory models moe optim parallel simulator training".split()
SUFFIXES = (".py", ".cpp", ".h")
LATE = 2.0  # seconds that other ranks may still take once two digests differ
ANSWER = 5.0  # seconds to wait for the details, and until all ranks have read the error
POLL = 0.02  # seconds
SHOWN = 3  # most names that a message lists
ASKED = 16  # most ranks whose details are compared

Facts = dict[str, str]  # values that must be equal on all ranks, by name


def facts_of(composed: Config) -> Facts:
    """Return what must be equal on all ranks, as text by name: each key of the composed config (before `auto` values
    are decided), a digest of each source file, and the versions of torch and Megatron-core."""
    facts = {key: show(get(composed, key), None) for key in KEYS if key not in MAY_DIFFER}
    facts["version of torch"] = torch.__version__
    facts["version of megatron-core"] = importlib.metadata.version("megatron-core")
    paths = [ROOT / "train.py", *(path for package in SOURCE for path in (ROOT / package).rglob("*"))]
    for path in sorted(path for path in paths if path.suffix in SUFFIXES):
        digest = hashlib.blake2b(path.read_bytes(), digest_size=4)
        facts[f"file {path.relative_to(ROOT).as_posix()}"] = digest.hexdigest()
    return facts


def refuse_other_starts(facts: Facts, store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> None:
    """Raise ConfigError on every rank if facts differ between ranks; the message lists names, values and ranks.

    All ranks call it. Raises TimeoutError if some ranks do not call it in time.
    """
    store = dist.PrefixStore("start", store)
    digest = hashlib.blake2b(json.dumps([world_size, facts]).encode(), digest_size=16).hexdigest()
    store.set(f"digest/{rank}", digest)
    if rank == 0:
        digests = _gather(store, digest, world_size, timeout)
        others = [rank for rank, found in digests.items() if found != digest]
        asked = sorted({0, *others[:ASKED]}) if others else []
        store.set("asked", json.dumps(asked))
    else:
        asked = json.loads(_wait(store, "asked", 0, timeout))
    if not asked:
        return
    if rank in asked:
        store.set(f"facts/{rank}", json.dumps({"number of ranks": str(world_size), **facts}))
    if rank == 0:
        every = {}
        for one in asked:
            with_same = [other for other, found in digests.items() if found == digests[one]]
            every[tuple(with_same)] = json.loads(_wait(store, f"facts/{one}", one, timedelta(seconds=ANSWER)))
        store.set("refusal", difference(every) or "")
    text = _wait(store, "refusal", 0, timeout)
    store.set(f"read/{rank}", "")
    if rank == 0:  # the store may be in its process
        end = time.monotonic() + ANSWER
        while not store.check([f"read/{one}" for one in digests]) and time.monotonic() < end:
            time.sleep(POLL)
    raise ConfigError(text)


def difference(every: Mapping[tuple[int, ...], Facts]) -> str | None:
    """Describe in one line the facts that differ: the first names, each with its values and the ranks that have them.

    Returns None if all facts are equal. `every` maps ranks that share facts to these facts.
    """
    found: dict[str, str] = {}
    for name in dict.fromkeys(name for facts in every.values() for name in facts):
        by_value: dict[str, list[int]] = {}
        for ranks, facts in every.items():
            by_value.setdefault(facts.get(name, "missing"), []).extend(ranks)
        if len(by_value) > 1:
            found[name] = "; ".join(f"{value} on {_ranks(ranks)}" for value, ranks in by_value.items())
    if not found:
        return None
    names = [*found][:SHOWN]
    which = ", ".join(names) + (f" and {len(found) - SHOWN} more" if len(found) > SHOWN else "")
    values = [found[name] if len(names) == 1 else f"{name} is {found[name]}" for name in names]
    return (
        f"{which} must be the same on every rank: {'. '.join(values)}. Start all nodes with the same command, "
        "files and versions."
    )


def _ranks(ranks: list[int]) -> str:
    """Format rank numbers as text, such as `rank 1` or `ranks 0-3,7`."""
    ranges: list[list[int]] = []
    for rank in sorted(ranks):
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    shown = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def _gather(store: dist.Store, own: str, world_size: int, timeout: timedelta) -> dict[int, str]:
    """Wait for the digests that ranks store of their start facts, and return them by rank.

    After a digest unlike `own`, ranks that are more than LATE seconds later are left out. Raises TimeoutError if ranks
    are missing and all others have the same digest.
    """
    found, missing = {0: own}, set(range(1, world_size))
    end = time.monotonic() + timeout.total_seconds()
    while missing and time.monotonic() < end:
        for rank in sorted(missing):
            if store.check([f"digest/{rank}"]):
                missing.discard(rank)
                found[rank] = store.get(f"digest/{rank}").decode()
                if found[rank] != own:
                    end = min(end, time.monotonic() + LATE)
        time.sleep(POLL)
    if missing and all(digest == own for digest in found.values()):
        raise absent(sorted(missing), timeout)
    return found


def _wait(store: dist.Store, key: str, rank: int, timeout: timedelta) -> str:
    """Return the text that a rank stores under a key. Raises TimeoutError, naming the rank, if it stores none."""
    try:
        store.wait([key], timeout)
    except dist.DistError:
        raise absent([rank], timeout) from None
    return store.get(key).decode()
