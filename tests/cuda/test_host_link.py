"""A host link on the pretended device: an optimizer's step beside the training, whose every wait is missed when
it lacks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

from memory.completion import Completion
from memory.copy_stream import PASSES, SAVES, UPDATES
from memory.host_link import HostLink
from tests import distributed
from tests.cuda import sync_points
from tests.cuda.pretended.observed import OBSERVED, Mutant
from tests.waits import LONG, until

pytestmark = [pytest.mark.cuda_pretended]

BUCKETS, SIZE, STEPS, NUM_SLOTS = 5, 64, 3, 2
ENGINES = ("device", "host")


@dataclass
class _Outcome:
    numbers: dict[str, torch.Tensor] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    worker_waits: Counter[str] = field(default_factory=Counter)  # for events, by thread
    left_out: int = 0


def _train(
    engine: str, device: str, early: bool = False, mutant: Mutant | None = None, hasty: bool = False
) -> _Outcome:
    """AdamW in bf16 with its state on the host, updated there or in slots on the device. `hasty`: a slot takes the next
    bucket's state as soon as the last one's update is given to its stream."""
    if device == "cpu":
        return _Outcome(_loop(engine, torch.device("cpu"), hasty))
    from tests.cuda import runs

    with runs.pretended(mutant, early):
        numbers = _loop(engine, torch.device("cuda", 0), hasty)
    waits: Counter[str] = Counter()
    for (thread, kind, call_site), count in OBSERVED.worker_waits.items():
        assert kind == "event.synchronize"
        waits[thread] += count if call_site != sync_points.STREAMS_END else 0
    return _Outcome(numbers, sorted(OBSERVED.faults), waits, mutant.left_out if mutant else 0)


def _loop(engine: str, device: torch.device, hasty: bool) -> dict[str, torch.Tensor]:
    on_gpu = device.type == "cuda"
    numbers = torch.Generator().manual_seed(1)
    stored = torch.rand(BUCKETS, 3, SIZE, generator=numbers)  # master, exp_avg, exp_avg_sq
    given = torch.randn(STEPS, BUCKETS, SIZE, generator=numbers).to(device)
    weights = stored[:, 0].to(device, torch.bfloat16)
    grads, sums = torch.zeros(BUCKETS, SIZE, device=device), torch.zeros(STEPS, device=device)
    device_slots, counts = torch.zeros(NUM_SLOTS, 3, SIZE, device=device), torch.arange(1.0, STEPS + 1, device=device)
    host_grads = torch.zeros(BUCKETS, SIZE, pin_memory=on_gpu)
    host_weights = torch.zeros(BUCKETS, SIZE, dtype=torch.bfloat16, pin_memory=on_gpu)
    stored = stored.pin_memory() if on_gpu else stored
    link = HostLink(device, timeout=LONG)
    back, free = ([Completion.already() for _ in range(count)] for count in (BUCKETS, NUM_SLOTS))

    def on_device(bucket: int, step: int, ready: Completion) -> None:
        slot_index = bucket % NUM_SLOTS
        come = link.up.submit(
            copying(device_slots[slot_index], stored[bucket]), [ready] if hasty else [ready, free[slot_index]]
        )
        back[bucket] = link.update.submit(
            _adamw(device_slots[slot_index], grads[bucket], counts[step], weights[bucket]), [come, ready]
        )
        free[slot_index] = link.down.submit(copying(stored[bucket], device_slots[slot_index]), [back[bucket]])

    def on_host(bucket: int, step: int, ready: Completion) -> None:
        gone = link.down.submit(copying(host_grads[bucket], grads[bucket]), [ready])
        count = torch.tensor(step + 1.0)
        done = link.host.submit(_adamw(stored[bucket], host_grads[bucket], count, host_weights[bucket]), [gone])
        back[bucket] = link.up.submit(copying(weights[bucket], host_weights[bucket]), [done])

    for step in range(STEPS):
        for bucket in range(BUCKETS):
            back[bucket].order()
            sums[step] += weights[bucket].float().sum()
        grads.copy_(given[step]).mul_(weights)
        ready = Completion.so_far(device)
        for bucket in range(BUCKETS):
            (on_device if engine == "device" else on_host)(bucket, step, ready)
    for done in (*back, *free):
        done.wait()
        assert done.error is None, done.error
    assert link.close() == []
    return {"weights": weights.float().cpu(), "state": stored.clone(), "sums": sums.cpu()}


def copying(target: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
    def work() -> None:
        target.copy_(source, non_blocking=True)

    return work


def _adamw(state: torch.Tensor, grad: torch.Tensor, step: torch.Tensor, weights: torch.Tensor) -> Callable[[], None]:
    master, exp_avg, exp_avg_sq = ([each] for each in state)
    rates = {"lr": 0.1, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1, "eps": 1e-8}

    def work() -> None:
        grad.mul_(0.5)  # clipping
        torch._fused_adamw_(master, [grad], exp_avg, exp_avg_sq, [], [step], amsgrad=False, maximize=False, **rates)
        weights.copy_(master[0])

    return work


def _run(*arguments: object) -> _Outcome:
    backend = distributed.PRETENDED if "cuda" in arguments else "gloo"
    return distributed.run(_train, 1, *arguments, backend=backend)[0]


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("engine", ENGINES)
def test_numbers_are_the_cpus_bit_for_bit(engine: str, early: bool) -> None:
    outcome, of_cpu = _run(engine, "cuda", early), _run(engine, "cpu")
    assert outcome.faults == []
    for name, expected in of_cpu.numbers.items():
        assert torch.equal(outcome.numbers[name], expected), name
    # A bucket's gradient is waited for by the host that needs it, once.
    assert +outcome.worker_waits == ({"host update stream": BUCKETS * STEPS} if engine == "host" else {})


MUTANTS = {
    "weights that are not back": ("device", "wait_event", "completion.py:Completion.order", "MainThread"),
    "weights that are not back from the host": ("host", "wait_event", "completion.py:Completion.order", "MainThread"),
    "gradients that are not there": ("device", "wait_event", "copy_stream.py:CopyStream._wait", "device update stream"),
    "a copy out before the update": ("device", "wait_event", "copy_stream.py:CopyStream._wait", "from device stream"),
    "gradients that leave early": ("host", "wait_event", "copy_stream.py:CopyStream._wait", "from device stream"),
    "gradients that have not come": (
        "host",
        "event.synchronize",
        "copy_stream.py:CopyStream._wait",
        "host update stream",
    ),
}


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("name", MUTANTS)
def test_a_missing_wait_is_noticed(name: str, early: bool) -> None:
    engine, what, call_site, thread = MUTANTS[name]
    outcome = _run(engine, "cuda", early, Mutant(what, f"memory/{call_site}", thread=thread))
    assert outcome.left_out
    assert any("did not wait for what" in fault for fault in outcome.faults), outcome.faults


@pytest.mark.parametrize("early", [False, True])
def test_a_slot_that_is_used_again_early_is_noticed(early: bool) -> None:
    faults = _run("device", "cuda", early, None, True).faults
    assert any("did not wait for what a copy on a side stream" in fault for fault in faults), faults


def _close() -> tuple[list[str], list[float]]:
    from tests.cuda import runs

    with runs.pretended(None, False):
        device = torch.device("cuda", 0)
        link, source, target = HostLink(device), torch.ones(3, device=device), torch.zeros(3, pin_memory=True)
        link.down.submit(copying(target, source), [Completion.so_far(device)])
        link.close()
        del source
        return sorted(OBSERVED.faults), target.tolist()


def test_a_thread_ends_when_its_last_copy_is_over() -> None:
    assert distributed.run(_close, 1, backend=distributed.PRETENDED) == [([], [1.0, 1.0, 1.0])]


def _two_priorities(first: int, second: int) -> list[str]:
    """Two copies to the same memory, of which nobody says that one waits for the other."""
    from tests.cuda import runs

    with runs.pretended(None, False):
        device = torch.device("cuda", 0)
        link, target = HostLink(device), torch.zeros(3, device=device)
        sources = [torch.full((3,), float(priority)).pin_memory() for priority in (first, second)]
        started = Completion.so_far(device)
        for priority, source in zip((first, second), sources, strict=True):
            done = link.up.submit(copying(target, source), [started], priority=priority)
            until(lambda done=done: done.is_issued, "a copy to be issued")  # type: ignore[misc]
        link.close()
        return sorted(OBSERVED.faults)


def test_a_copy_waits_for_those_of_a_higher_priority_and_for_no_others() -> None:
    def run(first: int, second: int) -> list[str]:
        return distributed.run(_two_priorities, 1, first, second, backend=distributed.PRETENDED)[0]

    assert run(PASSES, UPDATES) == run(UPDATES, SAVES) == run(PASSES, PASSES) == []
    assert any("did not wait for what a copy on a side stream" in fault for fault in run(UPDATES, PASSES))


def test_offloads_beyond_the_budget_are_refused_at_the_start() -> None:
    from tests.cuda import runs

    overrides = ("model=gpt_moe_tiny", "parallel.expert=2", "moe.memory_strategy=offload", "memory.host_budget=0.01")
    refusal = r"memory\.host_budget \(0\.01\) must leave \d+\.\d MiB for what experts offload, .* Try memory\.host_budg"
    with pytest.raises(distributed.RankError, match=refusal):
        distributed.run(runs.train, 2, "cuda", overrides, backend=distributed.PRETENDED)
