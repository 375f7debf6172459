"""training.activation_offload: the same numbers bit for bit, and what is on the device, counted and seen."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from base.errors import ConfigError
from configs import derived
from simulator.layer_inputs import layer_inputs
from simulator.parameters import rank_coordinates
from tests import distributed
from tests.training.helpers import make_config, read_metrics, train
from tests.waits import until

VOCAB_SIZE = 500
COMMON = (
    "training.recompute=full",
    "training.global_batch_size=8",
    "training.micro_batch_size=2",
    "model.num_layers=4",
    "model.sequence_length=32",
    "model.backend=portable",
)


@dataclass
class Outcome:
    """Of one rank: numbers of each step, then what the store counted in the last one."""

    numbers: list[tuple[float, float]]
    device_peak: int = 0
    restored_peak: int = 0
    copies_out: int = 0
    copies_back: int = 0
    host_bytes: int = 0
    seen: Sequence[tuple[int, int]] = ()  # bytes that are there, and what is counted, at each layer's input


def _train(overrides: Sequence[str], fails: bool = False) -> Outcome:
    """Two steps, an evaluation and a third one. `fails`: a pass before them ends in its middle."""
    import torch.distributed as dist

    from parallel import topology
    from training.engine import Engine
    from training.starting.dry_run import made_up_batches
    from training.step import evaluate, run_again, train_step

    config = make_config(overrides, dist.get_world_size())
    ranks = topology.initialize(config)
    engine = Engine(config, ranks, VOCAB_SIZE)
    seen = [] if engine.layer_inputs is None else _watch(engine.layer_inputs)
    batches = made_up_batches(config, derived.num_micro_batches(config, ranks.world_size), VOCAB_SIZE, ranks.data.rank)
    if fails:
        _fail(engine, batches)
    outcome = Outcome([])
    for step in (1, 2, 3):
        if step == 3:
            outcome.numbers.append((evaluate(engine, iter([batches]))[0], 0.0))
            run_again(engine, batches)
        result = train_step(engine, batches, step)
        outcome.numbers.append((result.loss, result.grad_norm))
    if engine.layer_inputs is not None:
        counts = engine.layer_inputs.counts
        outcome.device_peak, outcome.restored_peak = counts.device_peak, counts.restored_peak
        outcome.copies_out, outcome.copies_back = counts.copies_out, counts.copies_back
        outcome.host_bytes, outcome.seen = engine.layer_inputs.host_bytes, seen
    engine.close()
    return outcome


def _watch(store: Any) -> list[tuple[int, int]]:
    """Note at each layer's input how many bytes of them exist, whoever holds them, and how many are counted."""
    import torch
    from torch.multiprocessing.reductions import StorageWeakRef

    storages: list[StorageWeakRef] = []
    seen: list[tuple[int, int]] = []

    def there() -> int:
        storages[:] = [storage for storage in storages if not storage.expired()]
        found = {ref.cdata: torch.UntypedStorage._new_with_weak_ptr(ref.cdata) for ref in storages}
        return sum(storage.nbytes() for storage in found.values() if storage is not None)

    def note(tensor: torch.Tensor) -> None:
        storages.append(StorageWeakRef(tensor.untyped_storage()))
        # A thread of gloo's lets go of what it has gathered.
        until(lambda: there() <= store.counts.device, "layer inputs that nobody counts to go", poll=0.001)
        seen.append((there(), store.counts.device))

    keep, fetch = store._keep, store._fetch

    def watched_keep(kept: Any) -> None:
        tensor = kept.tensor
        keep(kept)
        note(tensor)

    def watched_fetch(kept: Any) -> None:
        fetch(kept)
        note(kept.tensor)

    store._keep, store._fetch = watched_keep, watched_fetch
    return seen


