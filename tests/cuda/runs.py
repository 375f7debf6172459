"""One layout trained for a few steps, on the pretended device or on the CPU: what every rank of a test runs.

All that the pretended device needs to know of the product is here; the call sites that it names are in sync_points.py.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

from tests.cuda.pretended.logs import Log
from tests.cuda.pretended.observed import OBSERVED, Mutant

STEPS = 2
VOCAB_SIZE = 500
HOST_PAUSE = 0.2  # seconds
COMMON = ("training.global_batch_size=8", "training.micro_batch_size=2", "model.backend=portable", "logging.wandb=off")


@dataclass
class Outcome:
    """Of one rank: numbers of each step, what the device saw in the last one, and in the whole run."""

    device: str  # of every parameter
    losses: list[float]  # the last one of the evaluation
    grad_norms: list[float]
    waits: Counter[tuple[str, str]] = field(default_factory=Counter)
    worker_waits: Counter[tuple[str, str, str]] = field(default_factory=Counter)  # of the whole run
    launches: Counter[str] = field(default_factory=Counter)
    to_device: int = 0  # bytes
    to_host: int = 0
    peak_bytes: int = 0  # of the whole run
    empty_groups: int = 0
    pinned: Counter[str] = field(default_factory=Counter)  # pieces of memory that passes and update pinned
    faults: Counter[str] = field(default_factory=Counter)
    log: Log = field(default_factory=dict)  # of the whole run
    mutant: Mutant | None = None


def train(
    device: str,
    overrides: Sequence[str],
    ranks_per_node: int | None = None,
    mutant: Mutant | None = None,
    card: str | None = None,
    early: bool = False,
    one_sided: bool = False,
    alternate_engines: bool = False,
) -> Outcome:
    """Take STEPS optimizer steps on made-up batches, and evaluate on them. `ranks_per_node`: this host's ranks pretend
    to be on several. `card`: one of CARDS. `early`: what may be late is done at once. `one_sided`: the second half of
    the experts gets no token. `alternate_engines`: buckets of the optimizer that may go either way do so in turn."""
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
        if alternate_engines:
            stack.enter_context(_alternate_engines())
        if mutant is not None and mutant.what == "written":
            stack.enter_context(_read_too_early())
        outcome = _train(device, overrides)
        if device == "cuda":
            from tests.cuda.pretended import exchanges, memory

            outcome.peak_bytes, outcome.log = memory.Bytes.peak, exchanges.take_log()
        return outcome


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
def _alternate_engines() -> Iterator[None]:
    """Whatever was measured."""
    from optim.offload import optimizer

    def choose(engine: str, numels: Sequence[int], *_: Any) -> list[str]:
        return [("host", "device_stream")[index % 2] for index in range(len(numels))]

    with mock.patch.object(optimizer, "choose", choose):
        yield


@contextlib.contextmanager
def _read_too_early() -> Iterator[None]:
    """Where the mutant says so. The host adds and updates late, so that it shows."""
    from memory.completion import Completion
    from memory.copy_stream import CopyStream
    from memory.store import Store

    fetch, wait = Store.fetch, CopyStream._wait

    def fetch_early(store: Any, *args: Any, **kwargs: Any) -> Any:
        checkout = fetch(store, *args, **kwargs)
        return replace(checkout, there=Completion.already()) if OBSERVED.leaves_out("written") else checkout

    def wait_longer(stream: Any, item: Any) -> None:
        wait(stream, item)
        if any(name in item.work.__qualname__ for name in ("adding", "on_records")):
            time.sleep(HOST_PAUSE)

    with mock.patch.object(Store, "fetch", fetch_early), mock.patch.object(CopyStream, "_wait", wait_longer):
        yield


@contextlib.contextmanager
def pretended(mutant: Mutant | None, early: bool) -> Iterator[None]:
    import torch

    from tests.cuda.pretended import exchanges, memory, streams
    from tests.cuda.pretended.device import Device

    OBSERVED.start(mutant, early)
    memory.start()
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
    ranks = topology.initialize(config)
    model = Engine(config, ranks, VOCAB_SIZE)
    (where,) = {str(parameter.device) for chunk in model.bare_chunks for parameter in chunk.parameters()}
    count = config.training.global_batch_size // (config.training.micro_batch_size * ranks.data.size)
    batches = made_up_batches(config, count, VOCAB_SIZE, seed=ranks.data.rank, pin=device == "cuda")
    if "positions" in batches[0]:
        for number, batch in enumerate(batches):
            _cut(batch, number)
    _forget_pinned_before_passes(model)
    outcome = Outcome(where, [], [], worker_waits=OBSERVED.worker_waits, faults=OBSERVED.faults, mutant=OBSERVED.mutant)
    for step in range(1, STEPS + 1):
        for counter in (OBSERVED.waits, OBSERVED.launches, OBSERVED.to_device, OBSERVED.to_host):
            counter.clear()
        result = train_step(model, batches, step)
        outcome.losses.append(result.loss)
        outcome.grad_norms.append(result.grad_norm)
    outcome.waits, outcome.launches = Counter(OBSERVED.waits), Counter(OBSERVED.launches)
    outcome.to_device, outcome.to_host = OBSERVED.to_device.total(), OBSERVED.to_host.total()
    outcome.empty_groups, outcome.pinned = OBSERVED.empty_groups, Counter(OBSERVED.pinned)
    outcome.losses.append(evaluate(model, iter([batches]))[0])
    model.close()
    return outcome


def _cut(batch: dict[str, Any], number: int) -> None:
    """Give a batch documents of 1 to 6 tokens, and longer ones."""
    import torch

    positions, mask = batch["positions"], batch["loss_mask"]
    for row, length in enumerate(range(number, number + len(positions))):
        lengths = [*range(1, 7), 1, 1, 9 + length] * positions.size(1)
        positions[row] = torch.cat([torch.arange(each) for each in lengths])[: positions.size(1)]
    mask[:, :-1][positions[:, 1:] == 0] = 0.0


def _forget_pinned_before_passes(model: Any) -> None:
    """Between two steps memory may be pinned."""
    begin_passes = model.begin_passes

    def begin(num_micro_batches: int, forward_only: bool) -> None:
        begin_passes(num_micro_batches, forward_only)
        OBSERVED.pinned.clear()

    model.begin_passes = begin
