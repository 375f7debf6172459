"""Experts off the device train as those on it, bit for bit, and move the bytes that their plan counts."""

from __future__ import annotations

import contextlib
import errno
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from base.errors import ConfigError
from benchmarks.kit.checkpoint_bits import checkpoint_differences
from configs import derived
from configs.job import Job
from optim.arrangement.experts import expert_traffic
from simulator.run_plan import make_plan, refuse_what_cannot_fit
from tests import distributed
from tests.checkpoint.test_stored_state import another, save
from tests.configs import advice
from tests.tolerances import FP32_GRAD_NORM, FP32_LOSS
from tests.training.helpers import largest_difference, make_config
from tests.training.test_step import SAMPLES, SMALL, VOCAB_SIZE, batches_of, build

HOST = ("moe.weights_device=host", "optimizer.state_device=host")
HOST_DISK = ("moe.weights_device=host", "optimizer.state_device=disk")
DISK = ("moe.weights_device=disk", "optimizer.state_device=disk")
HALF_DISK = (*DISK, "training.precision=bf16")
BUCKETS = ("optimizer.bucket_parameters=4096",)  # which cut matrices
ODD = ("model.hidden_size=40", "moe.ffn_hidden_size=24", "moe.num_experts=6")
FULL = "training.recompute=full"
BY_LAYER = ("training.pass_order=by_layer",)
EARLY = ("optimizer.early_update=always", "parallel.overlap_grad_reduce=true", "optimizer.distributed=true")
FOUR_LAYERS = ("model.num_layers=4",)
MOVES = (
    *(
        "moe.placement.policy=solve",
        "moe.placement.max_load=1.0",
        "moe.placement.extra_slots=2",
        "moe.placement.interval=1",
        "moe.num_experts=8",
    ),
    "moe.aux_loss_coeff=0",
)
STEPS = 3
# (ranks, overrides of both, overrides of the streamed one).
# All of them: python -m benchmarks.checks.expert_tiers_parity
CASES: dict[str, tuple[int, tuple[str, ...], tuple[str, ...]]] = {
    "one rank, odd sizes, biases, disk, three slots": (
        1,
        (*ODD, *FOUR_LAYERS, "model.linear_bias=true", "moe.memory_strategy=recompute", "moe.pipeline_degree=2"),
        (*DISK, *EARLY, "moe.weight_slots=3"),
    ),
    "by layer in bf16, host": (
        1,
        (FULL, "training.precision=bf16", "optimizer.moment_dtype=bf16", "model.tie_embeddings=false"),
        (*HOST, *BY_LAYER, *EARLY, "training.activation_offload=auto"),
    ),
    "bert, capacity, one micro-batch, host and disk": (
        1,
        ("experiment=bert_moe_tiny", "moe.capacity_factor=1.0", "training.micro_batch_size=8"),
        HOST_DISK,
    ),
    "parts of two ranks, odd sizes, disk, one slot": (
        2,
        (*ODD, "optimizer.clip_grad=0.1"),
        (*DISK, *BUCKETS, *EARLY, "moe.weight_slots=1"),
    ),
    "all of it on two ranks, by layer, clipped": (
        2,
        (FULL, "model.tie_embeddings=false", "optimizer.clip_grad=0.1", "training.micro_batch_size=2"),
        (*HOST, *BY_LAYER, "moe.shard_weights=false"),
    ),
    "expert parallel, copies in blocks, offload, host": (
        2,
        (
            *("parallel.expert=2", "moe.memory_strategy=offload", "training.recompute=selective", *MOVES),
            *("moe.placement.bitwise=true", "moe.placement.block_rows=8", "moe.shared_expert_ffn_hidden_size=24"),
        ),
        HOST,
    ),
    "pipeline in bf16, disk": (2, ("parallel.pipeline=2", "training.precision=bf16", "moe.token_budget=24"), DISK),
}


def config_of(overrides: Sequence[str], ranks: int = 1, folder: Path | None = None) -> Any:
    """Two layers, small. `folder`: on a disk."""
    sizes = [
        f"training.global_batch_size={SAMPLES}",
        "training.micro_batch_size=2",
        f"memory.disk_dir={folder or 'null'}",
    ]
    return make_config(["experiment=gpt_moe_tiny", *SMALL, *sizes, *overrides], ranks)


