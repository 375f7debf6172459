"""Errors that all ranks raise together if one has a problem, so that no rank waits for one that has ended."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from base.errors import ConfigError
from configs.keys import get
from configs.schema import Config
from configs.searched import SEARCHED
from configs.values import as_typed
from parallel.liveness import same_start


def raise_together(problem: str | None, kind: type[Exception] = ConfigError) -> None:
    """Raise ConfigError (or `kind`) on every rank if any rank passes an error message, `problem`. A collective call."""
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    found = [f"{p} (rank {rank})" if len(problems) > 1 else p for rank, p in enumerate(problems) if p is not None]
    if found:
        raise kind(found[0])


@contextmanager
def raised_together() -> Iterator[None]:
    """Within this context, a ConfigError of one rank is raised on all ranks. A collective call."""
    problem = None
    try:
        yield
    except ConfigError as error:
        problem = str(error)
    raise_together(problem)


def refuse_other_facts(facts: same_start.Facts) -> None:
    """Raise ConfigError on every rank if facts (values by name) differ between ranks. A collective call."""
    every: list[same_start.Facts] = [{}] * dist.get_world_size()
    dist.all_gather_object(every, facts)
    alike: dict[str, list[int]] = {}
    for rank, found in enumerate(every):
        alike.setdefault(json.dumps(found), []).append(rank)
    text = same_start.difference({tuple(ranks): every[ranks[0]] for ranks in alike.values()})
    if text is not None:
        raise ConfigError(text)


def is_lost_rank(error: BaseException) -> bool:
    """Whether a collective failed because another rank has left the job, which gloo reports as a RuntimeError."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo/transport" in str(error))


def refuse_other_layouts(config: Config) -> None:
    """Raise ConfigError on every rank if the layout search chose different layouts on the ranks. A collective call."""
    own = [as_typed(key, get(config, key)) for key in SEARCHED]
    every: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(every, own)
    for rank, layout in enumerate(every):
        if layout != every[0]:
            differs = ", ".join(f"{a} and {b}" for a, b in zip(every[0], layout, strict=True) if a != b)
            raise ConfigError(
                f"parallel.layout (auto) must lead to the same layout on all ranks, but ranks 0 and {rank} chose "
                f"{differs}. Use the same program files and the same run_dir on all nodes, or set the layout's keys."
            )
