"""What one rank has to refuse, all ranks refuse: none of them waits for one that is gone."""

from __future__ import annotations

import torch.distributed as dist

from configs.schema import ConfigError


def raise_together(problem: str | None, kind: type[Exception] = ConfigError) -> None:
    """Raise a ConfigError, or another `kind`, on every rank if any has a problem: nobody waits for a rank that gave up.
    A collective call."""
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    found = [
        f"{text} (rank {rank})" if len(problems) > 1 else text for rank, text in enumerate(problems) if text is not None
    ]
    if found:
        raise kind(found[0])
