"""The CUDA path on a pretended device, against the same layout on the CPU; and how often its host waits.

See docs/decisions/pretended-gpu.md.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from dataclasses import dataclass

import pytest
import torch

from tests import distributed
from tests.cuda import launches, places, runs
from tests.cuda.observed import OBSERVED, Mutant
from tests.tolerances import FP32_GRAD_NORM, FP32_LOSS, PRETENDED_HALF_GRAD_NORM, PRETENDED_HALF_LOSS

# the first test of a session starts up to eight processes
pytestmark = [pytest.mark.cuda_pretended, pytest.mark.timeout(300)]

NUM_LAYERS = 2
TIMEOUT = 100.0  # seconds
LATENT = (
    "model.attention=latent",
    "model.kv_lora_rank=32",
    "model.head_dim=16",
    "model.rotary_head_dim=8",
    "model.value_head_dim=16",
)
SHARED_EXPERT = "moe.shared_expert_ffn_hidden_size=64"


@dataclass(frozen=True)
class Case:
    """A layout; `waits` are those of a step, on rank 0."""

    ranks: int
    overrides: tuple[str, ...]
    waits: dict[tuple[str, str], int]
    precision: str = "bf16"
    ranks_per_node: int | None = None
    card: str | None = None  # see runs.CARDS
    one_sided: bool = False  # all tokens go to the first half of the experts


def _experts(*overrides: str) -> tuple[str, ...]:
    return "model=gpt_moe_tiny", *overrides


def _chunks(forward: int, backward: int) -> tuple[str, ...]:
    return f"moe.pipeline_degree={forward}", f"moe.backward_pipeline_degree={backward}"


def _expert_parallel(strategy: str, *overrides: str) -> tuple[str, ...]:
    return _experts("parallel.expert=2", f"moe.memory_strategy={strategy}", *overrides)


FLAT = places.waits(places.FLAT, NUM_LAYERS * 2)
CASES = {
    "dense": Case(1, ("model=gpt_tiny",), places.waits({}, 0), "fp32"),
    "experts on one rank": Case(1, _experts(), places.waits({}, 0)),
    "keep": Case(2, _expert_parallel("keep"), FLAT),
    "keep, chunks": Case(2, _expert_parallel("keep", SHARED_EXPERT, *_chunks(4, 2)), FLAT),
    "recompute": Case(2, _expert_parallel("recompute", SHARED_EXPERT), FLAT),
    "recompute, chunks": Case(2, _expert_parallel("recompute", *_chunks(4, 2)), FLAT),
    "offload": Case(2, _expert_parallel("offload"), FLAT),
    "offload, chunks": Case(2, _expert_parallel("offload", SHARED_EXPERT, *_chunks(4, 4)), FLAT),
    "hierarchical": Case(
        4,
        _experts("parallel.expert=4", "moe.all_to_all=hierarchical", SHARED_EXPERT, *_chunks(4, 2)),
        places.waits(places.HIERARCHICAL, NUM_LAYERS),
        ranks_per_node=2,
    ),
    "communicate": Case(2, _expert_parallel("communicate_recompute", *_chunks(2, 2)), FLAT),
    "capacity": Case(2, _expert_parallel("keep", "moe.capacity_factor=1.0"), FLAT),
    "recompute layers": Case(
        2, _expert_parallel("keep", "training.recompute=full"), places.waits(places.FLAT_TWICE, NUM_LAYERS * 2)
    ),
    "tensor": Case(
        2,
        _expert_parallel("keep", "parallel.tensor=2", "parallel.sequence=true"),
        places.waits(places.FLAT, NUM_LAYERS * 4),
    ),
    "bert": Case(2, ("model=bert_moe_tiny", "parallel.expert=2"), FLAT),
    "fp16": Case(
        2,
        _expert_parallel("keep"),
        places.waits(places.LOOP_OVER_EXPERTS, NUM_LAYERS * 2),
        "fp16",
    ),
    "empty groups": Case(
        2,
        _expert_parallel("keep", "moe.num_experts=32", *_chunks(4, 4)),
        FLAT,
        card="leaves empty groups",
    ),
    "older card": Case(
        2,
        _expert_parallel("keep", *_chunks(4, 2)),
        places.waits(places.LOOP_OVER_EXPERTS, NUM_LAYERS * 2),
        card="A100",
    ),
    "loop on one rank": Case(1, _experts(), places.waits(places.LOOP_LOCAL, NUM_LAYERS * 4), "fp32"),
    "pipeline": Case(2, ("model=gpt_tiny", "parallel.pipeline=2"), places.waits({}, 0)),
    "experts in a pipeline": Case(
        4, _expert_parallel("keep", "parallel.pipeline=2"), places.waits(places.FLAT, NUM_LAYERS * 2 // 2)
    ),
    "latent attention": Case(2, _expert_parallel("keep", *LATENT), FLAT),
    "communicate, two degrees": Case(2, _expert_parallel("communicate", SHARED_EXPERT, *_chunks(4, 2)), FLAT),
    "communicate and offload": Case(2, _expert_parallel("communicate_offload", *_chunks(2, 2)), FLAT),
    "offload and recompute": Case(2, _expert_parallel("offload_recompute", *_chunks(2, 2)), FLAT),
    "a rank without rows": Case(2, _expert_parallel("keep", *_chunks(4, 2)), FLAT, one_sided=True),
    "interleaved": Case(
        2,
        ("model=gpt_tiny", "parallel.pipeline=2", "parallel.virtual_pipeline=2", "model.num_layers=4"),
        places.waits({}, 0),
    ),
}


def _run(name: str, device: str, mutant: Mutant | None = None, early: bool = False) -> list[runs.Outcome]:
    case = CASES[name]
    overrides = (f"model.num_layers={NUM_LAYERS}", f"training.precision={case.precision}", *case.overrides)
    backend = distributed.PRETENDED if device == "cuda" else "gloo"
    arguments = device, overrides, case.ranks_per_node, mutant, case.card, early, case.one_sided
    return distributed.run(runs.train, case.ranks, *arguments, timeout=TIMEOUT, backend=backend)


@functools.cache
def _on_device(name: str) -> list[runs.Outcome]:
    return _run(name, "cuda")


@functools.cache
def _on_cpu(name: str) -> list[runs.Outcome]:
    return _run(name, "cpu")


@pytest.mark.parametrize("name", CASES)
def test_numbers_are_the_cpus(name: str) -> None:
    _compare(name, _on_device(name))


@pytest.mark.parametrize("name", ["keep, chunks", "offload, chunks", "hierarchical", "pipeline"])
def test_numbers_are_the_cpus_where_everything_comes_early(name: str) -> None:
    _compare(name, _run(name, "cuda", early=True))


def _compare(name: str, outcomes: list[runs.Outcome]) -> None:
    loss, norm = PRETENDED_HALF_LOSS, PRETENDED_HALF_GRAD_NORM
    if CASES[name].precision == "fp32":
        loss, norm = FP32_LOSS, FP32_GRAD_NORM
    for outcome, of_cpu in zip(outcomes, _on_cpu(name), strict=True):
        assert outcome.device == "cuda:0" and of_cpu.device == "cpu"
        assert not outcome.faults, outcome.faults
        assert outcome.losses == pytest.approx(of_cpu.losses, rel=loss)
        assert outcome.grad_norms == pytest.approx(of_cpu.grad_norms, rel=norm)


@pytest.mark.parametrize("name", CASES)
def test_waits(name: str) -> None:
    """The host waits for the device where the table says, and nowhere else."""
    found, table = _on_device(name)[0].waits, Counter(CASES[name].waits)
    new = [f"{count} new: {kind} in {place}" for (kind, place), count in (found - table).items()]
    gone = [f"{count} gone: {kind} in {place}" for (kind, place), count in (table - found).items()]
    assert not new + gone, "host synchronisations of one step, against tests/cuda/places.py:\n" + "\n".join(new + gone)


def test_groups_without_rows_were_there() -> None:
    assert sum(outcome.empty_groups for outcome in _on_device("empty groups")) > 0


@pytest.mark.parametrize("degree", launches.DEGREES)
def test_launches(degree: int) -> None:
    """The table in benchmarks/results/launches.md."""
    found = launches.per_layer(launches.measure(degree))
    assert sum(found.values()) == launches.LAUNCHES[degree], found


@pytest.mark.parametrize("name", places.MUTANTS)
def test_a_missing_wait_is_noticed(name: str) -> None:
    """The case passes as it is, see above; without the call its numbers are no numbers, or counts read too early stop
    it."""
    what, place, case = places.MUTANTS[name]
    try:
        outcomes = _run(case, "cuda", Mutant(what, place))
    except distributed.RankError as error:
        assert "Overflow" in str(error) or "negative" in str(error), error
        return
    assert any(outcome.mutant is not None and outcome.mutant.left_out > 0 for outcome in outcomes), (
        f"{what} was not called through {place}"
    )
    for outcome in outcomes:
        assert not all(map(math.isfinite, outcome.losses + outcome.grad_norms))


def _kinds_of_waits() -> dict[str, int]:
    from tests.cuda.device import Device

    with Device():
        values, host = torch.arange(6, device="cuda"), torch.zeros(6, dtype=torch.int64)
        pinned = torch.zeros(6, dtype=torch.int64, pin_memory=True)
        OBSERVED.waits.clear()
        # None of these waits.
        values.copy_(pinned, non_blocking=True)
        pinned.copy_(values, non_blocking=True)
        pinned[:3].to("cuda", non_blocking=True)
        torch.nonzero_static(values, size=6)
        values[values > 3] = 0
        values[torch.tensor(2)] += 1
        assert not OBSERVED.waits, OBSERVED.waits
        values.sum().item()
        bool(values.any())
        values.tolist()
        values.nonzero()
        values[values > 3]
        values[torch.tensor([1, 2])]
        values.cpu()
        values.copy_(host)
        host.copy_(values, non_blocking=True)  # to memory that is not pinned
        host.to("cuda", non_blocking=True)
        torch.tensor([1, 2], device="cuda")
        torch.repeat_interleave(values, values)
        torch.bincount(values)
        torch.cuda.Event().synchronize()
        torch.cuda.current_stream().synchronize()
        torch.cuda.synchronize()
        counts: Counter[str] = Counter()
        for (kind, _), count in OBSERVED.waits.items():
            counts[kind] += count
        return dict(counts)


def test_every_kind_of_wait_is_counted() -> None:
    assert distributed.run(_kinds_of_waits, 1, backend=distributed.PRETENDED) == [
        {
            "item": 2,
            "tolist": 1,
            "nonzero": 1,
            "boolean index": 1,
            "host index": 1,
            "copy to host": 2,
            "copy to device": 3,
            "repeat_interleave": 1,
            "bincount": 1,
            "event.synchronize": 1,
            "stream.synchronize": 1,
            "device synchronize": 1,
        }
    ]


def _mix() -> None:
    from tests.cuda.device import Device

    with Device():
        torch.ones(3, device="cuda") + torch.ones(3)


def test_mixed_devices_are_refused() -> None:
    with pytest.raises(distributed.RankError, match=r"aten.add.Tensor got a tensor \(3,\) of the host"):
        distributed.run(_mix, 1, backend=distributed.PRETENDED)
