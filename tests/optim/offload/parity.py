"""Trainings of one model with optimizer state on the device and elsewhere, compared bit for bit on every rank."""

from __future__ import annotations

import contextlib
import functools
import itertools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch

from configs.schema import Config
from optim.arrangement import buckets, engines
from tests.training.helpers import make_config

VOCAB_SIZE = 256  # a whole number of padded blocks
SAMPLES = 8  # of the global batch
SIZES = [
    *("model.sequence_length=16", "model.vocab_size=null", "data.vocab_size=320"),
    *(f"training.global_batch_size={SAMPLES}", "training.micro_batch_size=2"),
]
SMALL, LARGE = 4096, 2**24  # parameters of a bucket: most slices of the tiny models are cut, or none
DDP_BUCKET = 20_000  # parameters of DDP's buckets: several are reduced while the backward pass goes on
SLOW = 4e7  # bytes per second of the link and of the host: a step's update takes longer than its forward pass
CLIPS = ("most", "some", "none")  # of the steps are clipped
PACES = ("free", "eager", "slow")
FP16_SCALE = 2**18  # overflows in some of the first steps, which are not taken
CHOOSE_AGAIN = 3  # the step before which engines are chosen anew


@dataclass(frozen=True)
class Variant:
    """Where the state lives and how it is updated there."""

    device: str = "host"  # optimizer.state_device
    engine: str = "device_stream"
    early: str = "never"  # optimizer.early_update
    bucket: int = SMALL
    # eager: early updates are over before the backward pass goes on; slow: copy streams are held to a rate, so that
    # updates are still under way when the next forward pass begins.
    pace: str = "free"

    def __str__(self) -> str:
        size = "small" if self.bucket == SMALL else "large"
        return f"{self.device} {self.engine} {self.early} {size} {self.pace}"


@dataclass
class Snapshot:
    """What a training came to on a rank."""

    numbers: list[tuple[Any, ...]]  # of each step: loss, gradient norm, whether the weights were changed, other losses
    tensors: dict[str, torch.Tensor]  # weights, and the state of what this rank owns by parameter and kind
    committed: int = 0
    dropped: int = 0
    device_bytes: int = 0
    bucket_counts: tuple[int, ...] = ()  # how many buckets are on the device, the host, the disk

    def clipped(self, limit: float) -> int:
        """Steps whose gradients were clipped, of those taken."""
        return sum(updated and limit > 0 and limit / (norm + 1e-6) < 1 for _, norm, updated, *_ in self.numbers)


@dataclass(frozen=True)
class Outcome:
    """One variant beside the run whose state is on the device, on one rank."""

    differences: tuple[str, ...]  # names of what differs
    compared: int  # tensors
    committed: int
    dropped: int
    clipped: int
    taken: int
    bucket_counts: tuple[int, ...]


def config_of(model: Sequence[str], ranks: int, precision: str, *overrides: str) -> Config:
    """A checked config with the tiny sizes."""
    scale = f"training.initial_loss_scale={FP16_SCALE}"
    return make_config([*model, *SIZES, f"training.precision={precision}", scale, *overrides], ranks)


def with_variant(config: Config, variant: Variant, folder: str) -> Config:
    """The same training with its state elsewhere."""
    return replace(
        config,
        optimizer=replace(
            config.optimizer,
            state_device=variant.device,
            engine=variant.engine,
            early_update=variant.early,
            bucket_parameters=variant.bucket,
        ),
        memory=replace(config.memory, disk_dir=folder or None),
    )


def batches_of(config: Config, step: int, rank: int, ranks: int) -> list[dict[str, torch.Tensor]]:
    """This data parallel rank's micro-batches of random tokens."""
    generator = torch.Generator().manual_seed(step)
    shape = (SAMPLES, config.model.sequence_length)
    batch = {
        "tokens": torch.randint(0, VOCAB_SIZE, shape, generator=generator),
        "labels": torch.randint(0, VOCAB_SIZE, shape, generator=generator),
        "loss_mask": (torch.rand(shape, generator=generator) < 0.7).float(),
    }
    if config.model.family == "bert":
        batch["types"] = torch.randint(0, 2, shape, generator=generator)
        batch["padding_mask"] = torch.ones(shape, dtype=torch.bool)
        batch["sentence_label"] = torch.randint(0, 2, (SAMPLES,), generator=generator)
    micro = config.training.micro_batch_size
    batches = [{name: value[i : i + micro] for name, value in batch.items()} for i in range(0, SAMPLES, micro)]
    return batches[rank::ranks]