def numbers_of(engine: Any, steps: Sequence[int]) -> list[tuple[Any, ...]]:
    """What steps report on this rank; behind the first stand an evaluation and a step that is refused."""
    from training.step import evaluate, gradients, run_again, train_step

    data, found = engine.topology.data, list[tuple[Any, ...]]()
    for step in steps:
        batches = batches_of(engine.config, step)[data.rank :: data.size]
        result = train_step(engine, batches, step)
        counts = None if result.tokens_per_expert is None else result.tokens_per_expert.tolist()
        found.append((result.loss, result.grad_norm, result.extra, counts))
        if step == steps[0]:
            found.append((evaluate(engine, iter([batches])),))
            before = engine.snapshot()
            gradients(engine, batches, step + 1)
            before.roll_back()
            run_again(engine, batches)
    return found


def train_both(resident: Any, streamed: Any, folder: Path) -> tuple[Any, Any]:
    """Steps of both, which each save, and one more of each from the other's checkpoint."""
    from training.progress import load

    on_device = build(resident)
    engines = {"resident": on_device, "streamed": another(on_device, streamed)}
    numbers = {}
    for name, engine in engines.items():
        numbers[name] = numbers_of(engine, range(1, STEPS + 1))
        save(engine, folder / name, STEPS)
    for name, other in (("resident", "streamed"), ("streamed", "resident")):
        load(engines[name], folder / other)
        numbers[name] += numbers_of(engines[name], [STEPS + 1])
    for engine in engines.values():
        engine.synchronize()
        engine.close()
    return numbers["resident"], numbers["streamed"]


@pytest.mark.parametrize("name", CASES)
def test_streamed_experts_have_the_bits_of_resident_ones(name: str, tmp_path: Path) -> None:
    ranks, both, streamed = CASES[name]
    configs = config_of(both, ranks), config_of([*both, *streamed], ranks, tmp_path)
    for resident, ours in distributed.run(train_both, ranks, *configs, tmp_path):
        assert len(ours) == 2 * STEPS and ours == resident
    compared, differ = checkpoint_differences(tmp_path / "streamed", tmp_path / "resident")
    assert compared > 20 and [each for each in differ if not each.startswith("random.")] == []


def test_three_holders_add_up_in_another_order(tmp_path: Path) -> None:
    """Two summands have one order. Of three, `experts_off_device.md` promises losses alone."""
    both = ["parallel.context=3", "model.sequence_length=24", "training.micro_batch_size=4"]
    configs = config_of(both, 3), config_of([*both, *HOST], 3, tmp_path)
    numbers = distributed.run(losses_of_both, 3, *configs)
    assert numbers == [numbers[0]] * 3
    resident, ours = numbers[0]
    assert largest_difference(ours, resident, "loss") < FP32_LOSS
    assert largest_difference(ours, resident, "grad_norm") < FP32_GRAD_NORM


def losses_of_both(resident: Any, streamed: Any) -> list[list[dict[str, Any]]]:
    """Steps of both."""
    from training.step import train_step

    engines, found = [on_device := build(resident), another(on_device, streamed)], []
    for engine in engines:
        results = [train_step(engine, batches_of(engine.config, step), step) for step in range(1, STEPS + 1)]
        found.append([{"step": i, "loss": each.loss, "grad_norm": each.grad_norm} for i, each in enumerate(results)])
    for engine in engines:
        engine.synchronize()
        engine.close()
    return found


def counted(config: Any) -> dict[str, Any]:
    """On a rank: what the second step moved of experts, and what they take of the device."""
    from memory.copy_stream import CopyStream
    from optim.offload.experts import OffloadedExperts
    from optim.offload.optimizer import offload_of
    from training.step import train_step

    link, submit = Counter[str](), CopyStream.submit

    def of_experts(method: Any) -> Any:
        def call(*args: Any) -> Any:
            with mock.patch.object(CopyStream, "submit", counting):
                return method(*args)

        return call

    def counting(stream: Any, work: Any, after: Any = (), num_bytes: int = 0, **rest: Any) -> Any:
        link[stream.name] += num_bytes
        return submit(stream, work, after, num_bytes, **rest)

    methods = {name: of_experts(getattr(OffloadedExperts, name)) for name in ("bring", "add", "sum_to", "finish")}
    with mock.patch.multiple(OffloadedExperts, **methods):
        engine = build(config)
        tiers, stream, data = offload_of(engine.optimizer), engine.experts, engine.topology.data
        assert tiers is not None and tiers.experts is not None and stream is not None
        store, disk = tiers.experts.store, tiers.experts.disk
        found = dict[str, Any]()
        for step in (1, 2):
            link.clear()
            of_disk = (0, 0) if disk is None else (disk.num_read, disk.num_written)
            before, moved = (stream.counts.fetched, *of_disk), tiers.experts.moved
            train_step(engine, batches_of(config, step)[data.rank :: data.size], step)
            engine.synchronize()
            for index in range(len(store.sizes)):
                store.last_write(index).wait()
            of_disk = (0, 0) if disk is None else (disk.num_read, disk.num_written)
            names, after = ("fetched", "read", "written"), (stream.counts.fetched, *of_disk)
            found = {name: b - a for name, a, b in zip(names, before, after, strict=True)}
            found["moved"] = {name: value - moved[name] for name, value in tiers.experts.moved.items()}
        found |= {"up": link["to device"], "down": link["from device"]}
        found |= {"slots": stream.nbytes, "asked": stream.counts.asked}
        engine.close()
    return found


