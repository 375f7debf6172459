"""Work of a pipeline stage besides its passes: reducing gradients, updating weights and gathering them."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from configs import derived
from configs.job import Job
from configs.schema import Config
from models.blueprint import model_chunks, padded_vocab_size
from optim.arrangement.buckets import Arrangement, Capacity, Target
from optim.arrangement.engines import Bandwidths, BucketEngine, ElementBytes, choose, work
from simulator.buffers import buffers
from simulator.clock.axes import DENSE_REPLICAS, EXPERT_REPLICAS, Group, collective
from simulator.clock.hardware import Hardware
from simulator.clock.passes import Reasons, Recipe
from simulator.offload.state import stage_arrangements
from simulator.sizes import FP32

# Bytes per parameter: reads both moments and the gradient, writes the moments; reads and writes the master weight.
MOMENT_BYTES, MASTER_BYTES = 5 * FP32, 2 * FP32
MOST_TASKS = 8  # maximum number of tasks per pass, so that a pass overlaps with other work
GROUP_OF_KIND = {"dense": DENSE_REPLICAS, "expert": EXPERT_REPLICAS}
Seconds = Mapping[str, float]  # by reason
KEPT = 4096  # layouts whose buckets are cached
_ends: OrderedDict[Any, list[dict[str, list[tuple[int, ...]]]]] = OrderedDict()


@dataclass(frozen=True)
class BucketJob:
    """Steps of the update of one offloaded bucket of optimizer state: (resource, reason, seconds) in order."""

    steps: tuple[tuple[str, str, float], ...]


@dataclass(frozen=True)
class StageRest:
    """Seconds of one rank of a pipeline stage besides passes: reductions, weight gathers, optimizer updates."""

    reductions: tuple[tuple[Seconds, ...], ...]  # of each model chunk's gradients, in the order of the backward pass
    gathers: tuple[tuple[Seconds, ...], ...]  # of each model chunk's weights, in the order of use
    update: Seconds  # on the device
    jobs: tuple[BucketJob, ...]  # of offloaded buckets
    early: bool  # jobs may run during the backward pass
    tied: Seconds  # sum of a tied embedding's gradients over the first and the last stage


def stage_rest(
    job: Job,
    hardware: Hardware,
    groups: Mapping[str, Group],
    recipe: Recipe,
    arrangements: Sequence[Arrangement | None] | None,
) -> list[StageRest]:
    """Return the seconds of each pipeline stage's work besides its passes: reductions, weight gathers and updates.

    `arrangements`: of offloaded optimizer state on one rank of each stage; None: arranged with unlimited host memory.
    """
    config, ends = job.config, bucket_ends(job)
    element, distributed = derived.element_size(config), config.optimizer.distributed
    if arrangements is None:
        arrangements = stage_arrangements(job, Capacity(device=hardware["device.memory"]))
    result = []
    for stage in range(config.parallel.pipeline):
        reductions, gathers, owned = list[tuple[Seconds, ...]](), list[tuple[Seconds, ...]](), 0.0
        for chunk in range(config.parallel.virtual_pipeline or 1):
            reduced, gathered = list[Seconds](), list[Seconds]()
            for kind, of_chunk in ends[stage].items():
                group, start = groups[GROUP_OF_KIND[kind]], 0
                for end in of_chunk[chunk]:
                    numbers, start = end - start, end
                    owned += numbers / (group.size if distributed else 1)
                    if group.size == 1:
                        continue
                    operation = "reduce_scatter" if distributed else "all_reduce"
                    seconds = collective(hardware, operation, group, numbers * recipe.gradient_bytes)
                    reduced.append({f"gradients:{group.link}": seconds})
                    if distributed:
                        seconds = collective(hardware, "all_gather", group, numbers * element)
                        gathered.append({f"weights:{group.link}": seconds})
            reductions.append(_at_most(reduced))
            gathers.append(_at_most(gathered[::-1]))  # buckets are in reverse order
        arrangement = arrangements[stage] if derived.has_own_optimizer_state(config) else None
        if arrangement is None:
            per_number = MOMENT_BYTES + FP32 + element if element == FP32 else MOMENT_BYTES + MASTER_BYTES + element
            update: Seconds = {"update": owned * per_number / hardware["device.rate"]}
            jobs, early = tuple[BucketJob, ...](), False
        else:
            update, jobs, early = _offloaded(arrangement, config, hardware, job.world_size)
        tied = _tied(config, job.vocab_size, hardware, groups, stage)
        result.append(StageRest(tuple(reductions), tuple(gathers), update, jobs, early, tied))
    return result


def bucket_ends(job: Job) -> list[dict[str, list[tuple[int, ...]]]]:
    """Return the end offsets of gradient buckets in elements, by pipeline stage, kind of weights and model chunk.

    Stages with equal buffers are computed once.
    """
    config, parallel = job.config, job.config.parallel
    key = (
        repr((config.model, config.moe)),
        *(job.vocab_size, job.world_size, parallel.tensor, parallel.sequence, parallel.context, parallel.pipeline),
        *(parallel.virtual_pipeline, parallel.expert, derived.expert_tensor_size(config), config.optimizer.distributed),
        parallel.overlap_grad_reduce,
    )
    if key not in _ends:
        kinds: dict[tuple[Any, ...], dict[str, list[tuple[int, ...]]]] = {}
        found = []
        for stage, of_stage in enumerate(model_chunks(config)):
            alike = (*(replace(chunk, first_layer=0) for chunk in of_stage), stage == 0)
            if alike not in kinds:
                laid_out = buffers(job, stage)
                kinds[alike] = {kind: [chunk.bucket_ends for chunk in of_kind] for kind, of_kind in laid_out.items()}
            found.append(kinds[alike])
        _ends[key] = found
        while len(_ends) > KEPT:
            _ends.popitem(last=False)
    return _ends[key]


def _at_most(seconds: Sequence[Seconds]) -> tuple[Seconds, ...]:
    """Merge the seconds of consecutive tasks, so that at most MOST_TASKS (8) tasks remain."""
    if len(seconds) <= MOST_TASKS:
        return tuple(seconds)
    size = math.ceil(len(seconds) / MOST_TASKS)
    sums = [Reasons() for _ in range(0, len(seconds), size)]
    for index, each in enumerate(seconds):
        sums[index // size].add(each)
    return tuple(sums)


def _tied(
    config: Config, vocab_size: int, hardware: Hardware, groups: Mapping[str, Group], stage: int
) -> dict[str, float]:
    """Return the seconds of all-reducing a tied embedding's gradient, by reason; {} on stages in the middle."""
    stages = config.parallel.pipeline
    if stages == 1 or not config.model.tie_embeddings or stage not in (0, stages - 1):
        return {}
    pipeline = groups["pipeline"]
    pair = Group(2, min(pipeline.in_node, 2) if pipeline.in_node >= stages else 1, pipeline.num_sharing)
    vocab_rows = padded_vocab_size(vocab_size, config.parallel.tensor) // config.parallel.tensor
    seconds = collective(hardware, "all_reduce", pair, vocab_rows * config.model.hidden_size * FP32)
    return {f"gradients:{pair.link}": seconds}


