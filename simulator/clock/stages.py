"""What a pipeline stage has to do in a step beside its passes: reduce gradients, update, gather weights."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from configs import derived
from configs.schema import Config
from models.blueprint import padded_vocab_size, parts
from optim.arrangement.arrange import Arrangement, Capacity, Tier
from optim.arrangement.planning import Bandwidths, ElementBytes, Way, choose, work
from simulator.buffers import buffers
from simulator.clock.axes import DENSE_COPIES, EXPERT_COPIES, Group, collective
from simulator.clock.hardware import Hardware
from simulator.clock.work import Recipe
from simulator.parameters import places
from simulator.sizes import FP32
from simulator.tiers import TierPlan

# Of a number: both moments and the gradient are read, and the moments written; the master and the weight too.
MOMENT_BYTES, MASTER_BYTES = 5 * FP32, 2 * FP32
MOST_PIECES = 8  # into which a pass is cut for what goes on beside it
GROUP_OF_KIND = {"dense": DENSE_COPIES, "expert": EXPERT_COPIES}
Seconds = Mapping[str, float]  # by reason
KEPT = 4096  # layouts whose buckets are remembered
_ends: OrderedDict[Any, list[dict[str, list[tuple[int, ...]]]]] = OrderedDict()


@dataclass(frozen=True)
class BucketJob:
    """What is done for a bucket of optimizer state off the device: (resource, reason, seconds) one after the other."""

    parts: tuple[tuple[str, str, float], ...]


@dataclass(frozen=True)
class StageRest:
    """What one rank of a stage has to do: reductions of each model chunk's gradients in the order in which they are
    ready, gathers of its weights in the order of use, the update on the device, jobs of buckets elsewhere."""

    reductions: tuple[tuple[Seconds, ...], ...]
    gathers: tuple[tuple[Seconds, ...], ...]
    update: Seconds
    jobs: tuple[BucketJob, ...]
    early: bool  # jobs go on beside the backward pass
    tied: Seconds  # the sum of a tied embedding's gradients over the first and the last stage


def stage_rest(
    config: Config,
    vocab_size: int,
    world_size: int,
    hardware: Hardware,
    groups: Mapping[str, Group],
    recipe: Recipe,
    arrangements: Sequence[Arrangement | None] | None,
) -> list[StageRest]:
    """By stage. `arrangements`: of optimizer state in tiers, of a rank of each stage; None: as the config asks for it
    where there is room for all."""
    element, distributed = derived.element_size(config), config.optimizer.distributed
    ends = bucket_ends(config, vocab_size, world_size)
    if arrangements is None:
        arrangements = _arrangements(config, vocab_size, world_size, hardware)
    result = []
    for stage in range(config.parallel.pipeline):
        reductions: list[tuple[Seconds, ...]] = []
        gathers: list[tuple[Seconds, ...]] = []
        owned = 0.0
        of_kind = ends[stage]
        for chunk in range(config.parallel.virtual_pipeline or 1):
            reduced, gathered = list[Seconds](), list[Seconds]()
            for kind, of_chunk in of_kind.items():
                group, start = groups[GROUP_OF_KIND[kind]], 0
                name = group.place
                for end in of_chunk[chunk]:
                    numbers, start = end - start, end
                    owned += numbers / (group.size if distributed else 1)
                    if group.size == 1:
                        continue
                    way = "reduce_scatter" if distributed else "all_reduce"
                    reduced.append(
                        {f"gradients:{name}": collective(hardware, way, group, numbers * recipe.gradient_bytes)}
                    )
                    if distributed:
                        gathered.append(
                            {f"weights:{name}": collective(hardware, "all_gather", group, numbers * element)}
                        )
            reductions.append(_at_most(reduced))
            gathers.append(_at_most(gathered[::-1]))  # buckets lie in reverse order
        tiers = arrangements[stage] if derived.has_tiers(config) else None
        if tiers is None:
            per_number = MOMENT_BYTES + FP32 + element if element == FP32 else MOMENT_BYTES + MASTER_BYTES + element
            update: Seconds = {"update": owned * per_number / hardware["device.rate"]}
            jobs, early = tuple[BucketJob, ...](), False
        else:
            update, jobs, early = _tiered(tiers, config, hardware, world_size)
        tied = _tied(config, vocab_size, hardware, groups, stage)
        result.append(StageRest(tuple(reductions), tuple(gathers), update, jobs, early, tied))
    return result


def bucket_ends(config: Config, vocab_size: int, world_size: int) -> list[dict[str, list[tuple[int, ...]]]]:
    """Where buckets of gradients end, in numbers of a rank: by stage, kind of weights and model chunk. Stages whose
    buffers are alike are laid out once."""
    parallel = config.parallel
    key = (
        repr((config.model, config.moe)),
        *(vocab_size, world_size, parallel.tensor, parallel.sequence, parallel.context, parallel.pipeline),
        *(parallel.virtual_pipeline, parallel.expert, derived.expert_tensor_size(config), config.optimizer.distributed),
        parallel.overlap_grad_reduce,
    )
    if key not in _ends:
        kinds: dict[tuple[Any, ...], dict[str, list[tuple[int, ...]]]] = {}
        found = []
        for stage, of_stage in enumerate(parts(config)):
            alike = (*(replace(part, first_layer=0) for part in of_stage), stage == 0)
            if alike not in kinds:
                laid_out = buffers(config, vocab_size, world_size, stage)
                kinds[alike] = {kind: [chunk.bucket_ends for chunk in of_kind] for kind, of_kind in laid_out.items()}
            found.append(kinds[alike])
        _ends[key] = found
        while len(_ends) > KEPT:
            _ends.popitem(last=False)
    return _ends[key]


def _at_most(seconds: Sequence[Seconds]) -> tuple[Seconds, ...]:
    """The same in at most MOST_PIECES parts."""
    if len(seconds) <= MOST_PIECES:
        return tuple(seconds)
    size = math.ceil(len(seconds) / MOST_PIECES)
    parts = []
    for first in range(0, len(seconds), size):
        part: dict[str, float] = {}
        for each in seconds[first : first + size]:
            for name, value in each.items():
                part[name] = part.get(name, 0.0) + value
        parts.append(part)
    return tuple(parts)


def _tied(
    config: Config, vocab_size: int, hardware: Hardware, groups: Mapping[str, Group], stage: int
) -> dict[str, float]:
    stages = config.parallel.pipeline
    if stages == 1 or not config.model.tie_embeddings or stage not in (0, stages - 1):
        return {}
    pipeline = groups["pipeline"]
    pair = Group(2, min(pipeline.in_node, 2) if pipeline.in_node >= stages else 1, pipeline.beside)
    rows = padded_vocab_size(vocab_size, config.parallel.tensor) // config.parallel.tensor
    seconds = collective(hardware, "all_reduce", pair, rows * config.model.hidden_size * FP32)
    return {f"gradients:{pair.place}": seconds}


def rates(hardware: Hardware, world_size: int) -> Bandwidths:
    """What a rank gets of its node's host and disk while all others use them too."""
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