COUNTED: dict[str, tuple[int, tuple[str, ...]]] = {
    "by micro-batch": (1, DISK),
    "by layer": (1, (*DISK, FULL, *BY_LAYER)),
    "parts": (2, (*DISK, FULL, *BY_LAYER)),
    "all": (2, (*DISK, FULL, *BY_LAYER, "moe.shard_weights=false")),
    "by micro-batch, host": (1, HOST),
    "parts, host": (2, HOST),
    "all, host": (2, (*HOST, "moe.shard_weights=false", "training.precision=bf16")),
    "parts by layer, host": (2, (*HOST, FULL, *BY_LAYER)),
    "three slots": (1, (*DISK, "moe.weight_slots=3")),
}


def test_a_step_moves_what_its_plan_counts(tmp_path: Path) -> None:
    found = {}
    for name, (ranks, more) in COUNTED.items():
        config = config_of(["model.num_layers=3", *more], ranks, tmp_path)
        plan = expert_traffic(config, ranks, 0)
        assert plan is not None
        here = found[name] = distributed.run(counted, ranks, config)[-1]
        records = plan.layer.records
        assert here["asked"] == 0 and here["fetched"] == len(plan.fills), name
        assert here["slots"] == records.weights_on_device + records.grads_on_device, name
        each = config.moe.weight_slots * records.weight_bytes + records.grad_slots * records.grad_slot_bytes
        assert here["slots"] == each * records.padded_numel, name
        assert here["up"] == plan.total.up, name
        assert here["down"] == plan.total.down, name
        # in a file of its own
        state = plan.layer.state_bytes * records.shard_numel * records.num_layers * plan.layer.on_disk
        assert here["read"] == plan.total.read - state and here["written"] == plan.total.written - state, name
        assert here["moved"] == {way: here[way] for way in ("up", "down", "read", "written")}, name
        # Beside what stays in a slot where passes turn, all three layers' weights come in each pass.
        by_layer = config.training.pass_order == "by_layer"
        passes = 2 * (1 if by_layer else derived.num_micro_batches(config, ranks))
        assert here["fetched"] == 3 * passes - config.moe.weight_slots * (passes - 1), name
    assert 2 * found["parts"]["read"] == found["all"]["read"] and 2 * found["parts"]["up"] == found["all"]["up"]


@pytest.mark.parametrize("tier", [HOST, DISK], ids=["host", "disk"])
def test_the_budget_that_is_proposed_is_enough(tier: tuple[str, ...], tmp_path: Path) -> None:
    def refused(budget: str) -> str:
        plan = make_plan(Job(config_of([*tier, budget], 1, tmp_path), 1, VOCAB_SIZE, "cpu"))
        with pytest.raises(ConfigError, match="for experts and optimizer state of rank 0") as caught:
            refuse_what_cannot_fit(plan)
        return str(caught.value)

    field, ((proposed,),) = advice.split(refused("memory.host_budget=0.05"))
    assert field == "memory.host_budget" and proposed.startswith("memory.host_budget=")
    peak, limit = distributed.run(built, 1, config_of([*tier, proposed], 1, tmp_path))[0]
    assert 0.5 * limit < peak <= limit == float(proposed.partition("=")[2]) * 2**20


def built(config: Any) -> tuple[int, float]:
    """Bytes of the host's budget at the peak of a step, and its limit."""
    from memory.budgets import HOST

    engine = build(config)
    numbers_of(engine, [1])
    engine.synchronize()
    found = HOST.peak, HOST.limit
    engine.close()
    return found