@dataclass
class Training:
    """A training on this rank without data, callbacks and checkpoints."""

    config: Config
    pace: str = "free"
    ddp_bucket: int = DDP_BUCKET
    _built: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def __enter__(self) -> Training:
        from megatron.core.distributed import DistributedDataParallelConfig

        from optim.offload.optimizer import offload_of
        from parallel import topology
        from training.engine import Engine

        self.topology = topology.initialize(self.config)
        self._built.callback(topology.leave_layout)
        self._built.enter_context(mock.patch("optim.offload.optimizer.choose", _Alternate()))
        settings = functools.partial(DistributedDataParallelConfig, bucket_size=self.ddp_bucket)
        with (
            mock.patch("models.parallelize.DistributedDataParallelConfig", settings),
            mock.patch("optim.offload.builder.arrange", _in_thirds),
        ):
            self.engine = Engine(self.config, self.topology, VOCAB_SIZE)
        self._built.callback(self.engine.close)
        self.tiers = offload_of(self.engine.optimizer)
        if self.tiers is not None:
            _set_pace(self.tiers, self.engine.chunks, self.pace)
        return self

    def __exit__(self, *_: Any) -> None:
        self._built.close()

    def step(self, step: int) -> tuple[Any, ...]:
        """Take it; its numbers."""
        from training.step import train_step

        if step == CHOOSE_AGAIN and self.tiers is not None and self.tiers.memory.arrangement.flexible:
            self.tiers.choose(self.config.optimizer.engine)
        data = self.topology.data
        result = train_step(self.engine, batches_of(self.config, step, data.rank, data.size), step)
        return (result.loss, result.grad_norm, result.updated, *result.extra.values())

    def snapshot(self, numbers: list[tuple[Any, ...]]) -> Snapshot:
        """Copies of all that this rank holds."""
        tensors: dict[str, torch.Tensor] = {}
        named = [(f"{i}.{n}", p) for i, chunk in enumerate(self.engine.chunks) for n, p in chunk.named_parameters()]
        with self.engine.frozen_weights():
            tensors |= {name: parameter.detach().clone().view(-1) for name, parameter in named}
        if self.tiers is None:
            return Snapshot(numbers, tensors | _state_on_device(self.engine.optimizer, named))
        assert self.tiers.problem() is None, self.tiers.problem()
        tensors |= held_state(self.tiers, {id(parameter): name for name, parameter in named})
        memory = self.tiers.memory
        bucket_counts = [list(memory.arrangement.targets).count(tier) for tier in ("device", "host", "disk")]
        early = self.tiers.num_committed, self.tiers.num_dropped
        return Snapshot(numbers, tensors, *early, memory.arrangement.device_bytes, tuple(bucket_counts))


class _Alternate:
    """`choose`, except for `split`, which would choose one engine for all buckets of so small a model: there the
    engines alternate, and change at each call."""

    def __init__(self) -> None:
        self._calls = 0

    def __call__(
        self, engine: str, numels: Any, targets: Sequence[buckets.Target], *rest: Any
    ) -> list[buckets.BucketEngine]:
        self._calls += 1
        if engine != "split":
            return engines.choose(engine, numels, targets, *rest)
        turns: itertools.cycle[buckets.BucketEngine] = itertools.cycle(("device_stream", "host"))
        chosen = [next(turns) for _ in range(self._calls + len(targets))][self._calls :]
        return ["device" if target == "device" else own for target, own in zip(targets, chosen, strict=True)]