def rates(hardware: Hardware, world_size: int) -> Bandwidths:
    """Return the bandwidths that one rank gets while all ranks of its node use the host and the disk."""
    ranks = min(hardware["ranks_per_node"], world_size)
    link = min(hardware["host.link_shared_by"], ranks)
    return Bandwidths(
        up=hardware["host.up"] / link,
        down=hardware["host.down"] / link,
        host=min(hardware["host.update"], hardware["host.rate"] / ranks),
        device=hardware["device.rate"],
        read=hardware["disk.read"] / ranks,
        write=hardware["disk.write"] / ranks,
        memory=hardware["host.rate"] / ranks,
    )


def _offloaded(
    arrangement: Arrangement, config: Config, hardware: Hardware, world_size: int
) -> tuple[Seconds, tuple[BucketJob, ...], bool]:
    """Return the seconds of a rank's optimizer update on the device, and the updates of its offloaded buckets.

    The last value is whether updates of offloaded buckets may start during the backward pass.
    """
    element, of = ElementBytes.of(arrangement), rates(hardware, world_size)
    early = any(arrangement.early)
    numels, targets = arrangement.numels, arrangement.targets
    engines: Sequence[BucketEngine] = arrangement.engines
    if arrangement.flexible:
        own = [(n, target) for n, target, engine in zip(numels, targets, engines, strict=True) if engine != "record"]
        own_numels, own_targets = tuple(n for n, _ in own), tuple(target for _, target in own)
        chosen = iter(_chosen(config.optimizer.engine, own_numels, own_targets, element, of))
        engines = [engine if engine == "record" else next(chosen) for engine in engines]
    update, jobs = 0.0, list[BucketJob]()
    for engine, target, numel, leaves in zip(engines, targets, numels, arrangement.leaving, strict=True):
        if engine == "record":  # experts: see streams.py
            continue
        needs = work(engine, target == "disk", numel, element, of, early)
        if engine == "device":
            update += needs.device
            continue
        read = numel * element.record / of.read if target == "disk" else 0.0
        down = needs.down - (needs.leaving if leaves else 0.0)
        up, away = ("host up", "host_link", needs.up), ("host down", "host_link", down)
        if engine == "host":
            middle = [away, ("host", "host_update", needs.host), up]
        else:
            middle = [up, ("update", "update", needs.device), away]
        steps = [("disk", "disk", read), *middle, ("disk", "disk", needs.disk - read)]
        jobs.append(BucketJob(tuple(step for step in steps if step[2] > 0)))
    return {"update": update}, tuple(jobs), early


@lru_cache(maxsize=KEPT)
def _chosen(
    engine: str, numels: tuple[int, ...], targets: tuple[Target, ...], element: ElementBytes, of: Bandwidths
) -> tuple[BucketEngine, ...]:
    return tuple(choose(engine, numels, targets, element, of))