def failing(config: Any, call: str) -> tuple[str, bool]:
    """What a step says where the disk fails, and whether the weights are still those before it."""
    from memory.disk import DiskError
    from parallel.owned import is_off_device
    from training.engine import OffloadError

    engine = build(config)
    numbers_of(engine, [1])
    engine.synchronize()
    held = [each for chunk in engine.bare_chunks for each in chunk.parameters() if not is_off_device(each)]
    weights = [each.detach().clone() for each in held]

    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    said = "nothing"
    with mock.patch(f"memory.disk.os.{call}", fail):
        try:
            numbers_of(engine, [2])
            engine.synchronize()
        except (DiskError, OffloadError) as error:
            said = str(error)
    same = all(torch.equal(each, before) for each, before in zip(held, weights, strict=True))
    engine.close()
    return said, same


@pytest.mark.parametrize(("call", "what"), [("preadv", "read"), ("pwrite", "written")])
def test_a_disk_that_fails_is_named(call: str, what: str, tmp_path: Path) -> None:
    ((said, same),) = distributed.run(failing, 1, config_of(DISK, 1, tmp_path), call)
    advice = "Check the disk, or use a folder on another disk"
    assert said == f"memory.disk_dir ({tmp_path}) cannot be {what}: Input/output error. {advice}"
    assert same or call == "pwrite"  # weights come before a step changes any


def refused_at_start(config: Any) -> str:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    one = dist.get_rank() == 1
    with mock.patch("memory.disk.os.posix_fallocate", full) if one else contextlib.nullcontext():
        try:
            build(config)
        except ConfigError as error:
            return str(error)
    return "nothing"


def test_all_ranks_refuse_a_disk_that_one_finds_full(tmp_path: Path) -> None:
    for said in distributed.run(refused_at_start, 2, config_of(DISK, 2, tmp_path)):
        assert said.startswith(f"memory.disk_dir ({tmp_path}) must have ") and said.endswith("another disk (rank 1)")


def early_ones(config: Any) -> tuple[list[Any], int, int, int]:
    """On a rank, where no early update is cancelled: what steps report, and how many updates of experts' buckets were
    taken early, dropped, and made in all."""
    from optim.offload.optimizer import OffloadedOptimizer, offload_of
    from training.step import train_step

    with mock.patch.object(OffloadedOptimizer, "_cancel_ahead"):
        engine = build(config)
        tiers = offload_of(engine.optimizer)
        results = [train_step(engine, batches_of(config, step), step) for step in (1, 2, 3)]
        engine.synchronize()
        numbers = [(result.loss, result.grad_norm) for result in results]
        engine.close()
    of_experts = 0 if tiers is None else tiers.engines.count("record")
    counts = (0, 0) if tiers is None else (tiers.num_committed, tiers.num_dropped)
    return numbers, *counts, 3 * of_experts


@pytest.mark.parametrize(
    ("tier", "clip", "order"),
    [(HOST, "0", ()), (HOST, "0.1", (FULL, *BY_LAYER)), (HALF_DISK, "0", (FULL, *BY_LAYER)), (HALF_DISK, "0.1", ())],
    ids=["host", "host, clipped, by layer", "disk, by layer", "disk, clipped"],
)
def test_updates_come_early_to_shadows_that_a_clipped_step_drops(
    tier: Sequence[str], clip: str, order: Sequence[str], tmp_path: Path
) -> None:
    both = ["model.tie_embeddings=false", f"optimizer.clip_grad={clip}", *BUCKETS, *order]
    precision = [each for each in tier if each.startswith("training")]
    resident = config_of([*both, *precision, "training.pass_order=by_micro_batch"])
    expected = distributed.run(early_ones, 1, resident)[0][0]
    streamed = config_of([*both, *tier, *EARLY], folder=tmp_path)
    ((numbers, committed, dropped, made),) = distributed.run(early_ones, 1, streamed)
    assert numbers == expected and made > 0
    assert (committed, dropped)[clip == "0"] == 0 and (dropped, committed)[clip == "0"] >= made


def refused_in_memory(config: Any) -> str:
    with mock.patch("memory.disk._file_system", lambda folder: 0x01021994), pytest.raises(ConfigError) as caught:
        build(config)
    return str(caught.value)


def test_the_tier_that_is_proposed_instead_of_a_disk_is_allowed(tmp_path: Path) -> None:
    (said,) = distributed.run(refused_in_memory, 1, config_of(DISK, 1, tmp_path))
    field, (proposed, *_) = advice.split(said)
    assert field == "memory.disk_dir" and "tmpfs stores files in host memory" in said
    assert config_of([*DISK, *proposed], 1, tmp_path).moe.weights_device == "host"
