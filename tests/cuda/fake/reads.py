"""Made-up values for the places where the product reads the device: tokens that spread evenly over the experts."""

from __future__ import annotations

from collections.abc import Callable

import torch

from configs import derived
from configs.schema import Config
from moe.chunk_plan import pass_degrees
from moe.planning.inputs import even_load, initial_plan

Reads = dict[str, Callable[[torch.Tensor], torch.Tensor]]


def reads(config: Config) -> Reads:
    """By place."""
    result: Reads = {"training/step.py:_sum_over_ranks": lambda sums: torch.ones(sums.shape)}
    if derived.is_moe(config):
        result |= {
            "moe/alltoall/flat.py:FlatAllToAll.count": lambda asked: _counts(config, asked),
            "moe/alltoall/hierarchical.py:HierarchicalAllToAll.count": lambda asked: _counts(config, asked),
            "moe/route.py:read_ends": lambda asked: _ends(config, asked),
        }
    return result


def _counts(config: Config, asked: torch.Tensor) -> torch.Tensor:
    """What goes from one rank to another: rows of each chunk of each pass, then assignments. The same for all."""
    load, ranks = even_load(config, "cuda"), config.parallel.expert
    assert load.assignments % ranks == 0, (load.assignments, ranks)
    degrees = _degrees(config, asked.size(-1) // 2)
    kinds = (load.token_rows // ranks, load.assignments // ranks)
    of_ranks = torch.tensor([count for total in kinds for degree in degrees for count in _split(total, degree)])
    return of_ranks.expand(asked.shape)


def _ends(config: Config, asked: torch.Tensor) -> torch.Tensor:
    """Where the experts' assignments end in each chunk of each pass."""
    load, experts = even_load(config, "cuda"), (config.moe.num_experts or 1) // config.parallel.expert
    degrees = _degrees(config, len(asked) // experts)
    chunks = [count for degree in degrees for count in _split(load.assignments, degree)]
    return torch.cat([torch.tensor(_split(chunk, experts)).cumsum(0) for chunk in chunks])


def _degrees(config: Config, num_chunks: int) -> list[int]:
    """Of both passes, or of the forward pass alone, as a layer has it whose activations are recomputed."""
    both = [pass_degrees(initial_plan(config), both) for both in (True, False)]
    return next(degrees for degrees in both if sum(degrees) == num_chunks)


def _split(total: int, count: int) -> list[int]:
    return [total * (i + 1) // count - total * i // count for i in range(count)]
