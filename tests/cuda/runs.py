"""One layout trained for a few steps, on the pretended device or on the CPU: what every rank of a test runs.

All that the pretended device needs to know of the product is here; the places that it names are in places.py.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

from tests.cuda.observed import OBSERVED, Mutant

STEPS = 2
VOCAB_SIZE = 500
COMMON = ("training.global_batch_size=8", "training.micro_batch_size=2", "model.backend=portable", "logging.wandb=off")


@dataclass
class Outcome:
    """Of one rank: numbers of each step, and what the device saw in the last one."""

    device: str  # of every parameter
    losses: list[float]  # the last one of the evaluation
    grad_norms: list[float]
    waits: Counter[tuple[str, str]]
    launches: Counter[str]
    empty_groups: int
    faults: Counter[str]
    mutant: Mutant | None


def train(
    device: str,
    overrides: Sequence[str],
    ranks_per_node: int | None = None,
    mutant: Mutant | None = None,
    card: str | None = None,
    early: bool = False,
    one_sided: bool = False,
) -> Outcome:
    """Take STEPS optimizer steps on made-up batches, and evaluate on them. `ranks_per_node`: this host's ranks pretend
    to be on several. `card`: one of CARDS. `early`: what may be late is done at once. `one_sided`: the second half of
    the experts gets no token."""
    import torch.distributed as dist

    os.environ.pop("LOCAL_RANK", None)  # there is one device for all
    rank = dist.get_rank()
    with contextlib.ExitStack() as stack:
        if ranks_per_node is not None:
            stack.enter_context(mock.patch.object(socket, "gethostname", lambda: f"node{rank // ranks_per_node}"))
        if device == "cuda":
            stack.enter_context(pretended(mutant, early))
            if card is not None:
                stack.enter_context(CARDS[card]())
        if one_sided:
            stack.enter_context(_all_to_the_first_half())
        return _train(device, overrides)


@contextlib.contextmanager
def _all_to_the_first_half() -> Iterator[None]:
    import torch

    from moe.router import Router

    routing = Router.routing

    def one_sided(router: Any, logits: Any, *args: Any, **kwargs: Any) -> Any:
        experts = torch.arange(logits.size(-1), device=logits.device)
        return routing(router, logits + 100.0 * (experts < len(experts) // 2), *args, **kwargs)

    with mock.patch.object(Router, "routing", one_sided):
        yield


@contextlib.contextmanager
def pretended(mutant: Mutant | None, early: bool) -> Iterator[None]:
    import torch

    from tests.cuda import exchanges, streams
    from tests.cuda.device import Device

    OBSERVED.start(mutant, early)
    # In the engine's own thread for a device, torch.tensor(..., device="cuda") would look for a real one.
    with Device(), torch.autograd.set_multithreading_enabled(False):
        try:
            yield
            OBSERVED.fault("exchanges that nobody waited for", exchanges.run_all())
            OBSERVED.fault("copies on side streams that nobody waited for", streams.run_all())
        finally:  # whatever an error has left
            exchanges.forget()
            streams.forget()


@contextlib.contextmanager
def _groups_without_rows_are_left() -> Iterator[None]:
    """As grouped products of two matrices of rows are on some cards."""
    from moe.experts import compute

    product = compute.grouped_mm

    def grouped_mm(left: Any, right: Any, ends: Any) -> Any:
        result = product(left, right, ends)
        if right.dim() == 2:
            empty = ends.host.diff(prepend=ends.host.new_zeros(1)) == 0
            result.host[empty] = float("nan")
            OBSERVED.empty_groups += int(empty.sum())
        return result

    with mock.patch.object(compute, "grouped_mm", grouped_mm):
        yield


@contextlib.contextmanager
def _older_card() -> Iterator[None]:
    import torch

    with mock.patch.object(torch.cuda, "get_device_capability", lambda device=None: (8, 0)):
        yield


CARDS = {"leaves empty groups": _groups_without_rows_are_left, "A100": _older_card}


def _train(device: str, overrides: Sequence[str]) -> Outcome:
    import torch.distributed as dist

    from configs.compose import compose
    from configs.validate import validate
    from parallel import topology
    from training.engine import Engine
    from training.starting.dry_run import made_up_batches
    from training.step import evaluate, train_step

    config = compose([f"training.device={device}", *COMMON, *overrides])
    validate(config, dist.get_world_size())
    place = topology.initialize(config)
    model = Engine(config, place, VOCAB_SIZE)
    (where,) = {str(parameter.device) for chunk in model.bare_chunks for parameter in chunk.parameters()}
    count = config.training.global_batch_size // (config.training.micro_batch_size * place.data.size)
    batches = made_up_batches(config, count, VOCAB_SIZE, seed=place.data.rank)
    if device == "cuda":
        batches = [{name: value.pin_memory() for name, value in batch.items()} for batch in batches]
    outcome = Outcome(where, [], [], OBSERVED.waits, OBSERVED.launches, 0, OBSERVED.faults, OBSERVED.mutant)
    for step in range(1, STEPS + 1):
        OBSERVED.waits.clear()
        OBSERVED.launches.clear()
        result = train_step(model, batches, step)
        outcome.losses.append(result.loss)
        outcome.grad_norms.append(result.grad_norm)
    outcome.waits, outcome.launches = Counter(OBSERVED.waits), Counter(OBSERVED.launches)
    outcome.empty_groups = OBSERVED.empty_groups
    outcome.losses.append(evaluate(model, iter([batches]))[0])
    model.close()
    return outcome