def _in_thirds(request: buckets.ArrangementRequest, capacity: buckets.Capacity) -> buckets.Arrangement | None:
    """`arrange`, but where it has a choice a third of the buckets on the device, on the host and on the disk each."""
    if request.state_device != "auto":
        return buckets.arrange(request, capacity)
    count, early = len(request.numels), request.early_update != "never"
    return buckets._filled(request, count // 3, count - (count + 1) // 3, early and request.overlaps, request.overlaps)


def held_state(tiers: Any, names: dict[int, str]) -> dict[str, torch.Tensor]:
    """The state as a save reads it, by parameter and kind."""
    tensors: dict[str, torch.Tensor] = {}
    snapshot = tiers.snapshot()
    try:
        for index, bucket in enumerate(tiers.buckets):
            for kind, flat in snapshot.read(index).items():
                for span in bucket.slice_spans:
                    owned = tiers.slices[span.index]
                    key = f"{names[id(owned.parameter)]} {owned.start}:{owned.end} {kind}"
                    target = tensors.setdefault(
                        key, torch.full((owned.end - owned.start,), torch.nan, dtype=flat.dtype)
                    )
                    view = flat[span.offset : span.offset + span.end - span.start]
                    target[span.start - owned.start : span.end - owned.start] = view
            snapshot.release(index)
    finally:
        snapshot.close()
    return tensors


def _state_on_device(optimizer: Any, named: Sequence[tuple[str, torch.nn.Parameter]]) -> dict[str, torch.Tensor]:
    from parallel.megatron.optimizer import find_held

    tensors = {}
    for (name, parameter), owned in zip(named, find_held(optimizer, [p for _, p in named]), strict=True):
        if owned is None or owned.start == owned.end:
            continue
        kinds = {kind: owned.state[kind] for kind in ("exp_avg_sq", "exp_avg")}
        if parameter.dtype != torch.float32:
            kinds["master"] = owned.main
        for kind, value in kinds.items():
            tensors[f"{name} {owned.start}:{owned.end} {kind}"] = value.detach().clone().view(-1)
    return tensors


def _set_pace(tiers: Any, chunks: Sequence[Any], pace: str) -> None:
    if pace == "slow":
        link = tiers.memory.link
        for stream in (link.up, link.down, link.host, link.read, link.write):
            stream.rate = SLOW
    if pace == "eager":

        def reduced(group: Any) -> None:
            tiers.reduced(group)
            for done in (*tiers._left.values(), *(update.done for update in tiers._early.values())):
                done.wait()

        for chunk in chunks:
            for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
                group.reduced = reduced


def run(config: Config, steps: int, pace: str = "free") -> Snapshot:
    """Train on this rank."""
    with Training(config, pace) as training:
        return training.snapshot([training.step(step) for step in range(1, steps + 1)])


def differences(ours: Snapshot, theirs: Snapshot) -> tuple[str, ...]:
    """Names of steps and tensors that are not the same bits."""
    steps = [f"step {i + 1}" for i, (a, b) in enumerate(zip(ours.numbers, theirs.numbers, strict=True)) if a != b]
    names = sorted(ours.tensors.keys() ^ theirs.tensors.keys())
    both = ours.tensors.keys() & theirs.tensors.keys()
    return (*steps, *names, *(name for name in sorted(both) if not _same(ours.tensors[name], theirs.tensors[name])))


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def limits(config: Config, steps: int, clips: Sequence[str]) -> Iterator[tuple[str, Config]]:
    """The same training clipped in most, some and none of its steps."""
    free = replace(config, optimizer=replace(config.optimizer, clip_grad=0.0))
    norms = sorted(norm for _, norm, updated, *_ in run(free, steps).numbers if updated) if clips != ["none"] else []
    for clip in clips:
        value = 1e4
        if clip == "most":
            value = norms[0] * (1.001 if len(norms) > 2 else 0.5)
        elif clip == "some":
            value = statistics.median_low(norms) * 1.001
        yield clip, replace(config, optimizer=replace(config.optimizer, clip_grad=value))


def outcomes(config: Config, clip: str, variants: Sequence[Variant], steps: int, folder: str = "") -> list[Outcome]:
    """On a rank: each variant of a training beside the one whose state is on the device. `folder`: for state on the
    disk."""
    ((_, config),) = limits(config, steps, [clip])
    device = run(config, steps)
    limit, found = config.optimizer.clip_grad, []
    for variant in variants:
        ours = run(with_variant(config, variant, folder), steps, variant.pace)
        counts = ours.committed, ours.dropped, ours.clipped(limit), sum(updated for _, _, updated, *_ in ours.numbers)
        found.append(Outcome(differences(ours, device), len(ours.tensors), *counts, ours.bucket_counts))
    return found


def problems(variant: Variant, clip: str, ranks: Sequence[Outcome]) -> list[str]:
    """What is wrong with a variant: bits that differ, or a case that did not come to what it is there for."""
    used = {"host": [1], "disk": [2], "auto": [0, 1, 2]}[variant.device]
    found = [f"rank {rank}: {', '.join(each.differences[:4])}" for rank, each in enumerate(ranks) if each.differences]
    committed, dropped = sum(each.committed for each in ranks), sum(each.dropped for each in ranks)
    clipped, taken = ranks[0].clipped, ranks[0].taken
    if {"most": clipped <= taken / 2, "some": not 0 < clipped < taken, "none": clipped > 0}[clip]:
        found.append(f"{clip} were to be clipped, {clipped} of {taken} steps were")
    if not all(_is_placed(each.bucket_counts, used) for each in ranks):
        found.append(f"buckets are on {[each.bucket_counts for each in ranks]}")
    always = variant.early == "always" and variant.pace != "slow"  # slow copy streams may get nothing done early
    if always and clipped < taken and committed == 0:
        found.append("no early update was kept")
    if always and clipped > 0 and dropped == 0:
        found.append("no early update was dropped")
    if variant.early == "auto" and variant.pace != "slow" and clip == "none" and committed == 0:
        found.append("no early update was kept")
    if variant.early == "never" and committed + dropped > 0:
        found.append("an early update was made")
    return found


def _is_placed(bucket_counts: Sequence[int], used: Sequence[int]) -> bool:
    """Whether a rank's buckets are on the tiers that it is to use, and on each where it has as many buckets."""
    filled = [count for count, number in enumerate(bucket_counts) if number > 0]
    return set(filled) <= set(used) and len(filled) == min(len(used), sum(bucket_counts))


def variants(devices: Sequence[str], engines: Sequence[str]) -> list[Variant]:
    """All of them, in an order in which any few in a row differ in many ways."""
    axes = itertools.product(("never", "always", "auto"), (SMALL, LARGE), PACES)
    return [Variant(device, engine, *rest) for rest in axes for device in devices for engine in engines]