def _fail(engine: Any, batches: Any) -> None:
    from training import step

    calls = []

    def loss(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise RuntimeError("in the middle")
        return step_loss(*args)

    step_loss = step._loss
    with mock.patch.object(step, "_loss", loss), pytest.raises(RuntimeError, match="in the middle"):
        step.gradients(engine, batches, 1)


@functools.cache
def _outcomes(ranks: int, overrides: tuple[str, ...], offload: str, fails: bool = False) -> list[Outcome]:
    arguments = (*COMMON, *overrides, f"training.activation_offload={offload}")
    return distributed.run(_train, ranks, arguments, fails)


def _mib(ranks: int, overrides: Sequence[str], number: float) -> str:
    """A budget of so many layer inputs."""
    return str(number * derived.layer_input_bytes(make_config([*COMMON, *overrides], ranks)) / 2**20)


CASES: dict[str, tuple[int, tuple[str, ...]]] = {
    "dense": (1, ("model=gpt_tiny",)),
    "bert, bf16": (1, ("model=bert_tiny", "training.precision=bf16")),
    "experts": (2, ("model=gpt_moe_tiny", "parallel.expert=2", "moe.memory_strategy=recompute")),
    "pipeline": (2, ("model=gpt_tiny", "parallel.pipeline=2", "model.hidden_dropout=0.1")),
    "interleaved": (2, ("model=gpt_tiny", "parallel.pipeline=2", "parallel.virtual_pipeline=2")),
    "tensor, bert": (2, ("model=bert_moe_tiny", "parallel.tensor=2", "parallel.sequence=true")),
}


# Each case with one of both budgets, in turns; the first one with both.
BUDGETS = [(name, ("some", "auto")[number % 2]) for number, name in enumerate(CASES)] + [("dense", "auto")]


@pytest.mark.parametrize(("name", "budget"), BUDGETS)
def test_numbers_are_the_same(name: str, budget: str) -> None:
    ranks, overrides = CASES[name]
    offload = "auto" if budget == "auto" else _mib(ranks, overrides, 2.5)
    without, outcomes = _outcomes(ranks, overrides, "none"), _outcomes(ranks, overrides, offload)
    assert [each.numbers for each in outcomes] == [each.numbers for each in without]
    for outcome in outcomes:
        assert outcome.copies_out > 0 and 0 < outcome.restored_peak <= 2
        assert [there for there, _ in outcome.seen] == [counted for _, counted in outcome.seen]
    _compare_with_plan(ranks, (*overrides, f"training.activation_offload={offload}"), outcomes)


def _compare_with_plan(ranks: int, overrides: Sequence[str], outcomes: Sequence[Outcome]) -> None:
    config = make_config([*COMMON, *overrides], ranks)
    plans = [layer_inputs(config, ranks, each.stage) for each in rank_coordinates(config, ranks)]
    for plan, outcome in zip(plans, outcomes, strict=True):
        assert (plan.host, plan.device_peak) == (outcome.host_bytes, outcome.device_peak)
        assert (plan.copies_out, plan.copies_back) == (outcome.copies_out, outcome.copies_back)


def test_each_step_of_the_budget_takes_from_the_devices_peak() -> None:
    ranks, overrides = CASES["dense"]
    size = derived.layer_input_bytes(make_config([*COMMON, *overrides]))
    peaks = {}
    for number in (1, 2, 3, 4):
        (outcome,) = _outcomes(ranks, overrides, _mib(ranks, overrides, number))
        peaks[number] = outcome.device_peak // size
        assert outcome.host_bytes == number * size
        assert outcome.copies_out == 4 * number
    assert peaks == {1: 3, 2: 2, 3: 2, 4: 2}


def test_buffers_come_back_after_an_error() -> None:
    ranks, overrides = CASES["dense"]
    (without,), (outcome,) = (_outcomes(ranks, overrides, offload, True) for offload in ("none", "auto"))
    assert outcome.numbers == without.numbers
    assert outcome.copies_out == 4 * 4


def _refused(overrides: Sequence[str]) -> str:
    from training.starting import offload

    # one rank has nothing left
    headroom = mock.patch.object(offload, "_host_headroom", lambda: 2**30 * (1 - dist_rank()))
    with headroom, pytest.raises(ConfigError) as caught:
        _train(overrides)
    return str(caught.value)


def dist_rank() -> int:
    import torch.distributed as dist

    return dist.get_rank()


def test_all_ranks_refuse_what_one_has_not_the_memory_for() -> None:
    ranks, overrides = CASES["pipeline"]
    refusals = distributed.run(_refused, ranks, (*COMMON, *overrides, "training.activation_offload=1"))
    assert len(refusals) == 2 and all("Try training.activation_offload=auto" in each for each in refusals)


def test_a_run_tells_of_them(data: list[str], tmp_path: Path) -> None:
    overrides = [*COMMON, "experiment=gpt_tiny", "training.steps=2", "training.activation_offload=auto", *data]
    config = make_config([*overrides, f"run_dir={tmp_path}"])
    distributed.run(train, 1, config)
    size = derived.layer_input_bytes(config)
    for line in read_metrics(tmp_path):
        assert line["memory"]["layer_inputs_device_peak"] == 2 * size
        assert line["memory"]["layer_inputs_host"] == 4 * size