def _tiered(
    tiers: Arrangement, config: Config, hardware: Hardware, world_size: int
) -> tuple[Seconds, tuple[BucketJob, ...], bool]:
    element, of = ElementBytes.of(tiers), rates(hardware, world_size)
    early = any(tiers.early)
    ways: Sequence[Way] = tiers.ways
    if tiers.flexible:
        own = [(n, tier) for n, tier, way in zip(tiers.numels, tiers.tiers, ways, strict=True) if way != "record"]
        numels, where = tuple(n for n, _ in own), tuple(tier for _, tier in own)
        chosen = iter(_chosen(config.optimizer.engine, numels, where, element, of))
        ways = [way if way == "record" else next(chosen) for way in ways]
    update, jobs = 0.0, list[BucketJob]()
    for way, tier, numel, leaves in zip(ways, tiers.tiers, tiers.numels, tiers.leaving, strict=True):
        if way == "record":  # see streams.py
            continue
        needs = work(way, tier == "disk", numel, element, of, early)
        if way == "device":
            update += needs.device
            continue
        read = numel * element.record / of.read if tier == "disk" else 0.0
        down = needs.down - (needs.leaving if leaves else 0.0)
        up, away = ("host up", "host_link", needs.up), ("host down", "host_link", down)
        if way == "host":
            middle = [away, ("host", "host_update", needs.host), up]
        else:
            middle = [up, ("update", "update", needs.device), away]
        parts = [("disk", "disk", read), *middle, ("disk", "disk", needs.disk - read)]
        jobs.append(BucketJob(tuple(part for part in parts if part[2] > 0)))
    return {"update": update}, tuple(jobs), early


@lru_cache(maxsize=KEPT)
def _chosen(
    engine: str, numels: tuple[int, ...], tiers: tuple[Tier, ...], element: ElementBytes, of: Bandwidths
) -> tuple[Way, ...]:
    return tuple(choose(engine, numels, tiers, element, of))


def _arrangements(config: Config, vocab_size: int, world_size: int, hardware: Hardware) -> list[Arrangement | None]:
    if not derived.has_tiers(config):
        return [None] * config.parallel.pipeline
    plan = TierPlan(config, vocab_size, world_size, Capacity(device=hardware["device.memory"]))
    first = {place.stage: place for place in reversed(list(places(config, world_size)))}
    return [plan.of(first[stage], 0) for stage in range(config.parallel.pipeline)]
